"""The end of an attempt, and its lease: whatever comes between, the files are published or gone."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from jobs import CALLER, KIND, expire, new_job
from openai_adapter.async_jobs import AsyncJobs
from openai_adapter.database import Database
from openai_adapter.job_files import JobFiles
from openai_adapter.job_lease import Lease
from openai_adapter.job_publishing import publish
from openai_adapter.job_queue import Claim, JobQueue, LeaseLostError
from openai_adapter.job_table import JobStatus

from openai_adapter import job_publishing

PARTS = {"video.mp4": b"video", "thumbnail.webp": b"thumbnail"}


async def begin(jobs: AsyncJobs) -> Claim:
    await jobs.create(new_job())
    claimed = await jobs.claim(KIND, "worker", 1000)
    assert claimed is not None
    return claimed


async def status(jobs: AsyncJobs, claim: Claim) -> JobStatus | None:
    job = await jobs.get(KIND, CALLER, claim.job.id)
    return None if job is None else job.status


def test_publish(jobs: AsyncJobs, files: JobFiles) -> None:
    async def run() -> None:
        claim = await begin(jobs)
        await publish(jobs, files, claim, PARTS, {"seed": 1})
        job = await jobs.get(KIND, CALLER, claim.job.id)
        assert job is not None
        assert {part: files.read(entry["name"]) for part, entry in job.files.items()} == {
            "video": b"video",
            "thumbnail": b"thumbnail",
        }

    asyncio.run(run())


def test_a_job_that_was_taken_over(jobs: AsyncJobs, files: JobFiles, database: Database) -> None:
    """The one that was away is refused, and leaves no files; those of the other one stay."""

    async def run() -> None:
        first = await begin(jobs)
        expire(database, first)
        second = await jobs.claim(KIND, "other", 1000)
        assert second is not None
        await publish(jobs, files, second, PARTS, {})
        with pytest.raises(LeaseLostError):
            await publish(jobs, files, first, PARTS, {})
        assert {file.token for file in files.find_all()} == {second.token}

    asyncio.run(run())


def test_a_store_that_is_away_for_a_moment(
    jobs: AsyncJobs, files: JobFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work is done: it is not done again."""
    put, refusals = JobFiles.put, 3

    def put_in_the_end(self: JobFiles, claim: Claim, part: str, data: bytes) -> Any:
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            raise OSError(30, "Read-only file system")
        return put(self, claim, part, data)

    monkeypatch.setattr(JobFiles, "put", put_in_the_end)
    monkeypatch.setattr(job_publishing, "PAUSE_SECONDS", 0.01)

    async def run() -> None:
        claim = await begin(jobs)
        await publish(jobs, files, claim, PARTS, {}, patience=10)
        assert len(files.find_all()) == len(PARTS)
        assert await status(jobs, claim) is JobStatus.COMPLETED

    asyncio.run(run())


def test_a_store_that_takes_no_more(
    jobs: AsyncJobs, files: JobFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was stored before is removed."""
    put = JobFiles.put

    def put_or_refuse(self: JobFiles, claim: Claim, part: str, data: bytes) -> Any:
        if part == "thumbnail.webp":
            raise OSError(28, "No space left on device")
        return put(self, claim, part, data)

    monkeypatch.setattr(JobFiles, "put", put_or_refuse)

    async def run() -> None:
        claim = await begin(jobs)
        with pytest.raises(OSError, match="No space"):
            await publish(jobs, files, claim, PARTS, {})
        assert files.find_all() == []
        assert await status(jobs, claim) is JobStatus.IN_PROGRESS

    asyncio.run(run())


def test_a_cancel_while_files_are_stored(
    jobs: AsyncJobs, files: JobFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that a thread still writes is removed, too."""
    storing = threading.Event()
    put = JobFiles.put

    def put_slowly(self: JobFiles, claim: Claim, part: str, data: bytes) -> Any:
        storing.set()
        time.sleep(0.3)
        return put(self, claim, part, data)

    monkeypatch.setattr(JobFiles, "put", put_slowly)

    async def run() -> None:
        publishing = asyncio.create_task(publish(jobs, files, await begin(jobs), PARTS, {}))
        await asyncio.to_thread(storing.wait)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert files.find_all() == []

    asyncio.run(run())


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_cancel_while_the_job_is_completed(
    jobs: AsyncJobs, files: JobFiles, monkeypatch: pytest.MonkeyPatch, is_deleted: bool
) -> None:
    """The database decides: what it has completed is, and what it refuses leaves no files."""
    completing = threading.Event()
    complete = JobQueue.complete

    def complete_slowly(*arguments: Any) -> Any:
        completing.set()
        time.sleep(0.3)
        return complete(jobs.queue, *arguments)

    monkeypatch.setattr(jobs, "complete", lambda *a: asyncio.to_thread(complete_slowly, *a))

    async def run() -> None:
        claim = await begin(jobs)
        publishing = asyncio.create_task(publish(jobs, files, claim, PARTS, {}))
        await asyncio.to_thread(completing.wait)
        if is_deleted:
            await jobs.delete(KIND, CALLER, claim.job.id)
        publishing.cancel()
        if is_deleted:
            with pytest.raises(LeaseLostError):
                await publishing
        else:
            await publishing
        assert await status(jobs, claim) is (None if is_deleted else JobStatus.COMPLETED)
        assert len(files.find_all()) == (0 if is_deleted else 2)

    asyncio.run(run())


def test_a_lease_that_ends_with_the_publication_is_not_lost(
    jobs: AsyncJobs, files: JobFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renewal that finds the job completed is no reason to call the work lost."""
    complete = JobQueue.complete

    def complete_slowly(*arguments: Any) -> Any:
        job = complete(jobs.queue, *arguments)
        jobs_loop.call_soon_threadsafe(lease.report, 60)  # renewed now
        time.sleep(0.5)
        return job

    monkeypatch.setattr(jobs, "complete", lambda *a: asyncio.to_thread(complete_slowly, *a))

    async def run() -> None:
        nonlocal lease, jobs_loop
        jobs_loop = asyncio.get_running_loop()
        claim = await begin(jobs)
        lease = Lease(jobs, claim)
        await lease.hold(publish(jobs, files, claim, PARTS, {}), 20)
        assert await status(jobs, claim) is JobStatus.COMPLETED

    lease: Lease
    jobs_loop: asyncio.AbstractEventLoop
    asyncio.run(run())
