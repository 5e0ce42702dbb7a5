"""What is kept of jobs, and for how long.

A job that is done is kept until it expires, or until its files have to make room for newer ones; then it goes as if it
had been deleted. Tombstones are kept as long as anybody may still page through a list that they were in.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, delete, func, select
from sqlalchemy.orm import Session

from openai_adapter.database import Database, Lock, read_clock
from openai_adapter.job_files import JobFiles, StoredFile
from openai_adapter.job_queue import JobQueue
from openai_adapter.job_table import EXISTS, Job, JobStatus, bury
from openai_adapter.metrics import Metrics

logger = logging.getLogger(__name__)

_BATCH = 100
_SWEEP_SECONDS = 60.0


@dataclass(frozen=True)
class Limits:
    """``max_bytes`` of all files together, None for no limit; ``tombstone_seconds`` from a deletion on."""

    max_bytes: int | None
    tombstone_seconds: float


@dataclass(frozen=True)
class Removed:
    """What one sweep has removed: jobs, tombstones, and files that no job has."""

    by_age: int
    by_bytes: int
    tombstones: int
    orphans: int


def enforce_retention(database: Database, files: JobFiles, limits: Limits) -> Removed:
    """Remove what is past its time or beyond the limits. Several adapters may do this at once."""
    by_age = _bury_all(database, files, _find_expired)
    by_bytes = 0
    if limits.max_bytes is not None:
        max_bytes = limits.max_bytes
        by_bytes = _bury_all(database, files, lambda session, _: _find_beyond(session, max_bytes))
    tombstones = _drop_tombstones(database, limits.tombstone_seconds)
    orphans = files.remove(_find_orphans(database, files, limits.tombstone_seconds))
    return Removed(by_age, by_bytes, tombstones, orphans)


async def sweep_forever(
    database: Database, queue: JobQueue, files: JobFiles, limits: Limits, metrics: Metrics
) -> None:
    """End jobs that were given up, and enforce retention, every now and then, until cancelled."""
    while True:
        try:
            await asyncio.to_thread(queue.fail_exhausted)
            removed = await asyncio.to_thread(enforce_retention, database, files, limits)
            metrics.jobs_removed.labels("age").inc(removed.by_age)
            metrics.jobs_removed.labels("bytes").inc(removed.by_bytes)
            metrics.job_orphans.inc(removed.orphans)
            logger.debug("retention: %s", removed)
        except Exception:
            logger.exception("the sweep of jobs failed")
        await asyncio.sleep(min(max(queue.ttl / 10, 1), _SWEEP_SECONDS))


def _bury_all(database: Database, files: JobFiles, find: Callable[[Session, float], Sequence[Job]]) -> int:
    """Bury what ``find`` finds, some at a time, until it finds no more; returns how many."""
    count = 0
    while True:
        # One adapter at a time: each would make all the room that is missing.
        with database.writing(Lock.RETENTION) as session:
            now = read_clock(session)
            jobs = find(session, now)
            names = [name for job in jobs for name in bury(job, now)]
        if not jobs:
            return count
        # Not before the commit: no job that is still listed may lack its files.
        files.remove(names)
        count += len(jobs)


def _find_expired(session: Session, now: float) -> Sequence[Job]:
    query = select(Job).where(EXISTS, Job.expires_at <= now).order_by(Job.expires_at)
    return session.scalars(query.limit(_BATCH).with_for_update()).all()


def _find_beyond(session: Session, max_bytes: int) -> Sequence[Job]:
    """The jobs completed first without which the rest is within the limit, or some of them."""
    excess = (session.scalar(select(func.sum(Job.file_bytes)).where(Job.file_bytes > 0)) or 0) - max_bytes
    if excess <= 0:
        return []
    query = select(Job).where(Job.file_bytes > 0).order_by(Job.completed_at, Job.sequence)
    found: list[Job] = []
    for job in session.scalars(query.limit(_BATCH).with_for_update()):
        if excess <= 0:
            break
        excess -= job.file_bytes
        found.append(job)
    return found


def _drop_tombstones(database: Database, seconds: float) -> int:
    count = 0
    while True:
        with database.writing(Lock.RETENTION) as session:
            old = select(Job.sequence).where(Job.deleted_at <= read_clock(session) - seconds)
            sequences = session.scalars(old.order_by(Job.deleted_at).limit(_BATCH)).all()
            session.execute(delete(Job).where(Job.sequence.in_(sequences)))
        count += len(sequences)
        if len(sequences) < _BATCH:
            return count


def _find_orphans(database: Database, files: JobFiles, seconds: float) -> Iterator[str]:
    """The files that no job has, and none will: of attempts that were lost, and of jobs that are gone.

    A file whose job this database has never heard of may be another database's, in a store that they share: it
    counts as an orphan once it is older than ``seconds``.
    """
    # The files first: what is published after that, or claimed, is not among them.
    stored = files.find_all()
    for start in range(0, len(stored), _BATCH):
        batch = stored[start : start + _BATCH]
        known = _look_up(database, {file.job_id for file in batch})
        for file in batch:
            row = known.get(file.job_id)
            if row is None or row.token < file.token:
                modified_at = files.modified_at(file.name)
                if modified_at is not None and modified_at <= time.time() - seconds:
                    yield file.name
            elif _is_orphan(file, row):
                yield file.name


def _look_up(database: Database, ids: set[str]) -> dict[str, Row[*tuple[Any, ...]]]:
    query = select(Job.id, Job.token, Job.status, Job.files).where(Job.id.in_(ids))
    with database.reading() as session:
        return {row.id: row for row in session.execute(query)}


def _is_orphan(file: StoredFile, row: Row[*tuple[Any, ...]]) -> bool:
    if row.token > file.token or row.status in (JobStatus.QUEUED, JobStatus.FAILED):
        return True
    published = {entry["name"] for entry in row.files.values()}
    return row.status is JobStatus.COMPLETED and file.name not in published
