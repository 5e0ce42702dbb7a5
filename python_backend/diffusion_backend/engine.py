"""The engine of the denoise stage: it owns the thread that runs the pipeline's loop.

Triton's ``execute`` only submits and returns, so the next request is admitted while one is running. Jobs run one
after another, in the order of their arrival.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from diffusion_backend.errors import DiffusionError, Status, invalid

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One request: ``run`` does the work on the engine's thread, then exactly one of the callbacks is called."""

    request_id: str
    run: Callable[[], Any]
    succeed: Callable[[Any], None]
    fail: Callable[[BaseException], None]


class Engine:
    """A bounded queue and one worker thread.

    A job's failure is that job's error, never the thread's: a dead thread would leave its clients waiting for ever.
    """

    def __init__(self, max_queued: int) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._max_queued = max_queued
        self._lock = threading.Lock()
        self._live: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="denoise-engine", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], T]) -> T:
        """Do ``work`` on the engine's thread and wait for what it returns or raises.

        All of the model's work belongs on that one thread, its loading too: each thread that ran an OpenMP loop keeps
        a pool of threads of its own, and with more threads than cores OpenMP no longer spins at its barriers.
        """
        future: Future[T] = Future()
        self._jobs.put(Job("", work, future.set_result, future.set_exception))
        return future.result()

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
            DiffusionError: UNAVAILABLE when the queue is full, INVALID_ARG when a job of that id is still alive.
        """
        with self._lock:
            if job.request_id in self._live:
                raise invalid(
                    "id", f"a request with id {job.request_id!r} is already running", "duplicate_request"
                )
            if len(self._live) >= self._max_queued:
                raise DiffusionError(
                    f"the server is busy: {self._max_queued} requests are waiting or running",
                    code="queue_full",
                    status=Status.UNAVAILABLE,
                )
            self._live.add(job.request_id)
            self._jobs.put(job)

    def close(self) -> None:
        """Finish what is queued, then end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                result = job.run()
            except BaseException as error:  # the seams end a run by one, and the thread must outlive all
                self._end(job, job.fail, error)
            else:
                self._end(job, job.succeed, result)

    def _end(self, job: Job, callback: Callable[[Any], None], value: Any) -> None:
        # Not live before the answer goes out: the sender may use the id again as soon as it has the answer.
        with self._lock:
            self._live.discard(job.request_id)
        try:
            callback(value)
        except Exception:
            logger.exception("could not answer request %s", job.request_id)
