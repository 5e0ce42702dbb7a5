"""The step engine: continuous batching of whatever pipelines do, at every denoising step.

Each request runs the pipeline's own loop as a ``Row``, which stands still at each call of the denoiser. The engine's
thread takes the row that stands longest and those whose calls can be joined with it, runs one forward for all of
them, and lets each go on to its next call. So requests join and leave at any step, whatever their step counts,
seeds, schedulers and guidance; and rows that cannot be joined take turns.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from diffusion_backend import batching
from diffusion_backend.engine_events import EngineEvents
from diffusion_backend.errors import DiffusionError, Status, invalid
from diffusion_backend.rows import Denoiser, Row
from diffusion_backend.tombstones import Tombstones

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One request. ``work`` runs on the engine's thread; then exactly one callback is called, on another thread.

    ``size`` is that of its picture against one of the model's default size: what a row of it costs a batch.
    ``deadline`` is a time of ``time.monotonic()``.
    """

    request_id: str
    work: Callable[[Denoiser], Any]
    succeed: Callable[[Any], None]
    fail: Callable[[BaseException], None]
    cancelled: Callable[[], None]
    size: float = 1.0
    deadline: float | None = None


@dataclass
class _Running:
    """A job whose row stands at a call of the denoiser."""

    job: Job
    row: Row
    submitted: float = field(default_factory=time.monotonic)
    is_served: bool = False

    @property
    def call(self) -> batching.DenoiserCall:
        assert self.row.call is not None
        return self.row.call

    @property
    def weight(self) -> float:
        return self.job.size * self.call.rows


