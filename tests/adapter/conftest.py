"""What the adapter's tests share: an app whose Triton is down, and an adapter as a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from adapter_process import AdapterProcess
from fastapi import FastAPI

from openai_adapter import Settings, create_app


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
        if adapter.process.poll() is None:
            adapter.process.kill()
            adapter.process.wait()
