"""Pages of the list of jobs.

A page begins behind a job, not at a number of jobs, so it costs the same wherever it is, and what is created or deleted
between two pages moves nothing. A job that was deleted keeps its place as long as its tombstone is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from diffusion_backend.errors import DiffusionError, invalid, show
from sqlalchemy import select
from sqlalchemy.orm import Session

from openai_adapter.job_table import EXISTS, Job

MAX_LIMIT = 100
DEFAULT_LIMIT = 20
Order = Literal["asc", "desc"]
DEFAULT_ORDER: Order = "desc"


@dataclass(frozen=True)
class Page:
    """Some jobs in order, and whether there are more behind them."""

    data: Sequence[Job]
    has_more: bool

    @property
    def first_id(self) -> str | None:
        """The id of the first job here; None on an empty page."""
        return self.data[0].id if self.data else None

    @property
    def last_id(self) -> str | None:
        """What the next page comes ``after``; None on an empty page."""
        return self.data[-1].id if self.data else None


def parse_limit(value: str) -> int:
    """The ``limit`` of a query string.

    Raises:
        DiffusionError: INVALID_ARG, it is not one.
    """
    if not (value.isascii() and value.isdecimal()) or len(value) > 9:
        raise _invalid_limit(value)
    return check_limit(int(value))


def check_limit(limit: int) -> int:
    """``limit``, which is the size of a page.

    Raises:
        DiffusionError: INVALID_ARG, it is not one.
    """
    if not 1 <= limit <= MAX_LIMIT:
        raise _invalid_limit(limit)
    return limit


def check_order(order: str) -> Order:
    """``order``, which is ``desc`` (newest first) or ``asc``.

    Raises:
        DiffusionError: INVALID_ARG, it is something else.
    """
    for known in get_args(Order):
        if order == known:
            return known  # type: ignore[no-any-return]
    raise invalid("order", f"'order' is {show(order)}; allowed: 'asc', 'desc'")


def find_cursor(session: Session, kind: str, caller: str, after: str) -> int:
    """The sequence of the job, or of what is left of it, with the id ``after``.

    Raises:
        DiffusionError: INVALID_ARG, there never was such a job, or it was deleted long ago.
    """
    # Other text than ids have never reaches the database: Postgres takes no U+0000.
    if after.isascii() and after.isprintable():
        condition = (Job.id == after, Job.kind == kind, Job.caller == caller)
        sequence = session.scalar(select(Job.sequence).where(*condition))
        if sequence is not None:
            return sequence
    raise invalid("after", f"'after' is {show(after)}; allowed: the id of a {kind} in this list")


def select_page(
    session: Session, kind: str, caller: str, after: str | None, limit: int, order: Order
) -> Page:
    """The page of ``limit`` jobs behind the job ``after``, or from the start."""
    query = select(Job).where(Job.kind == kind, Job.caller == caller, EXISTS).limit(limit + 1)
    query = query.order_by(Job.sequence.asc() if order == "asc" else Job.sequence.desc())
    if after is not None:
        cursor = find_cursor(session, kind, caller, after)
        query = query.where(Job.sequence > cursor if order == "asc" else Job.sequence < cursor)
    jobs = session.scalars(query).all()
    return Page(jobs[:limit], has_more=len(jobs) > limit)


def _invalid_limit(value: object) -> DiffusionError:
    return invalid("limit", f"'limit' is {show(value)}; allowed: integers from 1 to {MAX_LIMIT}")
