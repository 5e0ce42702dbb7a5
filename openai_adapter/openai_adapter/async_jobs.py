"""Jobs for code that runs on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy.exc import TimeoutError as DatabaseTimeoutError

from openai_adapter.database import Database
from openai_adapter.job_queue import Claim, JobQueue
from openai_adapter.job_store import JobStore

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

THREADS = 4  # of readers, and of writers
ANSWER_SECONDS = 10.0


def _in_thread(
    part: Callable[[AsyncJobs], S],
    method: Callable[Concatenate[S, P], T],
    threads: Callable[[AsyncJobs], ThreadPoolExecutor],
    seconds: float | None = None,
) -> Callable[Concatenate[AsyncJobs, P], Coroutine[Any, Any, T]]:
    """``method`` of a part of the jobs, as a coroutine, in one of ``threads``; it is waited for at most ``seconds``."""

    @functools.wraps(method)
    async def call(self: AsyncJobs, /, *args: P.args, **kwargs: P.kwargs) -> T:
        work = functools.partial(method, part(self), *args, **kwargs)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.get_running_loop().run_in_executor(threads(self), work)
        except TimeoutError:
            raise DatabaseTimeoutError(f"the database did not answer within {seconds} s") from None

    return call


def _store(jobs: AsyncJobs) -> JobStore:
    return jobs.store


def _queue(jobs: AsyncJobs) -> JobQueue:
    return jobs.queue


def _readers(jobs: AsyncJobs) -> ThreadPoolExecutor:
    return jobs.readers


def _writers(jobs: AsyncJobs) -> ThreadPoolExecutor:
    return jobs.writers


class AsyncJobs:
    """The methods of ``JobStore`` and ``JobQueue``, as coroutines.

    They have threads of their own: in the loop's, heartbeats would wait behind the clips that are being encoded. So
    have reads, which nobody can lock out: they don't wait behind writes that wait for their turn. What
    a request waits for ends with ``sqlalchemy.exc.TimeoutError`` where the database does not answer, as one that is
    frozen; whether it is done when it answers again is not known then. What a worker does waits as long as it takes.
    """

    def __init__(self, database: Database, ttl: float) -> None:
        self.store = JobStore(database)
        self.queue = JobQueue(database, ttl)
        self.readers = ThreadPoolExecutor(THREADS, thread_name_prefix="jobs-read")
        self.writers = ThreadPoolExecutor(THREADS, thread_name_prefix="jobs-write")

    create = _in_thread(_store, JobStore.create, _writers, ANSWER_SECONDS)
    find_by_key = _in_thread(_store, JobStore.find_by_key, _readers, ANSWER_SECONDS)
    get = _in_thread(_store, JobStore.get, _readers, ANSWER_SECONDS)
    image_of = _in_thread(_store, JobStore.image_of, _readers, ANSWER_SECONDS)
    list_page = _in_thread(_store, JobStore.list_page, _readers, ANSWER_SECONDS)
    delete = _in_thread(_store, JobStore.delete, _writers, ANSWER_SECONDS)
    is_claimable = _in_thread(_queue, JobQueue.is_claimable, _readers, ANSWER_SECONDS)
    read_image = _in_thread(_queue, JobQueue.read_image, _readers)
    heartbeat = _in_thread(_queue, JobQueue.heartbeat, _writers)
    report_progress = _in_thread(_queue, JobQueue.report_progress, _writers)
    complete = _in_thread(_queue, JobQueue.complete, _writers)
    fail = _in_thread(_queue, JobQueue.fail, _writers)
    release = _in_thread(_queue, JobQueue.release, _writers)
    discard = _in_thread(_queue, JobQueue.discard, _writers)
    _claim = _in_thread(_queue, JobQueue.claim, _writers)

    async def claim(
        self,
        kind: str,
        worker: str,
        lease_seconds: float,
        *,
        job_id: str | None = None,
        models: Collection[str] | None = None,
    ) -> Claim | None:
        """``JobQueue.claim``. A claim that is made while its caller is cancelled is given back."""
        claiming = asyncio.create_task(self._claim(kind, worker, lease_seconds, job_id=job_id, models=models))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # the lease runs out
                if (claim := await claiming) is not None:
                    await self.release(claim, counts=False)
            raise

    def close(self) -> None:
        """Wait for what is running; a call that comes later raises ``RuntimeError``."""
        self.readers.shutdown()
        self.writers.shutdown()
