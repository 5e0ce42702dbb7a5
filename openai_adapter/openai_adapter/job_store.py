"""Jobs as clients see them: created, looked up, listed and deleted. Who works on them uses ``job_queue``."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffusion_backend.errors import invalid, show
from sqlalchemy import ColumnElement, and_, func, insert, select
from sqlalchemy.orm import Session

from openai_adapter.database import Database, Lock, read_clock
from openai_adapter.job_pages import (
    DEFAULT_LIMIT,
    DEFAULT_ORDER,
    Page,
    check_limit,
    check_order,
    select_page,
)
from openai_adapter.job_table import EXISTS, UNFINISHED, Job, JobStatus, bury

MAX_ATTEMPTS = 3
_KEY = re.compile(r"[!-~]{1,255}")


@dataclass(frozen=True)
class Idempotency:
    """A client's ``Idempotency-Key``, and a digest of what the request with it asks for.

    Raises:
        DiffusionError: INVALID_ARG, the key is not visible ASCII of at most 255 characters.
    """

    key: str
    body_digest: str

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.key):
            raise invalid(
                "Idempotency-Key",
                f"'Idempotency-Key' is {show(self.key)}; allowed: 1 to 255 visible ASCII characters",
            )


@dataclass(frozen=True)
class NewJob:
    """A job to create.

    ``caller`` is whose it is, a digest of the API key: jobs and idempotency keys of one caller don't exist for others.
    ``image`` is a file that the work needs. ``max_attempts``: how often work on it may begin. ``ttl``: after how many
    seconds it is removed though nobody has finished it; None for never. ``max_unfinished``: how many jobs of its kind
    there may be that are not finished, with this one; None for any number.
    """

    kind: str
    caller: str
    model: str
    request: Mapping[str, Any]
    image: bytes | None = None
    idempotency: Idempotency | None = None
    max_attempts: int = MAX_ATTEMPTS
    ttl: float | None = None
    max_unfinished: int | None = None


@dataclass(frozen=True)
class Created:
    """The job of a request: a new one, or the one that an earlier request with the same key has made."""

    job: Job
    is_new: bool


@dataclass(frozen=True)
class Deletion:
    """What a deletion leaves to do: cancel the work, if there was any, and remove the files."""

    was_running: bool
    files: Sequence[str]


class IdempotencyConflictError(Exception):
    """An ``Idempotency-Key`` comes again with another body."""


class QueueFullError(Exception):
    """As many jobs of this kind wait or are worked on as may."""


class JobStore:
    """The table of jobs. All methods block: call them in a worker thread."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, new: NewJob) -> Created:
        """Put a job at the end of the queue, or find the one that the same request has made already.

        Raises:
            IdempotencyConflictError: the key was used for a request with another body.
            QueueFullError: ``max_unfinished`` jobs are there already.
        """
        # One at a time, so that jobs appear in the order of their sequence, and a key, or the last place in the queue,
        # is used once.
        with self._database.writing(Lock.CREATE) as session:
            if new.idempotency and (known := _find_by_key(session, new.kind, new.caller, new.idempotency)):
                return Created(known, is_new=False)
            if new.max_unfinished is not None:
                _require_room(session, new.kind, new.max_unfinished)
            return Created(_insert(session, new), is_new=True)

    def find_by_key(self, kind: str, caller: str, idempotency: Idempotency) -> Job | None:
        """The job that the same request has made already.

        Raises:
            IdempotencyConflictError: the key was used for a request with another body.
        """
        with self._database.reading() as session:
            return _find_by_key(session, kind, caller, idempotency)

    def get(self, kind: str, caller: str, job_id: str) -> Job | None:
        """The job, or None where there is none of the caller's (any more)."""
        if not _is_id(job_id):
            return None
        with self._database.reading() as session:
            return session.scalar(select(Job).where(_identify(kind, caller, job_id)))

    def image_of(self, kind: str, caller: str, job_id: str) -> bytes | None:
        """The image that came with the caller's job, if any."""
        if not _is_id(job_id):
            return None
        with self._database.reading() as session:
            return session.scalar(select(Job.image).where(_identify(kind, caller, job_id)))

    def list_page(
        self,
        kind: str,
        caller: str,
        *,
        after: str | None = None,
        limit: int = DEFAULT_LIMIT,
        order: str = DEFAULT_ORDER,
    ) -> Page:
        """The caller's jobs behind the job ``after``, or from the start; the newest first by default.

        Raises:
            DiffusionError: INVALID_ARG, a bad limit or order, or an ``after`` that never was.
        """
        check_limit(limit)
        checked = check_order(order)
        with self._database.reading() as session:
            return select_page(session, kind, caller, after, limit, checked)

    def delete(self, kind: str, caller: str, job_id: str) -> Deletion | None:
        """Leave nothing of a job but its tombstone, whatever is done to it at the same moment.

        From here on its worker can't publish. Returns None where there is no such job (any more).
        """
        if not _is_id(job_id):
            return None
        with self._database.writing() as session:
            job = session.scalar(select(Job).where(_identify(kind, caller, job_id)).with_for_update())
            if job is None:
                return None
            was_running = job.status is JobStatus.IN_PROGRESS
            return Deletion(was_running, bury(job, read_clock(session)))


def _find_by_key(session: Session, kind: str, caller: str, idempotency: Idempotency) -> Job | None:
    known = session.scalar(
        select(Job).where(Job.kind == kind, Job.caller == caller, Job.idempotency_key == idempotency.key)
    )
    if known is not None and known.body_digest != idempotency.body_digest:
        raise IdempotencyConflictError(f"{show(idempotency.key)} was used for a request with another body")
    return known


def _require_room(session: Session, kind: str, max_unfinished: int) -> None:
    unfinished = session.scalar(select(func.count()).select_from(Job).where(Job.kind == kind, UNFINISHED))
    assert unfinished is not None
    if unfinished >= max_unfinished:
        raise QueueFullError(f"{unfinished} {kind}s are waiting or being made")


def _insert(session: Session, new: NewJob) -> Job:
    now = read_clock(session)
    values = {
        "id": f"{new.kind}_{secrets.token_hex(16)}",
        "kind": new.kind,
        "caller": new.caller,
        "status": JobStatus.QUEUED,
        "model": new.model,
        "request": dict(new.request),
        "image": new.image,
        "created_at": now,
        "expires_at": None if new.ttl is None else now + new.ttl,
        "max_attempts": new.max_attempts,
        "idempotency_key": new.idempotency.key if new.idempotency else None,
        "body_digest": new.idempotency.body_digest if new.idempotency else None,
    }
    return session.scalars(insert(Job).values(**values).returning(Job)).one()


def _identify(kind: str, caller: str, job_id: str) -> ColumnElement[bool]:
    return and_(Job.id == job_id, Job.kind == kind, Job.caller == caller, EXISTS)


def _is_id(text: str) -> bool:
    """Whether it may be a job's id. Other text never reaches the database: Postgres takes no U+0000."""
    return text.isascii() and text.isprintable()
