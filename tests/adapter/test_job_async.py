from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from jobs import CALLER, KIND, key, new_job
from openai_adapter.async_jobs import AsyncJobs
from openai_adapter.database import Database, Lock
from openai_adapter.job_queue import Claim, JobQueue, LeaseLostError
from openai_adapter.job_table import JobStatus


def test_a_life_of_a_job(jobs: AsyncJobs) -> None:
    async def live() -> None:
        created = await jobs.create(new_job(idempotency=key()))
        assert (await jobs.create(new_job(idempotency=key()))).job.id == created.job.id
        claimed = await jobs.claim(KIND, "worker", 100)
        assert claimed is not None
        await jobs.heartbeat(claimed)
        await jobs.report_progress(claimed, 40)
        await jobs.complete(claimed, {}, result={"seed": 1})
        done = await jobs.get(KIND, CALLER, created.job.id)
        assert done is not None
        assert (done.status, done.result) == (JobStatus.COMPLETED, {"seed": 1})
        page = await jobs.list_page(KIND, CALLER, limit=1, order="asc")
        assert page.first_id == done.id
        assert await jobs.delete(KIND, CALLER, done.id) is not None
        with pytest.raises(LeaseLostError):
            await jobs.fail(claimed, "code", "message")
        assert await jobs.claim(KIND, "worker", 100) is None

    asyncio.run(live())


def test_a_claim_whose_caller_was_cancelled_is_given_back(
    jobs: AsyncJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that is stopped while it claims holds nothing, and this was no attempt."""
    claimed_in_thread = threading.Event()
    claim_now = JobQueue.claim

    def claim_slowly(self: JobQueue, *arguments: Any, **which: Any) -> Claim | None:
        try:
            return claim_now(self, *arguments, **which)
        finally:
            claimed_in_thread.set()
            time.sleep(0.2)

    monkeypatch.setattr(jobs, "_claim", lambda *a, **k: asyncio.to_thread(claim_slowly, jobs.queue, *a, **k))

    async def stop() -> None:
        job = (await jobs.create(new_job())).job
        claiming = asyncio.create_task(jobs.claim(KIND, "worker", 1000))
        await asyncio.to_thread(claimed_in_thread.wait)
        claiming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claiming
        found = await jobs.get(KIND, CALLER, job.id)
        assert found is not None
        assert (found.status, found.attempts) == (JobStatus.QUEUED, 0)

    asyncio.run(stop())


def test_reads_do_not_wait_behind_writes(jobs: AsyncJobs, database: Database) -> None:
    """While another program has the database, or the lock of creations, for itself."""

    async def read_while_locked() -> None:
        job = (await jobs.create(new_job())).job
        with database.writing(Lock.CREATE):
            creating = [asyncio.create_task(jobs.create(new_job())) for _ in range(20)]
            await asyncio.sleep(0)
            assert await asyncio.wait_for(jobs.get(KIND, CALLER, job.id), 5) is not None
            assert not any(task.done() for task in creating)
        await asyncio.gather(*creating)
        assert len((await jobs.list_page(KIND, CALLER, limit=100)).data) == 21

    asyncio.run(read_while_locked())


def test_heartbeats_do_not_wait_behind_other_work_of_threads(jobs: AsyncJobs) -> None:
    async def encode_and_beat() -> None:
        await jobs.create(new_job())
        claimed = await jobs.claim(KIND, "worker", 1000)
        assert claimed is not None
        done = threading.Event()
        encoding = [asyncio.create_task(asyncio.to_thread(done.wait)) for _ in range(100)]
        await asyncio.sleep(0)
        try:
            await asyncio.wait_for(jobs.heartbeat(claimed), 20)
        finally:
            done.set()
        await asyncio.gather(*encoding)

    asyncio.run(encode_and_beat())
