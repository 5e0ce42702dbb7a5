"""Jobs as the tests make and age them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from openai_adapter.database import Database
from openai_adapter.job_queue import Claim, JobQueue
from openai_adapter.job_store import Idempotency, JobStore, NewJob
from openai_adapter.job_table import UNFINISHED, Job, JobStatus
from sqlalchemy import func, select, update

KIND = "video"
CALLER = "digest-of-a-key"
LEASE = 1000.0


def new_job(prompt: str = "a fox", **more: Any) -> NewJob:
    fields = {"kind": KIND, "caller": CALLER, "model": "tiny-wan", "request": {"prompt": prompt}}
    return NewJob(**{**fields, **more})


def create(store: JobStore, count: int = 1, **more: Any) -> list[Job]:
    return [store.create(new_job(f"prompt {number}", **more)).job for number in range(count)]


def key(text: str = "key", digest: str = "digest") -> Idempotency:
    return Idempotency(text, digest)


def claim(queue: JobQueue, worker: str = "worker", lease_seconds: float = LEASE, **more: Any) -> Claim:
    claimed = queue.claim(KIND, worker, lease_seconds, **more)
    assert claimed is not None
    return claimed


def shift(database: Database, job_id: str, **times: float) -> None:
    """Move times of a job, so that nobody has to wait: ``lease_until=-5`` is five seconds earlier."""
    with database.writing() as session:
        values = {name: getattr(Job, name) + seconds for name, seconds in times.items()}
        session.execute(update(Job).where(Job.id == job_id).values(**values))


def expire(database: Database, claimed: Claim) -> None:
    """Let a lease run out."""
    shift(database, claimed.job.id, lease_until=-claimed.lease_seconds - 1)


def count_unfinished(database: Database) -> Counter[JobStatus]:
    """How many jobs wait, and how many are worked on."""
    query = select(Job.status, func.count()).where(Job.kind == KIND, UNFINISHED).group_by(Job.status)
    with database.reading() as session:
        return Counter(dict(session.execute(query).all()))


def row(database: Database, job_id: str) -> Job | None:
    """The job's row, also where it is a tombstone."""
    with database.reading() as session:
        return session.scalar(select(Job).where(Job.id == job_id))
