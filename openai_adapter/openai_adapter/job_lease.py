"""Work on a claimed job: its lease is renewed, and its progress told, for as long as the work takes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from openai_adapter.async_jobs import AsyncJobs
from openai_adapter.job_queue import Claim

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

LEASE_SECONDS = 15.0
HEARTBEAT_SECONDS = 2.0  # also how soon work is given up whose job was deleted through another adapter
INSIST_SECONDS = 60.0
DATABASE_AWAY = (OperationalError, InterfaceError, PoolTimeoutError)
_PAUSE_SECONDS = 0.5


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
        self._renewing: asyncio.Task[None] | None = None

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
        deadline = time.monotonic() + seconds
        working = asyncio.create_task(work)
        self._renewing = asyncio.create_task(self.renew_forever())
        waiting: set[asyncio.Task[Any]] = {working, self._renewing}
        try:
            while not working.done():
                left = deadline - time.monotonic()
                done, waiting = await asyncio.wait(
                    waiting, timeout=max(0, left), return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    raise WorkTooLongError
                if working not in done and not self._renewing.cancelled():
                    self._renewing.result()
            return working.result()
        finally:
            working.cancel()
            self._renewing.cancel()
            await asyncio.gather(working, self._renewing, return_exceptions=True)

    async def stop(self) -> None:
        """Renew it no more: the work is done, and what remains is to say so."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})

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
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _renew(self) -> None:
        if self._news.is_set():
            self._news.clear()
            await self._jobs.report_progress(self._claim, self._percent)
        else:
            await self._jobs.heartbeat(self._claim)


async def insist(
    write: Callable[[], Coroutine[Any, Any, T]],
    passing: tuple[type[Exception], ...] = DATABASE_AWAY,
    seconds: float = INSIST_SECONDS,
) -> T:
    """What ``write`` returns, which is called again while it raises what may pass, for so many seconds.

    Raises:
        Exception: what it raised last.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return await write()
        except passing as error:
            if time.monotonic() > deadline:
                raise
            logger.warning("a job could not be written: %s", error)
            await asyncio.sleep(_PAUSE_SECONDS)


async def insist_in_thread(write: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The same of what writes a file, and blocks."""
    return await insist(lambda: asyncio.to_thread(write, *args, **kwargs), (OSError,))
