"""What becomes of a generation whose work was lost because a process of the model server died.

The work is done once more when the model is well again: a generation has a seed and no other effect than its
result. There is one second attempt; a request that brings its process down each time must not do so for ever.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from diffusion_backend.errors import DiffusionError, Status

from openai_adapter.errors import DO_NOT_RETRY, ApiError, unavailable
from openai_adapter.metrics import Metrics
from openai_adapter.registry import Registry
from openai_adapter.triton import Triton

logger = logging.getLogger(__name__)

ATTEMPTS = 2
RECOVERY_SECONDS = 120.0  # how long a request is held while the model is healed
NOTICE_SECONDS = 1.0  # after a loss, an earlier word that the model is well says nothing
_LOOK_SECONDS = 0.2

T = TypeVar("T")
Attempt = Callable[[], Coroutine[Any, Any, T]]


class Recovery:
    """Runs generations."""

    def __init__(self, triton: Triton, registry: Registry, metrics: Metrics) -> None:
        self._triton = triton
        self._registry = registry
        self._metrics = metrics

    async def run(self, model: str, attempt: Attempt[T]) -> T:
        """What ``attempt`` makes, on ``model``.

        Raises:
            DiffusionError: what Triton said of it. ApiError: 503, its work was lost; 404, the model was unloaded.
        """
        attempts: list[asyncio.Task[T]] = []
        try:
            for number in range(ATTEMPTS):
                if number:
                    await self._wait_until_well(model, attempts)
                    if (made := _made(attempts)) is not None:
                        self._metrics.interruptions.labels("recovered").inc()
                        return made
                loss = self._registry.loss(model)
                attempts.append(asyncio.create_task(attempt()))
                made = await _first_result(attempts, loss)
                if made is not None:
                    if number:
                        self._metrics.interruptions.labels("recovered").inc()
                    return made
                logger.warning("the model server lost a generation on %s", model)
                self._metrics.upstream_errors.labels(Status.UNAVAILABLE).inc()
        finally:
            for task in attempts:
                task.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)
        # It may be this request that brings the process down, and batch mates with it.
        raise self._interrupted(DO_NOT_RETRY)

    async def _wait_until_well(self, model: str, attempts: list[asyncio.Task[T]]) -> None:
        """Until another attempt is worth it, or an earlier one has made the picture after all."""
        moment = time.monotonic() + NOTICE_SECONDS
        try:
            async with asyncio.timeout(RECOVERY_SECONDS):
                while _made(attempts) is None and not self._triton.is_proven(model, moment):
                    self._registry.find(model)  # 404 when it was unloaded meanwhile
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError:
            raise self._interrupted({}) from None

    def _interrupted(self, headers: Mapping[str, str]) -> ApiError:
        self._metrics.interruptions.labels("failed").inc()
        error = unavailable("the model server lost a process while it made this", "generation_interrupted")
        error.headers.update(headers)
        return error


def _made(attempts: list[asyncio.Task[T]]) -> T | None:
    """What an attempt made that was thought lost: its stage was past the process that died."""
    for task in attempts:
        if task.done() and not task.cancelled() and task.exception() is None:
            return task.result()
    return None


async def _first_result(attempts: list[asyncio.Task[T]], loss: asyncio.Event) -> T | None:
    """The first generation that is done; None when every attempt is interrupted, or may be because of ``loss``.

    An attempt whose process died need not end: what ran in a dead denoise process is never answered. One that ran
    in another instance goes on, so earlier attempts stay in the race.
    """
    lost = asyncio.create_task(loss.wait())
    running: set[asyncio.Task[Any]] = {task for task in attempts if not task.done()}
    try:
        while running and not lost.done():
            done, running = await asyncio.wait({*running, lost}, return_when=asyncio.FIRST_COMPLETED)
            running.discard(lost)
            for task in done - {lost}:
                error = task.exception()
                if error is None:
                    return task.result()  # type: ignore[no-any-return]
                if not _is_interruption(error):
                    raise error
        return None
    finally:
        lost.cancel()


def _is_interruption(error: BaseException) -> bool:
    """Whether Triton or gRPC lost the work, in words of their own: a stage that refuses has a code.

    Of theirs, INVALID_ARG is a model that was unloaded between our check and the call.
    """
    lost = (Status.UNAVAILABLE, Status.INVALID_ARG)
    return isinstance(error, DiffusionError) and error.code is None and error.status in lost
