"""Whatever is killed, and whenever: each video is made, is right, and is published once."""

from __future__ import annotations

import os
import random
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from adapter_process import AdapterProcess
from openai_adapter.async_jobs import ANSWER_SECONDS
from openai_adapter.job_lease import LEASE_SECONDS
from openai_adapter.job_table import Job, JobStatus
from sqlalchemy import make_url
from tcp_link import TcpLink
from video_world import PICTURES, Frames, Serving, World, body, serve, wait_for

from tests.postgres import frozen, new_database, own_postgres

pytestmark = pytest.mark.timeout(600)  # tritonserver starts again more than once

SEEDS = 4
STEPS = 30  # so that kills hit work
LONG: dict[str, int] = {"steps": 200, "num_frames": 9}  # a clip that is made for some seconds
FINISH_SECONDS = 240.0


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serve(tmp_path_factory.mktemp("chaos")) as serving:
        yield serving


@pytest.fixture
def make_world(serving: Serving, tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Makes a world of one database."""
    worlds: list[World] = []

    def make(url: str, *flags: str) -> World:
        worlds.append(World(serving, tmp_path, url, flags))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def postgres_url(postgres: str) -> Iterator[str]:
    with new_database(postgres) as url:
        yield url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'jobs.sqlite3'}"


@pytest.fixture(scope="module")
def undisturbed(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> list[Frames]:
    """The frames of each seed, made alone."""
    folder = tmp_path_factory.mktemp("undisturbed")
    world = World(serving, folder, f"sqlite:///{folder / 'jobs.sqlite3'}")
    try:
        adapter = world.start()
        adapter.wait("/health")
        clips = []
        for seed in range(SEEDS):
            job_id = world.post(adapter, seed=seed, steps=STEPS)
            clips.append(world.frames(world.wait(job_id, "completed")))
    finally:
        world.close()
    return clips


def assert_right(frames: Frames, seed: int, undisturbed: list[Frames]) -> None:
    """A clip of a batch may differ from one that was made alone by 1/255: by 1 in YUV, whose weights add up to less."""
    off = [np.abs(frames.astype(int) - other).max() for other in undisturbed]
    print(f"seed {seed}: off by {off[seed]}, from others by {off}")
    assert off[seed] <= 1
    assert sorted(off)[1] > 10, "the seeds cannot be told apart"


@pytest.mark.parametrize(("jobs", "kills"), [(12, 2), pytest.param(60, 12, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("engine", "adapters"), [("postgres", 2), pytest.param("sqlite", 1, marks=pytest.mark.long)]
)
def test_kills_at_random_moments(
    request: pytest.FixtureRequest,
    make_world: Callable[..., World],
    undisturbed: list[Frames],
    engine: str,
    adapters: int,
    jobs: int,
    kills: int,
) -> None:
    """Adapters are killed, and tritonserver once: all jobs end, completed, with the right clip and no file beside."""
    randomness = secrets.randbits(32)
    print(f"seed of the moments: {randomness}")
    choose = random.Random(randomness)
    world = make_world(request.getfixturevalue(f"{engine}_url"))
    for _ in range(adapters):
        world.start().wait("/health")
    started = time.monotonic()

    def submit() -> None:
        for number in range(jobs):
            world.insist(f"job {number}".replace(" ", "-"), seed=number % SEEDS, steps=STEPS)

    with ThreadPoolExecutor(1) as pool:
        submitting = pool.submit(submit)
        for number in range(kills):
            time.sleep(choose.uniform(0.5, 6))
            if number == kills // 2:
                world.serving.kill_tritonserver()
            world.kill(choose.randrange(adapters))
    submitting.result()

    def are_done() -> bool:
        return all(job.completed_at for job in world.rows())

    wait_for(are_done, FINISH_SECONDS, "for all jobs to end")
    seconds = time.monotonic() - started
    rows = world.rows()
    twice = sum(job.token - 1 for job in rows)
    print(f"{engine}: {jobs} jobs, {kills} kills, {seconds:.0f} s; work begun again {twice} times")
    assert [(job.status, job.error_message) for job in rows] == [(JobStatus.COMPLETED, None)] * jobs
    for job in rows:
        assert_right(world.frames(job), job.request["settings"]["seed"], undisturbed)
    print(f"the sweep removed {world.sweep()}")
    published = published_by(rows)
    assert world.names() == published
    assert len(published) == 3 * jobs
    for job in rows:
        assert {entry["name"].split(".")[1] for entry in job.files.values()} == {str(job.token)}


def test_an_adapter_that_is_stopped_gives_its_jobs_back(
    make_world: Callable[..., World], sqlite_url: str
) -> None:
    world = make_world(sqlite_url)
    adapter = world.start()
    adapter.wait("/health")
    ids = [world.post(adapter, **LONG, seed=seed) for seed in range(3)]
    wait_for(lambda: all(world.row(job_id).progress > 0 for job_id in ids[:2]), 60)
    started = time.monotonic()
    assert adapter.stop() == 0
    print(f"stopped within {time.monotonic() - started:.1f} s")
    rows = [world.row(job_id) for job_id in ids]
    assert [(job.status, job.attempts, job.lease_until) for job in rows] == [(JobStatus.QUEUED, 0, None)] * 3
    assert world.names() == set()


def test_an_adapter_that_was_frozen(make_world: Callable[..., World], postgres_url: str) -> None:
    """Its lease runs out, another one makes the video, and what the frozen one has made is refused and removed."""
    world = make_world(postgres_url)
    frozen, other = world.start(), world.start()
    for adapter in (frozen, other):
        adapter.wait("/health")
    job_id = world.post(frozen, **LONG)
    wait_for(lambda: world.row(job_id).progress > 0, 60)
    assert str(world.row(job_id).worker).endswith(f":{frozen.process.pid}")
    os.kill(frozen.process.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: world.row(job_id).token == 2, LEASE_SECONDS + 10)
        done = world.wait(job_id, "completed", 120)
        published = world.names()
    finally:
        os.kill(frozen.process.pid, signal.SIGCONT)
    frozen.wait("/health")
    wait_for(lambda: f"{job_id}: lost" in frozen.log.read_text(), 60)
    after = world.row(job_id)
    assert (after.token, after.files) == (2, done.files)
    assert world.names() == published == published_by([done])


@pytest.mark.parametrize("rounds", [12, pytest.param(150, marks=pytest.mark.long)])
def test_deletions_that_race_completions(
    make_world: Callable[..., World], postgres_url: str, rounds: int
) -> None:
    """Through either adapter: what is deleted is gone, with its files, and without a sweep."""
    choose = random.Random(7)
    world = make_world(postgres_url)
    adapters = [world.start(), world.start()]
    for adapter in adapters:
        adapter.wait("/health")
    found: dict[str, int] = {}
    for number in range(rounds):
        job_id = world.post(adapters[0], seed=number, steps=STEPS)
        time.sleep(choose.uniform(0, 1.2))
        url = f"{choose.choice(adapters).url}/v1/videos/{job_id}"
        status = httpx.get(url, timeout=60).json()["status"]
        found[status] = found.get(status, 0) + 1
        assert httpx.delete(url, timeout=60).json() == {
            "id": job_id,
            "object": "video.deleted",
            "deleted": True,
        }
        assert [httpx.get(url + tail, timeout=60).status_code for tail in ("", "/content")] == [404, 404]
    print(f"deleted while: {found}")
    wait_for(lambda: world.names() == set(), 30, f"for no files: {world.names()}")
    assert world.rows() == []


@pytest.mark.long
def test_a_database_that_is_away_for_a_while(make_world: Callable[..., World], postgres_url: str) -> None:
    """What runs goes on, clients are told to come again, and nothing is lost."""
    world = make_world(postgres_url)
    url = make_url(postgres_url)
    with TcpLink(f"{url.host}:{url.port}") as link:
        port = int(link.address.rpartition(":")[2])
        through = url.set(host="127.0.0.1", port=port).render_as_string(hide_password=False)
        adapter = world.start(database_url=through)
        adapter.wait("/health")
        ids = [world.post(adapter, **LONG, seed=seed) for seed in range(3)]
        wait_for(lambda: world.row(ids[0]).progress > 0, 60)
        link.cut()
        moment = time.monotonic()
        while time.monotonic() < moment + 6:
            for answer in (
                httpx.get(f"{adapter.url}/v1/videos/{ids[0]}", timeout=30),
                httpx.post(f"{adapter.url}/v1/videos", json=body(), timeout=30),
            ):
                assert answer.status_code == 503, answer.text
                assert answer.json()["error"]["message"] == "the database of jobs cannot be used now"
                assert answer.headers["retry-after"]
            assert httpx.get(f"{adapter.url}/health", timeout=30).status_code == 200
        link.mend()
        for job_id in ids:
            world.wait(job_id, "completed", 120)
        assert adapter.process.poll() is None
        assert [job.id for job in world.rows()] == ids
        assert sum(job.token - 1 for job in world.rows()) == 0


@pytest.mark.long
def test_a_database_that_is_frozen(make_world: Callable[..., World]) -> None:
    """For longer than leases last: clients are told so in time, and afterwards all is made, and published once."""
    with own_postgres() as server, new_database(server) as url:
        world = make_world(url)
        adapters = [world.start(), world.start()]
        for adapter in adapters:
            adapter.wait("/health")
        ids = [world.post(adapters[0], **LONG, seed=seed) for seed in range(6)]
        wait_for(lambda: world.row(ids[0]).progress > 0, 60)

        def ask(adapter: AdapterProcess) -> tuple[int, float]:
            started = time.monotonic()
            answer = httpx.get(f"{adapter.url}/v1/videos/{ids[0]}", timeout=60)
            if answer.status_code == 503:
                assert answer.json()["error"]["message"] == "the database of jobs cannot be used now"
                assert answer.headers["retry-after"]
            return answer.status_code, time.monotonic() - started

        with frozen(server), ThreadPoolExecutor(20) as pool:
            thaw = time.monotonic() + LEASE_SECONDS + 2
            answers = list(pool.map(ask, adapters * 10))
            assert [httpx.get(f"{each.url}/health", timeout=5).status_code for each in adapters] == [200] * 2
            print(f"the last answer came after {max(seconds for _, seconds in answers):.1f} s")
            time.sleep(max(0, thaw - time.monotonic()))
        assert {status for status, _ in answers} == {503}
        assert max(seconds for _, seconds in answers) < ANSWER_SECONDS + 2
        for job_id in ids:
            world.wait(job_id, "completed", 120)
        rows = world.rows()
        assert [job.id for job in rows] == ids
        print(f"work begun again {sum(job.token - 1 for job in rows)} times")
        wait_for(lambda: world.names() == published_by(rows), 30, f"for no other files: {world.names()}")
        assert [ask(adapter)[0] for adapter in adapters] == [200] * 2
        world.close()


def published_by(jobs: Sequence[Job]) -> set[str]:
    return {entry["name"] for job in jobs for entry in job.files.values()}


@pytest.mark.parametrize("clock_off", ["-300", pytest.param("300", marks=pytest.mark.long)])
def test_an_adapter_that_is_killed_while_it_makes_a_keyed_image(
    make_world: Callable[..., World], postgres_url: str, clock_off: str
) -> None:
    """Who waits for it in another adapter, and who comes later, get one that is made anew when the lease has run out.

    By the database's clock: that of the other one is minutes off.
    """
    world = make_world(postgres_url)
    killed, other = world.start(), world.start(CLOCK_OFF=clock_off)
    for adapter in (killed, other):
        adapter.wait("/health")
    request = {"model": PICTURES, "prompt": "a fox", "seed": 1, "num_inference_steps": 200}

    def ask(adapter: AdapterProcess, headers: dict[str, str]) -> httpx.Response:
        url = f"{adapter.url}/v1/images/generations"
        return httpx.post(url, json=request, headers=headers, timeout=120)

    key = {"Idempotency-Key": "a-key"}
    with ThreadPoolExecutor(2) as pool:
        lost = pool.submit(ask, killed, key)
        wait_for(lambda: [job.status for job in world.rows()] == [JobStatus.IN_PROGRESS], 30)
        waiting = pool.submit(ask, other, key)
        time.sleep(0.5)
        (job,) = world.rows()
        assert (job.status, job.token) == (JobStatus.IN_PROGRESS, 1), "too late, or taken from who makes it"
        killed.process.kill()
        moment = time.monotonic()
        answers = [waiting.result()]
        seconds = time.monotonic() - moment
        assert isinstance(lost.exception(), httpx.TransportError)
    answers.append(ask(other, key))
    print(f"answered after {seconds:.1f} s")
    assert LEASE_SECONDS - 4 < seconds < LEASE_SECONDS + 15
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    assert answers[0].content == answers[1].content
    (image,), (without_key,) = (answer.json()["data"] for answer in (answers[0], ask(other, {})))
    assert image["b64_json"] == without_key["b64_json"]
    (job,) = world.rows()
    assert (job.status, job.token) == (JobStatus.COMPLETED, 2)
    assert world.names() == published_by([job])


@pytest.mark.long
def test_clocks_that_differ_by_minutes(make_world: Callable[..., World], postgres_url: str) -> None:
    """Nobody takes what another one works on; what is left by one that is gone is taken over in time."""
    world = make_world(postgres_url)
    adapters = [world.start(CLOCK_OFF=off) for off in ("300", "-300")]
    for adapter in adapters:
        adapter.wait("/health")
    for seed in range(4):
        world.post(adapters[0], **LONG, seed=seed)
    wait_for(lambda: all(job.completed_at for job in world.rows()), 120)
    rows = world.rows()
    assert [(job.status, job.token) for job in rows] == [(JobStatus.COMPLETED, 1)] * 4
    assert len({job.worker for job in rows}) == 2, "one has made all of them"
    for job in rows:
        assert abs(time.time() - job.created_at) < 120
    job_id = world.post(adapters[0], **LONG)
    wait_for(lambda: world.row(job_id).progress > 0, 60)
    worker = str(world.row(job_id).worker)
    (maker,) = [adapter for adapter in adapters if worker.endswith(f":{adapter.process.pid}")]
    maker.process.kill()
    assert world.wait(job_id, "completed", LEASE_SECONDS + 30).token == 2


def test_a_store_that_refuses(make_world: Callable[..., World], sqlite_url: str) -> None:
    """The job fails in the end, with no word of the store; the next one passes once the store takes files."""
    world = make_world(sqlite_url)
    world.files_folder.write_text("no folder")
    adapter = world.start(PATIENCE="0.5")
    adapter.wait("/health")
    job_id = world.post(adapter)
    failed = world.wait(job_id, "failed", 60)
    assert (failed.error_code, failed.attempts) == ("server_error", failed.max_attempts)
    assert failed.error_message is not None
    assert "/" not in failed.error_message
    world.files_folder.unlink()
    world.wait(world.post(adapter), "completed")


def test_a_store_that_is_away_for_a_while(make_world: Callable[..., World], sqlite_url: str) -> None:
    """The video is made once, and kept when the store takes it."""
    world = make_world(sqlite_url)
    world.files_folder.write_text("no folder")
    adapter = world.start()
    adapter.wait("/health")
    job_id = world.post(adapter)
    wait_for(lambda: adapter.log.read_text().count("could not be stored") > 3, 30)
    world.files_folder.unlink()
    assert world.wait(job_id, "completed").attempts == 1


@pytest.mark.long
def test_videos_larger_than_all_may_be(make_world: Callable[..., World], sqlite_url: str) -> None:
    """They are removed as soon as they are swept, and the adapter lives on."""
    world = make_world(sqlite_url, "--job-max-bytes", "10", "--job-ttl-seconds", "5")
    adapter = world.start()
    adapter.wait("/health")
    ids = [world.post(adapter, seed=seed) for seed in range(3)]
    wait_for(lambda: world.rows() == [] and world.names() == set(), 60)
    assert [httpx.get(f"{adapter.url}/v1/videos/{job_id}").status_code for job_id in ids] == [404] * 3
