"""Work on a claimed job while its lease is renewed, on a database of each kind."""

from __future__ import annotations

import asyncio
import time

import pytest
from jobs import CALLER, KIND, claim, create, row, shift
from openai_adapter.async_jobs import AsyncJobs
from openai_adapter.database import Database
from openai_adapter.job_lease import Lease, insist, worker_name
from openai_adapter.job_queue import Claim, LeaseLostError
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from openai_adapter import job_lease

HEARTBEAT = 0.1


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_lease, "HEARTBEAT_SECONDS", HEARTBEAT)
    monkeypatch.setattr(job_lease, "PAUSE_SECONDS", 0.01)


@pytest.fixture
def claimed(jobs: AsyncJobs) -> Claim:
    create(jobs.store)
    return claim(jobs.queue, lease_seconds=5)


def test_work_that_ends(jobs: AsyncJobs, claimed: Claim, database: Database) -> None:
    async def run() -> str:
        lease = Lease(jobs, claimed)

        async def work() -> str:
            for percent in (10, 30, 20):
                lease.report(percent)
                await asyncio.sleep(HEARTBEAT)
            return "made"

        return await lease.hold(work(), 60)

    shift(database, claimed.job.id, lease_until=-1000)
    assert asyncio.run(run()) == "made"
    job = row(database, claimed.job.id)
    assert job is not None
    assert job.progress == 30
    assert job.lease_until is not None
    assert time.time() < job.lease_until <= time.time() + 5


def test_work_that_fails(jobs: AsyncJobs, claimed: Claim) -> None:
    async def work() -> None:
        await asyncio.sleep(HEARTBEAT)
        raise KeyError("what went wrong")

    with pytest.raises(KeyError, match="what went wrong"):
        asyncio.run(Lease(jobs, claimed).hold(work(), 60))


def hold_endless_work(jobs: AsyncJobs, claimed: Claim, seconds: float) -> bool:
    """Raises what holding does; whether the work was cancelled is in ``cancelled`` of the job's id."""
    cancelled = False

    async def work() -> None:
        nonlocal cancelled
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            cancelled = True
            raise

    try:
        asyncio.run(Lease(jobs, claimed).hold(work(), seconds))
    except (LeaseLostError, job_lease.WorkTooLongError):
        assert cancelled
        raise
    return cancelled


def test_work_that_takes_too_long_is_cancelled(jobs: AsyncJobs, claimed: Claim) -> None:
    with pytest.raises(job_lease.WorkTooLongError):
        hold_endless_work(jobs, claimed, 3 * HEARTBEAT)


def test_work_on_a_job_that_was_deleted_is_cancelled(jobs: AsyncJobs, claimed: Claim) -> None:
    jobs.store.delete(KIND, CALLER, claimed.job.id)
    with pytest.raises(LeaseLostError):
        hold_endless_work(jobs, claimed, 60)


def test_work_on_a_job_that_another_has_is_cancelled(
    jobs: AsyncJobs, claimed: Claim, database: Database
) -> None:
    shift(database, claimed.job.id, lease_until=-1000)
    assert claim(jobs.queue).job.id == claimed.job.id
    with pytest.raises(LeaseLostError):
        hold_endless_work(jobs, claimed, 60)


def test_the_work_goes_on_while_the_database_is_away(
    jobs: AsyncJobs, claimed: Claim, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the lease is renewed, with the progress, when it is back."""
    report, failures = jobs.report_progress, 0

    async def report_or_fail(claim: Claim, percent: int) -> None:
        nonlocal failures
        if failures < 3:
            failures += 1
            raise OperationalError("UPDATE", {}, Exception("the connection is closed"))
        await report(claim, percent)

    monkeypatch.setattr(jobs, "report_progress", report_or_fail)
    lease = Lease(jobs, claimed)

    async def work() -> str:
        lease.report(40)
        while (job := row(database, claimed.job.id)) is not None and job.progress < 40:
            await asyncio.sleep(HEARTBEAT)
        return "made"

    assert asyncio.run(lease.hold(work(), 30)) == "made"
    assert failures == 3


def test_insisting() -> None:
    attempts = 0

    async def write() -> str:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise OperationalError("UPDATE", {}, Exception("the connection is closed"))
        return "written"

    assert asyncio.run(insist(write)) == "written"
    assert attempts == 3


def test_insisting_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_lease, "INSIST_SECONDS", 0.05)

    async def write() -> None:
        raise OperationalError("UPDATE", {}, Exception("the connection is closed"))

    async def lose() -> None:
        raise LeaseLostError("job")

    with pytest.raises(SQLAlchemyError):
        asyncio.run(insist(write))
    with pytest.raises(LeaseLostError):
        asyncio.run(insist(lose))


def test_a_worker_has_a_name_of_its_own() -> None:
    host, _, process = worker_name().rpartition(":")
    assert host
    assert process.isdecimal()