class Engine:
    """A bounded number of requests, and the one thread that runs them.

    A job's failure is that job's error, never its batch mates', never the thread's: a dead thread would leave its
    clients waiting for ever.
    """

    def __init__(
        self, *, max_requests: int, max_batch_rows: float, tombstones: Tombstones, events: EngineEvents
    ) -> None:
        """``max_batch_rows``: how many rows of the default size one forward takes; larger ones count for more."""
        self._max_requests = max_requests
        self._max_batch_rows = max_batch_rows
        self._tombstones = tombstones
        self._events = events
        self._batches = True
        self._lock = threading.Lock()
        self._live: set[str] = set()
        self._inbox: queue.SimpleQueue[_Running | Callable[[], None] | None] = queue.SimpleQueue()
        self._standing: deque[_Running] = deque()  # the one that has waited longest comes first
        self._counts = (0, 0)
        self._closing = False
        # Answers and metrics go to Triton from here: a step waits for neither.
        self._outbox = ThreadPoolExecutor(max_workers=1, thread_name_prefix="denoise-outbox")
        self._thread = threading.Thread(target=self._run, name="denoise-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread is there that does all the work."""
        return self._thread.is_alive()

    def run(self, work: Callable[[], T]) -> T:
        """Do ``work`` on the engine's thread and wait for what it returns or raises.

        All of the model's work belongs on that one thread, its loading too: each thread that ran an OpenMP loop keeps
        a pool of threads of its own, and with more threads than cores OpenMP no longer spins at its barriers.
        """
        future: Future[T] = Future()

        def fulfil() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._inbox.put(fulfil)
        return future.result()

    def never_batch(self) -> None:
        """One row a forward from now on: this model's rows are not what they would be alone."""
        self._batches = False

    def submit(self, job: Job) -> None:
        """Take a job in. It starts at once, or as soon as the step that is running is done.

        Raises:
            DiffusionError: UNAVAILABLE when there are too many, INVALID_ARG when one of that id is still alive.
        """
        with self._lock:
            if job.request_id in self._live:
                raise invalid(
                    "id", f"a request with id {job.request_id!r} is already running", "duplicate_request"
                )
            if len(self._live) >= self._max_requests:
                self.tell(self._events.ended, "refused")
                raise DiffusionError(
                    f"the server is busy: {self._max_requests} requests are waiting or running",
                    code="queue_full",
                    status=Status.UNAVAILABLE,
                )
            self._live.add(job.request_id)
            self._inbox.put(_Running(job, Row(job.work)))

    def tell(self, what: Callable[..., None], *arguments: Any) -> None:
        """Call ``what`` on the thread that answers, after what it has been told so far."""
        self._outbox.submit(_guarded, what, *arguments)

    def close(self) -> None:
        """Finish all that was submitted, and answer it; then end the threads."""
        self._inbox.put(None)
        self._thread.join()
        self._outbox.shutdown()

    def _run(self) -> None:
        with torch.no_grad():
            while self._take_in():
                try:
                    self._end_the_unwanted()
                    self._step()
                except Exception as error:  # a fault of the engine itself
                    logger.exception("the step engine failed")
                    for one in self._standing:
                        self._end(one.job, "failed", partial(one.job.fail, error))
                    self._standing.clear()

    def _take_in(self) -> bool:
        """Start what has come in. Waits while there is nothing to do; False when there never will be."""
        while self._standing or not self._closing:
            try:
                arrived = self._inbox.get(block=not self._standing)
            except queue.Empty:
                return True
            if arrived is None:
                self._closing = True
            elif isinstance(arrived, _Running):
                self._start(arrived)
            else:
                arrived()
        return False

    def _start(self, one: _Running) -> None:
        if one.job.request_id in self._tombstones:  # the cancel was faster
            self._cancel(one.job)
        elif one.job.deadline is not None and time.monotonic() > one.job.deadline:
            self._end(one.job, "deadline", partial(one.job.fail, _too_late()))
        else:
            self._go_on(one, one.row.start)
            self._count()

    def _end_the_unwanted(self) -> None:
        news = self._tombstones.has_news()
        now = time.monotonic()
        for one in list(self._standing):
            job = one.job
            late = job.deadline is not None and now > job.deadline
            if not late and not (news and job.request_id in self._tombstones):
                continue
            self._standing.remove(one)
            one.row.cancel()
            if late:
                self._end(job, "deadline", partial(job.fail, _too_late()))
            else:
                self._cancel(job)

    def _cancel(self, job: Job) -> None:
        self.tell(self._events.freed, self._tombstones.age(job.request_id))
        self._end(job, "cancelled", job.cancelled)

    def _step(self) -> None:
        batch = self._next_batch()
        if not batch:
            return
        started = time.perf_counter()
        rows = sum(one.call.rows for one in batch)
        for one in batch:
            if not one.is_served:
                one.is_served = True
                self.tell(self._events.waited, time.monotonic() - one.submitted)
        self._count()
        failure: Exception | None = None
        try:
            outputs = batching.forward([one.call for one in batch])
        except Exception as error:
            logger.warning("a forward of %d rows failed: %r", rows, error)
            # Its frames hold the memory that each row's own forward may need.
            failure = error.with_traceback(None)
        if failure is not None:
            self._step_alone(batch, failure)
        else:
            for one, output in zip(batch, outputs, strict=True):
                self._go_on(one, partial(one.row.resume, output))
        self.tell(self._events.stepped, rows, time.perf_counter() - started)

    def _next_batch(self) -> list[_Running]:
        """The row that stands longest and those that can be joined with it, up to the cap; they stand no more."""
        batch: list[_Running] = []
        weight = 0.0
        for one in self._standing:
            if not batch:
                batch, weight = [one], one.weight
            elif one.call.key == batch[0].call.key and weight + one.weight <= self._max_batch_rows:
                batch.append(one)
                weight += one.weight
            if not self._batches:
                break
        taken = set(map(id, batch))
        self._standing = deque(one for one in self._standing if id(one) not in taken)
        return batch

    def _step_alone(self, batch: list[_Running], error: Exception) -> None:
        """A forward has failed: whose fault it is shows when each has one of its own."""
        for one in batch:
            outcome: Callable[[], None] = partial(one.row.fail, error)
            if len(batch) > 1:
                try:
                    outcome = partial(one.row.resume, *batching.forward([one.call]))
                except Exception as own:
                    outcome = partial(one.row.fail, own.with_traceback(None))
            self._go_on(one, outcome)

    def _go_on(self, one: _Running, switch: Callable[[], None]) -> None:
        """Let a row run to its next call of the denoiser, where it stands again, or to its end."""
        try:
            switch()
        except BaseException as error:  # the seams end a run by one, and the thread must outlive all
            self._end(one.job, "failed", partial(one.job.fail, error))
        else:
            if one.row.is_done:
                self._end(one.job, "succeeded", partial(_succeed, one.job, one.row.result))
            else:
                self._standing.append(one)

    def _end(self, job: Job, outcome: str, answer: Callable[[], None]) -> None:
        # Not live before the answer goes out: the sender may use the id again as soon as it has the answer.
        with self._lock:
            self._live.discard(job.request_id)
        self.tell(answer)
        self.tell(self._events.ended, outcome)
        self._count()

    def _count(self) -> None:
        waiting = sum(not one.is_served for one in self._standing)
        counts = len(self._live), waiting
        if counts != self._counts:
            self._counts = counts
            self.tell(self._events.counted, *counts)


def _succeed(job: Job, result: Any) -> None:
    try:
        job.succeed(result)
    except Exception as error:
        logger.exception("could not answer request %s", job.request_id)
        job.fail(error)


def _guarded(what: Callable[..., None], *arguments: Any) -> None:
    try:
        what(*arguments)
    except Exception:
        logger.exception("could not tell Triton")


def _too_late() -> DiffusionError:
    return DiffusionError(
        "the request's timeout passed while it waited or was denoised",
        code="deadline_exceeded",
        status=Status.CANCELLED,
    )
