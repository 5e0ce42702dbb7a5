"""Work on a claimed job: its lease is renewed, and its progress told, for as long as the work takes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from openai_adapter.async_jobs import AsyncJobs
from openai_adapter.job_queue import Claim

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEASE_SECONDS = 15.0
HEARTBEAT_SECONDS = 2.0  # also how soon work is given up whose job was deleted through another adapter
INSIST_SECONDS = 60.0
_AWAY = (OperationalError, InterfaceError, PoolTimeoutError)
PAUSE_SECONDS = 0.5


def worker_name() -> str:
    """What this process is called in the table of jobs, for operators to read."""
    return f"{socket.gethostname()[:200]}:{os.getpid()}"


class WorkTooLongError(Exception):
    """The work has taken longer than it may."""


class Lease:
    """The right to work on a job, renewed while it is held."""

    def __init__(self, jobs: AsyncJobs, claim: Claim) -> None:
        self._jobs = jobs
        self._claim = claim
        self._percent = 0
        self._news = asyncio.Event()

    def report(self, percent: int) -> None:
        """How far the work is; it is written soon, and only the last word counts."""
        if percent > self._percent:
            self._percent = percent
            self._news.set()

    async def hold(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """What ``work`` returns or raises.

        Raises:
            LeaseLostError: somebody else has the job, or it was deleted; ``work`` was cancelled.
            WorkTooLongError: it took longer than ``seconds``; it was cancelled.
        """
        working, renewing = asyncio.create_task(work), asyncio.create_task(self.renew_forever())
        try:
            await asyncio.wait({working, renewing}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                working.cancel()
                await asyncio.wait({working})
                if working.cancelled():
                    if renewing.done():
                        renewing.result()
                    raise WorkTooLongError
            # Also of work that was just being published: then the lease is no more, and nothing is lost.
            return working.result()
        finally:
            working.cancel()
            renewing.cancel()
            await asyncio.gather(working, renewing, return_exceptions=True)

    async def renew_forever(self) -> None:
        """Renew the lease until cancelled, or it is lost (``LeaseLostError``)."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await self._news.wait()
            try:
                await self._renew()
            except SQLAlchemyError as error:
                # The work goes on: as long as nobody else takes the job, its result counts.
                logger.warning("the lease on %s could not be renewed: %s", self._claim.job.id, error)
                await asyncio.sleep(PAUSE_SECONDS)

    async def _renew(self) -> None:
        if not self._news.is_set():
            await self._jobs.heartbeat(self._claim)
            return
        self._news.clear()
        try:
            await self._jobs.report_progress(self._claim, self._percent)
        except SQLAlchemyError:
            self._news.set()  # still to be told
            raise


async def insist(write: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What ``write`` returns, which is called again while the database cannot be reached, for a minute.

    A write that runs when this is cancelled is waited for: what it has done counts, and its outcome is known.

    Raises:
        SQLAlchemyError: it cannot be reached for longer, or refuses.
    """
    deadline = time.monotonic() + INSIST_SECONDS
    while True:
        try:
            return await _settle(write())
        except _AWAY as error:
            if time.monotonic() > deadline:
                raise
            logger.warning("a job could not be written: %s", error)
            await asyncio.sleep(PAUSE_SECONDS)


async def _settle(write: Coroutine[Any, Any, T]) -> T:
    writing = asyncio.create_task(write)
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait({writing})
        if isinstance(writing.exception(), _AWAY):
            raise
        return writing.result()
