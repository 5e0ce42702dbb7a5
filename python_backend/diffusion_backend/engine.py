"""The step engine: continuous batching of whatever pipelines do, at every denoising step.

Each request runs the pipeline's own loop as a ``Row``, which stands still at each call of the denoiser. The engine's
thread takes the row that stands longest and those whose calls can be joined with it, runs one forward for all of
them, and lets each go on to its next call. So requests join and leave at any step, whatever their step counts,
seeds, schedulers and guidance; and rows that cannot be joined take turns.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
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

_STARTS_A_STEP = 4  # that a burst of arrivals puts between two forwards of those that run
_LOWERED_SECONDS = 60.0  # that a batch too large for the memory, or that cannot be split, is not tried again
_MOST_LOWERED = 64


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
    is_served: bool = False  # it has had a step, or has one now

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
        self._arrived: deque[_Running] = deque()
        self._standing: deque[_Running] = deque()  # the one that has waited longest comes first
        self._batch: list[_Running] = []  # those of the forward that runs
        self._lowered: dict[
            Hashable, tuple[float, float]
        ] = {}  # by a call's key: a cap of its own, and until when
        self._served = 0
        self._counts = (0, 0)
        self._closed = False
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

        with self._lock:
            if self._closed:
                raise RuntimeError("the engine is closed")
            self._inbox.put(fulfil)
        return future.result()

    def never_batch(self) -> None:
        """One row a forward from now on: this model's rows are not what they would be alone."""
        self._batches = False

    def submit(self, *jobs: Job) -> None:
        """Take jobs in, all or none. They start at once, or as soon as the step that is running is done.

        Raises:
            DiffusionError: UNAVAILABLE when there are too many, INVALID_ARG when one of that id is still alive.
        """
        with self._lock:
            for job in jobs:
                if job.request_id in self._live:
                    raise invalid(
                        "id", f"a request with id {job.request_id!r} is already running", "duplicate_request"
                    )
            if self._closed:
                raise DiffusionError("the server is shutting down", status=Status.UNAVAILABLE)
            if len(self._live) + len(jobs) > self._max_requests:
                self.tell(self._events.ended, "refused")
                raise DiffusionError(
                    f"the server is busy: {self._max_requests} requests are waiting or running",
                    code="queue_full",
                    status=Status.UNAVAILABLE,
                )
            for job in jobs:
                self._live.add(job.request_id)
                self._inbox.put(_Running(job, Row(job.work)))
            self._count()

    def tell(self, what: Callable[..., None], *arguments: Any) -> None:
        """Call ``what`` on the thread that answers, after what it has been told so far."""
        self._outbox.submit(_guarded, what, *arguments)

    def close(self) -> None:
        """Finish all that was submitted, and answer it; then end the threads."""
        with self._lock:
            self._closed = True
            self._inbox.put(None)
        self._thread.join()
        self._outbox.shutdown()

    def _run(self) -> None:
        with torch.no_grad():
            while self._take_in():
                try:
                    self._end_the_unwanted()
                    for _ in range(min(_STARTS_A_STEP, len(self._arrived))):
                        one = self._arrived.popleft()
                        self._go_on(one, one.row.start)
                    self._step()
                except Exception as error:  # a fault of the engine itself
                    logger.exception("the step engine failed")
                    for one in (*self._batch, *self._standing):
                        if one.job.request_id in self._live:
                            self._end(one, "failed", partial(one.job.fail, error))
                    self._batch = []
                    self._standing.clear()

    def _take_in(self) -> bool:
        """Fetch what has come in. Waits while there is nothing to do; False when there never will be."""
        while self._standing or self._arrived or not self._closing:
            try:
                arrived = self._inbox.get(block=not (self._standing or self._arrived))
            except queue.Empty:
                return True
            if arrived is None:
                self._closing = True
            elif not isinstance(arrived, _Running):
                arrived()
            elif arrived.job.request_id in self._tombstones:  # the cancel was faster
                self._cancel(arrived)
            else:
                self._arrived.append(arrived)
        return False

    def _end_the_unwanted(self) -> None:
        news = self._tombstones.has_news()
        now = time.monotonic()
        for ones in (self._arrived, self._standing):
            for one in list(ones):
                late = one.job.deadline is not None and now > one.job.deadline
                if not late and not (news and one.job.request_id in self._tombstones):
                    continue
                ones.remove(one)
                one.row.cancel()
                if late:
                    self._end(one, "deadline", partial(one.job.fail, _too_late()))
                else:
                    self._cancel(one)

    def _cancel(self, one: _Running) -> None:
        self.tell(self._events.freed, self._tombstones.age(one.job.request_id))
        self._end(one, "cancelled", one.job.cancelled)

    def _step(self) -> None:
        batch = self._batch = self._next_batch()
        if not batch:
            return
        started = time.perf_counter()
        rows = sum(one.call.rows for one in batch)
        self._serve(batch)
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

    def _serve(self, batch: list[_Running]) -> None:
        """Count those whose first step comes now."""
        with self._lock:
            for one in batch:
                if not one.is_served:
                    one.is_served = True
                    self._served += 1
                    self.tell(self._events.waited, time.monotonic() - one.submitted)
            self._count()

    def _next_batch(self) -> list[_Running]:
        """The row that stands longest and those that can be joined with it, up to the cap; they stand no more."""
        batch: list[_Running] = []
        weight = cap = 0.0
        for one in self._standing:
            if not batch:
                batch, weight, cap = [one], one.weight, self._cap(one.call.key)
            elif one.call.key == batch[0].call.key and weight + one.weight <= cap:
                batch.append(one)
                weight += one.weight
            if not self._batches:
                break
        taken = set(map(id, batch))
        self._standing = deque(one for one in self._standing if id(one) not in taken)
        return batch

    def _cap(self, key: Hashable) -> float:
        lowered, until = self._lowered.get(key, (self._max_batch_rows, math.inf))
        return lowered if time.monotonic() < until else self._max_batch_rows

    def _lower_cap(self, batch: list[_Running]) -> None:
        """The batch was at fault, no row of it: calls like these get half of it, for a while."""
        if len(self._lowered) >= _MOST_LOWERED:
            self._lowered.pop(next(iter(self._lowered)))
        weight = sum(one.weight for one in batch)
        self._lowered[batch[0].call.key] = weight / 2, time.monotonic() + _LOWERED_SECONDS

    def _step_alone(self, batch: list[_Running], error: Exception) -> None:
        """A forward has failed: whose fault it is shows when each has one of its own."""
        if len(batch) == 1:
            self._go_on(batch[0], partial(batch[0].row.fail, error))
            return
        outcomes: list[Callable[[], None]] = []
        failed = False
        for one in batch:
            try:
                outcomes.append(partial(one.row.resume, *batching.forward([one.call])))
            except Exception as own:
                failed = True
                outcomes.append(partial(one.row.fail, own.with_traceback(None)))
        if not failed:
            self._lower_cap(batch)
        for one, outcome in zip(batch, outcomes, strict=True):
            self._go_on(one, outcome)

    def _go_on(self, one: _Running, switch: Callable[[], None]) -> None:
        """Let a row run to its next call of the denoiser, where it stands again, or to its end."""
        try:
            switch()
        except BaseException as error:  # the seams end a run by one, and the thread must outlive all
            self._end(one, "failed", partial(one.job.fail, error))
        else:
            if one.row.is_done:
                self._end(one, "succeeded", partial(_succeed, one.job, one.row.result))
            else:
                self._standing.append(one)

    def _end(self, one: _Running, outcome: str, answer: Callable[[], None]) -> None:
        # Not live before the answer goes out: the sender may use the id again as soon as it has the answer.
        with self._lock:
            self._live.discard(one.job.request_id)
            self._served -= one.is_served
            self.tell(answer)
            self.tell(self._events.ended, outcome)
            self._count()

    def _count(self) -> None:
        """Tell how many there are, and how many of them have had no step yet. For holders of the lock."""
        counts = len(self._live), len(self._live) - self._served
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
