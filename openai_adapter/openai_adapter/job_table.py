"""The table of jobs: what a client asked for, what became of it, and who works on it."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypedDict

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    ColumnElement,
    Enum,
    Index,
    Integer,
    LargeBinary,
    String,
    and_,
    or_,
)
from sqlalchemy.orm import Mapped, mapped_column

from openai_adapter.database import Base

_BIG = BigInteger().with_variant(
    Integer, "sqlite"
)  # SQLite counts up INTEGER keys only; they have 64 bits, too


class JobStatus(StrEnum):
    """The four that clients know."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"


class FileEntry(TypedDict):
    """A job's file: its name in the store, and how long it is."""

    name: str
    bytes: int


class Job(Base):
    """One job. Once its transaction is over, an object of this class is a value that nothing changes any more.

    All times are seconds since 1970 by the database's clock (``read_clock``).
    """

    __tablename__ = "jobs"

    # In the order of creation, and of commits as well: a page never misses a job that appears behind it later.
    sequence: Mapped[int] = mapped_column(_BIG, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    kind: Mapped[str] = mapped_column(String(16))
    caller: Mapped[str] = mapped_column(String(64))  # whose it is: nobody else sees it
    status: Mapped[JobStatus] = mapped_column(
        Enum(
            JobStatus,
            native_enum=False,
            create_constraint=True,
            length=16,
            name="status",
            values_callable=lambda statuses: [status.value for status in statuses],
        )
    )
    model: Mapped[str] = mapped_column(String(255))
    # JSON, not JSONB: a prompt may have any character, and JSONB refuses U+0000.
    request: Mapped[dict[str, Any]] = mapped_column(JSON)
    # The image that came with it, if any: read by itself, as it is large.
    image: Mapped[bytes | None] = mapped_column(LargeBinary, deferred=True)
    progress: Mapped[int] = mapped_column(Integer, default=0)
    created_at: Mapped[float]
    completed_at: Mapped[float | None]  # or failed
    expires_at: Mapped[float | None]
    error_code: Mapped[str | None] = mapped_column(String(64))
    error_message: Mapped[str | None]
    result: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    files: Mapped[dict[str, FileEntry]] = mapped_column(
        JSON, default=dict
    )  # by what they are: video, thumbnail
    file_bytes: Mapped[int] = mapped_column(_BIG, default=0)  # of all files
    attempts: Mapped[int] = mapped_column(Integer, default=0)
    max_attempts: Mapped[int] = mapped_column(Integer)
    # The fencing token: a higher one for each attempt, so that an earlier attempt's writes are known and refused.
    token: Mapped[int] = mapped_column(Integer, default=0)
    worker: Mapped[str | None] = mapped_column(String(255))
    lease_until: Mapped[float | None]  # of a queued job: when it may be tried again
    heartbeat_at: Mapped[float | None]
    idempotency_key: Mapped[str | None] = mapped_column(String(255))
    body_digest: Mapped[str | None] = mapped_column(String(64))
    deleted_at: Mapped[float | None]  # a tombstone: of id and sequence only

    __table_args__ = (
        CheckConstraint("progress BETWEEN 0 AND 100", name="progress"),
        Index("jobs_idempotency", "kind", "caller", "idempotency_key", unique=True),
        {"sqlite_autoincrement": True},  # never a number twice, also after the last row was deleted
    )


UNFINISHED = and_(Job.completed_at.is_(None), Job.deleted_at.is_(None))
EXISTS = Job.deleted_at.is_(None)


def _index(name: str, *columns: Any, where: Any) -> Index:
    return Index(name, *columns, postgresql_where=where, sqlite_where=where)


# One for each question that is asked all the time; each holds the rows in question only.
_index("jobs_listed", Job.kind, Job.caller, Job.sequence, where=EXISTS)
_index("jobs_unfinished", Job.kind, Job.sequence, where=UNFINISHED)
_index("jobs_expiring", Job.expires_at, where=and_(EXISTS, Job.expires_at.is_not(None)))
_index("jobs_stored", Job.completed_at, Job.sequence, Job.file_bytes, where=Job.file_bytes > 0)
_index("jobs_buried", Job.deleted_at, where=Job.deleted_at.is_not(None))


def is_free(now: float) -> ColumnElement[bool]:
    """The condition that nobody works on an unfinished job."""
    return and_(UNFINISHED, or_(Job.lease_until.is_(None), Job.lease_until < now))


def bury(job: Job, now: float) -> list[str]:
    """Leave of ``job``, which is locked, its tombstone alone, and fence off who works on it.

    Returns the names of its files: to be removed once the transaction is over.
    """
    names = [file["name"] for file in job.files.values()]
    job.deleted_at = now
    job.token += 1
    job.model = ""
    job.request = {}
    job.image = None
    job.files = {}
    job.file_bytes = 0
    job.result = job.error_code = job.error_message = None
    job.worker = job.lease_until = job.heartbeat_at = None
    job.idempotency_key = job.body_digest = None
    return names
