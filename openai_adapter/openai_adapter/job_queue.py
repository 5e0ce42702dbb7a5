"""Jobs as their workers see them: the table is the queue.

Who claims a job gets a lease on it, and a token that is higher than that of every attempt before. The lease has to be
renewed; a job whose lease has run out is anybody's. Everything that a worker does to its job needs the token, so work
that was thought lost can run twice, but one attempt alone publishes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, select
from sqlalchemy.orm import Session

from openai_adapter.database import Database, read_clock
from openai_adapter.job_table import EXISTS, FileEntry, Job, JobStatus, bury, is_free

ATTEMPTS_EXHAUSTED = "attempts_exhausted"
NEVER_STARTED = "never_started"


class LeaseLostError(Exception):
    """The job was taken over by another worker, or deleted, or given up: stop working on it."""


@dataclass(frozen=True)
class Claim:
    """A worker's right to a job. ``job`` is as it was when the claim was made."""

    job: Job
    token: int
    lease_seconds: float


class JobQueue:
    """The queue of jobs. All methods block: call them in a worker thread."""

    def __init__(self, database: Database, ttl: float) -> None:
        """``ttl``: how many seconds a job is kept once it is done."""
        self._database = database
        self.ttl = ttl
        self._worked_on: frozenset[str] = frozenset()

    @contextmanager
    def working_on(self, claim: Claim) -> Iterator[None]:
        """While this lasts, nobody in this process takes the job over, even when its lease has run out.

        A lease does so where the database was locked or away, and whoever waited for it together with the renewal
        may be served first. To be entered on one thread only.
        """
        self._worked_on |= {claim.job.id}
        try:
            yield
        finally:
            self._worked_on -= {claim.job.id}

    def claim(
        self,
        kind: str,
        worker: str,
        lease_seconds: float,
        *,
        job_id: str | None = None,
        models: Collection[str] | None = None,
    ) -> Claim | None:
        """The oldest job that nobody works on, or that one; None when there is none.

        ``worker`` names the claimant, for operators to read. With ``models``, only a job of one of them.
        """
        with self._database.writing() as session:
            now = read_clock(session)
            free = self._is_free(now)
            _fail_exhausted(session, now, free, kind, self.ttl)
            query = select(Job).where(Job.kind == kind, free, Job.attempts < Job.max_attempts)
            if job_id is not None:
                query = query.where(Job.id == job_id)
            if models is not None:
                query = query.where(Job.model.in_(models))
            query = query.order_by(Job.sequence).limit(1).with_for_update(skip_locked=True)
            job = session.scalar(query)
            if job is None:
                return None
            job.status = JobStatus.IN_PROGRESS
            job.attempts += 1
            job.token += 1
            job.worker = worker
            job.heartbeat_at = now
            job.lease_until = now + lease_seconds
        return Claim(job, job.token, lease_seconds)

    def is_claimable(self, job_id: str) -> bool:
        """Whether nobody works on the job: by the clock that leases go by, and without a lock."""
        with self._database.reading() as session:
            query = select(Job.id).where(Job.id == job_id, self._is_free(read_clock(session)))
            return session.scalar(query) is not None

    def read_image(self, claim: Claim) -> bytes | None:
        """The image that came with the job, if any.

        Raises:
            LeaseLostError: somebody else has the job, or it was deleted.
        """
        with self._database.reading() as session:
            query = select(Job.image).where(Job.id == claim.job.id, Job.token == claim.token, EXISTS)
            row = session.execute(query).one_or_none()
        if row is None:
            raise LeaseLostError(claim.job.id)
        return row[0]

    def heartbeat(self, claim: Claim) -> None:
        """Renew the lease.

        Raises:
            LeaseLostError: somebody else has the job, or it was deleted.
        """
        with self._hold(claim) as (job, now):
            _renew(job, now, claim)

    def report_progress(self, claim: Claim, percent: int) -> None:
        """Say how far the work is, and renew the lease. A job's progress never falls, also in a new attempt.

        Raises:
            LeaseLostError: somebody else has the job, or it was deleted.
        """
        with self._hold(claim) as (job, now):
            job.progress = max(job.progress, min(percent, 99))  # 100 is for what can be fetched
            _renew(job, now, claim)

    def complete(
        self, claim: Claim, files: Mapping[str, FileEntry], result: Mapping[str, Any] | None = None
    ) -> Job:
        """Publish what the work has made: ``files``, which are in the store, and facts about them.

        May be called again when its outcome is not known.

        Raises:
            LeaseLostError: somebody else has the job, or it was deleted: ``files`` are nobody's, remove them.
        """
        with self._database.writing() as session:
            job = _find_held(session, claim)
            if job.status is JobStatus.COMPLETED:
                return job
            _check_in_progress(job)
            job.progress = 100
            job.files = dict(files)
            job.file_bytes = sum(file["bytes"] for file in files.values())
            job.result = None if result is None else dict(result)
            _finish(job, JobStatus.COMPLETED, read_clock(session), self.ttl)
        return job

    def fail(self, claim: Claim, code: str, message: str) -> Job:
        """End the job without a result: another attempt would fail, too. ``message`` is for the client.

        May be called again when its outcome is not known. Returns the job as it ended: after a ``complete`` whose
        outcome was not known, it may be completed.

        Raises:
            LeaseLostError: somebody else has the job, or it was deleted.
        """
        with self._database.writing() as session:
            job = _find_held(session, claim)
            if job.completed_at is not None:
                return job
            _check_in_progress(job)
            _fail(job, code, message, read_clock(session), self.ttl)
        return job

    def release(self, claim: Claim, *, counts: bool, delay: float = 0.0) -> None:
        """Give the job back to the queue, at its old place. ``counts``: whether this was an attempt at it.

        It was one if the work failed in a way that need not happen again; it was none if the worker had to stop.
        Nobody gets it before ``delay`` seconds are over.

        Raises:
            LeaseLostError: somebody else has the job, or it was deleted.
        """
        with self._hold(claim) as (job, now):
            job.status = JobStatus.QUEUED
            job.attempts -= not counts
            job.worker = job.heartbeat_at = None
            job.lease_until = now + delay if delay else None

    def discard(self, claim: Claim) -> None:
        """Leave nothing of the job but its tombstone, as if nobody had asked for it.

        Raises:
            LeaseLostError: somebody else has the job, or it was deleted.
        """
        with self._hold(claim) as (job, now):
            bury(job, now)

    def fail_exhausted(self) -> int:
        """End the jobs, of any kind, whose attempts have all been lost, and those that wait for longer than ``ttl``.

        So a model that is gone for good does not fill the queue. Returns how many.
        """
        with self._database.writing() as session:
            now = read_clock(session)
            free = self._is_free(now)
            return _fail_exhausted(session, now, free, None, self.ttl) + _fail_old(
                session, now, free, self.ttl
            )

    def _is_free(self, now: float) -> ColumnElement[bool]:
        """The condition that nobody works on a job: not by what the table says, and not in this process."""
        return and_(is_free(now), Job.id.not_in(self._worked_on))

    @contextmanager
    def _hold(self, claim: Claim) -> Iterator[tuple[Job, float]]:
        """The job, locked, and the time."""
        with self._database.writing() as session:
            job = _find_held(session, claim)
            _check_in_progress(job)
            yield job, read_clock(session)


