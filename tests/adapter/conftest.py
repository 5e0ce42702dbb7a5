"""What the adapter's tests share: an app whose Triton is down, an adapter as a process of its own, and databases."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from adapter_process import AdapterProcess
from diffusion_backend.processes import LaunchError
from fastapi import FastAPI
from openai_adapter.async_jobs import AsyncJobs
from openai_adapter.database import Database
from openai_adapter.job_files import JobFiles
from openai_adapter.job_queue import JobQueue
from openai_adapter.job_store import JobStore
from video_server import VideoServer, running_video_server

from openai_adapter import Settings, create_app
from tests.postgres import new_database, running_postgres

TTL = 1000.0


@pytest.fixture
def make_app(tmp_path: Path) -> Callable[..., FastAPI]:
    """Builds an app from settings; its files are in the test's folder."""

    def make(**settings: Any) -> FastAPI:
        return create_app(Settings(triton_url="127.0.0.1:1", data_dir=tmp_path, **settings))

    return make


@pytest.fixture
def app(make_app: Callable[..., FastAPI]) -> FastAPI:
    """The app with default settings."""
    return make_app()


@pytest.fixture
def start_adapter(tmp_path: Path) -> Iterator[Callable[..., AdapterProcess]]:
    """Starts adapters that end with the test."""
    started: list[AdapterProcess] = []

    def start(*flags: str, **environment: str) -> AdapterProcess:
        started.append(AdapterProcess(tmp_path, *flags, **environment))
        return started[-1]

    yield start
    for adapter in started:
        adapter.end()


@pytest.fixture(scope="session")
def video_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VideoServer]:
    """A tritonserver with models for video."""
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(running_video_server(tmp_path_factory.mktemp("videos")))
        except LaunchError as error:
            pytest.fail(f"the server of videos did not start: {error}", pytrace=False)
        yield server


@pytest.fixture(scope="module")
def video_adapter(
    video_server: VideoServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AdapterProcess]:
    """An adapter on the server of videos, with the settings that it has by itself."""
    adapter = AdapterProcess(tmp_path_factory.mktemp("adapter"), *video_server.flags)
    try:
        adapter.wait("/health")
        yield adapter
    finally:
        adapter.end()


@pytest.fixture
def start_video_adapter(
    start_adapter: Callable[..., AdapterProcess], video_server: VideoServer
) -> Callable[..., AdapterProcess]:
    """Starts adapters on the server of videos, with further flags; they share the test's folder of data."""

    def start(*flags: str) -> AdapterProcess:
        adapter = start_adapter(*video_server.flags, *flags)
        adapter.wait("/health")
        return adapter

    return start


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a Postgres server."""
    with contextlib.ExitStack() as stack:
        try:
            url = stack.enter_context(running_postgres())
        except LaunchError as error:
            pytest.fail(f"there is no Postgres for the tests: {error}", pytrace=False)
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database of each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'jobs.sqlite3'}"
    else:
        with new_database(request.getfixturevalue("postgres")) as url:
            yield url


@pytest.fixture
def database(empty_database_url: str) -> Iterator[Database]:
    """A database of each kind, with its tables."""
    database = Database(empty_database_url)
    database.upgrade()
    yield database
    database.close()


@pytest.fixture
def store(database: Database) -> JobStore:
    """The store of jobs, as clients see it."""
    return JobStore(database)


@pytest.fixture
def queue(database: Database) -> JobQueue:
    """The queue of jobs, as workers see it."""
    return JobQueue(database, TTL)


@pytest.fixture
def jobs(database: Database) -> Iterator[AsyncJobs]:
    """Both, for an event loop."""
    jobs = AsyncJobs(database, TTL)
    yield jobs
    jobs.close()


@pytest.fixture
def files(tmp_path: Path) -> JobFiles:
    """A store of jobs' files."""
    return JobFiles(f"file://{tmp_path}/files")
