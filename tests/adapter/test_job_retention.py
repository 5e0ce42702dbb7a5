from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest
from diffusion_backend.errors import DiffusionError
from jobs import CALLER, KIND, claim, create, expire, row, shift
from openai_adapter.database import Database
from openai_adapter.job_files import JobFiles
from openai_adapter.job_queue import Claim, JobQueue
from openai_adapter.job_retention import Limits, Removed, enforce_retention, sweep_forever
from openai_adapter.job_store import JobStore
from openai_adapter.job_table import Job, JobStatus
from openai_adapter.metrics import Metrics

from openai_adapter import job_retention

FOREVER = Limits(max_bytes=None, tombstone_seconds=500)
NOTHING = Removed(0, 0, 0, 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "files"


def complete(queue: JobQueue, files: JobFiles, size: int = 10) -> Job:
    """Work on the next job until it is done."""
    claimed = claim(queue)
    return queue.complete(claimed, {"video": files.put(claimed, "video.mp4", b"v" * size)})


def names(files: JobFiles) -> list[str]:
    return sorted(file.name for file in files.find_all())


def ids(store: JobStore) -> list[str]:
    return [job.id for job in store.list_page(KIND, CALLER, limit=100, order="asc").data]


def age_file(folder: Path, name: str, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(folder / name, (then, then))


def test_nothing_is_removed_before_its_time(
    database: Database, store: JobStore, queue: JobQueue, files: JobFiles
) -> None:
    assert enforce_retention(database, files, FOREVER) == NOTHING
    create(store, 3)
    done = complete(queue, files)
    claimed = claim(queue)
    files.put(claimed, "video.mp4", b"not published yet")
    assert enforce_retention(database, files, Limits(10, 500)) == NOTHING
    assert len(ids(store)) == 3
    assert len(names(files)) == 2
    assert files.read(done.files["video"]["name"]) is not None


def test_jobs_expire(database: Database, store: JobStore, queue: JobQueue, files: JobFiles) -> None:
    jobs = create(store, 4)
    expired = [complete(queue, files).id, queue.fail(claim(queue), "code", "message").id]
    complete(queue, files)
    for job_id in expired:
        shift(database, job_id, expires_at=-queue.ttl - 1)
    assert enforce_retention(database, files, FOREVER) == Removed(2, 0, 0, 0)
    assert ids(store) == [job.id for job in jobs[2:]]
    assert len(names(files)) == 1
    assert store.list_page(KIND, CALLER, after=expired[0], order="asc").first_id == jobs[2].id


def test_the_jobs_completed_first_make_room(
    database: Database, store: JobStore, queue: JobQueue, files: JobFiles
) -> None:
    create(store, 6)
    claims = [claim(queue) for _ in range(5)]
    in_order = [claims[number] for number in (2, 0, 4, 1, 3)]
    for each in in_order:
        queue.complete(each, {"video": files.put(each, "video.mp4", b"v" * 10)})
    assert enforce_retention(database, files, Limits(50, 500)) == NOTHING
    assert enforce_retention(database, files, Limits(25, 500)) == Removed(0, 3, 0, 0)
    assert names(files) == sorted(f"{each.job.id}.1.video.mp4" for each in in_order[3:])
    assert len(ids(store)) == 3
    assert enforce_retention(database, files, Limits(25, 500)) == NOTHING


def test_many_jobs_expire(database: Database, store: JobStore, queue: JobQueue, files: JobFiles) -> None:
    """More than fit in one transaction."""
    for job in create(store, 205):
        shift(database, complete(queue, files).id, expires_at=-queue.ttl - 1)
        assert job.sequence
    assert enforce_retention(database, files, FOREVER) == Removed(205, 0, 0, 0)
    assert (ids(store), names(files)) == ([], [])
    with database.writing() as session:
        session.query(Job).update({"deleted_at": Job.deleted_at - 501})
    assert enforce_retention(database, files, FOREVER) == Removed(0, 0, 205, 0)


def test_several_adapters_make_no_more_room_than_is_needed(
    database: Database, store: JobStore, queue: JobQueue, files: JobFiles
) -> None:
    create(store, 40)
    for _ in range(40):
        complete(queue, files)
    removed = []

    def sweep() -> None:
        removed.append(enforce_retention(database, files, Limits(200, 500)))

    threads = [threading.Thread(target=sweep) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(each.by_bytes for each in removed) == 20
    assert (len(ids(store)), len(names(files))) == (20, 20)


def test_tombstones_are_kept_for_a_while(database: Database, store: JobStore, files: JobFiles) -> None:
    jobs = create(store, 2)
    store.delete(KIND, CALLER, jobs[0].id)
    assert enforce_retention(database, files, FOREVER) == NOTHING
    assert store.list_page(KIND, CALLER, after=jobs[0].id, order="asc").first_id == jobs[1].id
    shift(database, jobs[0].id, deleted_at=-501)
    assert enforce_retention(database, files, FOREVER) == Removed(0, 0, 1, 0)
    assert row(database, jobs[0].id) is None
    with pytest.raises(DiffusionError):
        store.list_page(KIND, CALLER, after=jobs[0].id)


def test_a_sequence_is_never_used_twice(database: Database, store: JobStore, files: JobFiles) -> None:
    old = create(store)[0]
    store.delete(KIND, CALLER, old.id)
    shift(database, old.id, deleted_at=-501)
    enforce_retention(database, files, FOREVER)
    assert create(store)[0].sequence > old.sequence


def put(files: JobFiles, claimed: Claim) -> str:
    return files.put(claimed, "video.mp4", b"of an attempt")["name"]


def test_files_of_attempts_that_were_lost_are_removed(
    database: Database, store: JobStore, queue: JobQueue, files: JobFiles
) -> None:
    create(store, 5)
    taken_over, released, deleted, failed, running = (claim(queue) for _ in range(5))
    for each in (taken_over, released, deleted, failed, running):
        put(files, each)
    queue.release(released, counts=True)
    store.delete(KIND, CALLER, deleted.job.id)
    queue.fail(failed, "code", "message")
    expire(database, taken_over)
    again = claim(queue, job_id=taken_over.job.id)
    kept = {put(files, again), put(files, running)}
    assert enforce_retention(database, files, FOREVER) == Removed(0, 0, 0, 4)
    assert set(names(files)) == kept
    queue.complete(again, {"video": {"name": f"{again.job.id}.{again.token}.video.mp4", "bytes": 13}})
    assert enforce_retention(database, files, FOREVER) == NOTHING


def test_unfinished_files_of_finished_jobs_are_removed(
    database: Database, store: JobStore, queue: JobQueue, files: JobFiles, folder: Path
) -> None:
    create(store)
    done = complete(queue, files)
    (folder / f"{done.id}.1.thumbnail.webp.tmp").write_bytes(b"half")
    assert enforce_retention(database, files, FOREVER) == Removed(0, 0, 0, 1)
    assert names(files) == [done.files["video"]["name"]]


def test_files_of_another_database_are_kept_as_long_as_it_may_want_them(
    database: Database, files: JobFiles, folder: Path
) -> None:
    strange = files.put(Claim(Job(id=f"video_{'0' * 32}"), 1, 1), "video.mp4", b"another's")["name"]
    assert enforce_retention(database, files, FOREVER) == NOTHING
    age_file(folder, strange, 501)
    assert enforce_retention(database, files, FOREVER) == Removed(0, 0, 0, 1)


def test_a_crash_between_the_deletion_and_its_files(
    database: Database, store: JobStore, queue: JobQueue, files: JobFiles
) -> None:
    create(store)
    done = complete(queue, files)
    store.delete(KIND, CALLER, done.id)
    assert len(names(files)) == 1
    assert enforce_retention(database, files, FOREVER) == Removed(0, 0, 0, 1)
    assert names(files) == []


def test_the_sweep_counts_and_goes_on_after_a_failure(
    database: Database,
    store: JobStore,
    queue: JobQueue,
    files: JobFiles,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    create(store, 3, max_attempts=1)
    shift(database, complete(queue, files).id, expires_at=-queue.ttl - 1)
    complete(queue, files)
    lost = claim(queue)
    expire(database, lost)
    metrics = Metrics()
    monkeypatch.setattr(job_retention, "_SWEEP_SECONDS", 0.05)
    enforce, rounds = enforce_retention, []

    def enforce_after_a_failure(*arguments: object) -> Removed:
        rounds.append(arguments)
        if len(rounds) == 1:
            raise OSError("the disk is away")
        return enforce(*arguments)

    monkeypatch.setattr(job_retention, "enforce_retention", enforce_after_a_failure)

    async def sweep() -> None:
        task = asyncio.create_task(sweep_forever(database, queue, files, Limits(5, 500), metrics))
        while len(rounds) < 4:
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(sweep(), 30))
    assert "the sweep of jobs failed" in caplog.text
    value = metrics.registry.get_sample_value
    assert value("openai_adapter_jobs_removed_total", {"reason": "age"}) == 1
    assert value("openai_adapter_jobs_removed_total", {"reason": "bytes"}) == 1
    assert value("openai_adapter_job_orphans_total") == 0
    failed = store.get(KIND, CALLER, lost.job.id)
    assert failed is not None
    assert failed.status is JobStatus.FAILED


def test_a_job_that_nobody_finishes_is_removed(
    database: Database, store: JobStore, queue: JobQueue, files: JobFiles
) -> None:
    """Where it has a time to live: queued, or left by a worker that is gone; others wait for ever."""
    (waits,) = create(store)
    waiting, left, young = (create(store, ttl=500)[0] for _ in range(3))
    claimed = claim(queue, job_id=left.id)
    files.put(claimed, "video.mp4", b"v")
    for job in (waiting, left):
        shift(database, job.id, expires_at=-501)
    assert enforce_retention(database, files, FOREVER) == Removed(2, 0, 0, 1)
    assert ids(store) == [waits.id, young.id]
    assert claim(queue).job.id == waits.id


def test_a_video_beyond_the_limit_by_itself(
    database: Database, store: JobStore, queue: JobQueue, files: JobFiles
) -> None:
    (job,) = create(store)
    complete(queue, files, size=10)
    limits = Limits(max_bytes=9, tombstone_seconds=500)
    assert enforce_retention(database, files, limits) == Removed(0, 1, 0, 0)
    assert enforce_retention(database, files, limits) == NOTHING
    assert (store.get(KIND, CALLER, job.id), names(files)) == (None, [])