def _find_held(session: Session, claim: Claim) -> Job:
    """The job, locked, which this claim may have finished or released already.

    A lease that has run out is still a right to the job as long as nobody else has taken it.
    """
    query = select(Job).where(Job.id == claim.job.id, Job.token == claim.token, EXISTS).with_for_update()
    job = session.scalar(query)
    if job is None:
        raise LeaseLostError(claim.job.id)
    return job


def _check_in_progress(job: Job) -> None:
    if job.status is not JobStatus.IN_PROGRESS:
        raise LeaseLostError(job.id)


def _renew(job: Job, now: float, claim: Claim) -> None:
    job.heartbeat_at = now
    job.lease_until = now + claim.lease_seconds


def _fail_exhausted(
    session: Session, now: float, free: ColumnElement[bool], kind: str | None, ttl: float
) -> int:
    query = select(Job).where(free, Job.attempts >= Job.max_attempts)
    if kind is not None:
        query = query.where(Job.kind == kind)
    jobs = session.scalars(query.order_by(Job.sequence).with_for_update(skip_locked=True)).all()
    for job in jobs:
        times = "once" if job.attempts == 1 else f"{job.attempts} times"
        _fail(job, ATTEMPTS_EXHAUSTED, f"the work on this {job.kind} was interrupted {times}", now, ttl)
    return len(jobs)


def _fail_old(session: Session, now: float, free: ColumnElement[bool], ttl: float) -> int:
    query = select(Job).where(free, Job.created_at < now - ttl)
    jobs = session.scalars(query.order_by(Job.sequence).with_for_update(skip_locked=True)).all()
    for job in jobs:
        message = f"this {job.kind} was not made within {ttl:g} seconds: {job.model} was busy, or not ready"
        _fail(job, NEVER_STARTED, message, now, ttl)
    return len(jobs)


def _fail(job: Job, code: str, message: str, now: float, ttl: float) -> None:
    job.error_code = code[:64]
    # Postgres takes neither lone surrogates nor U+0000.
    job.error_message = message.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
    _finish(job, JobStatus.FAILED, now, ttl)


def _finish(job: Job, status: JobStatus, now: float, ttl: float) -> None:
    job.status = status
    job.completed_at = now
    job.expires_at = now + ttl
    job.lease_until = job.heartbeat_at = None
