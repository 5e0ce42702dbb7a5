"""Progress: which step a request has reached, told now and then while it is denoised.

The run counts its scheduler's steps; what is told goes out on the thread that answers. So a step waits for nothing,
and what is told after the last answer cannot be: that thread takes one after the other.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

from diffusers import DiffusionPipeline

MIN_SECONDS = 0.1  # between two messages of a request


class Progress:
    """Of one request of ``steps`` steps."""

    def __init__(
        self,
        steps: int,
        tell: Callable[[Callable[[int], None], int], None],
        send: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``tell(send, step)`` has ``send(step)`` called on another thread, soon; ``clock`` is in seconds."""
        self._steps = steps
        self._tell = tell
        self._send_step = send
        self._clock = clock
        self._next = -math.inf
        self._is_waiting = False

    def watch(self, pipe: DiffusionPipeline) -> None:
        """Have the steps counted of the run for which ``pipe`` is the private copy."""
        take_step = pipe.scheduler.step
        order = getattr(pipe.scheduler, "order", 1)  # solvers of second order take two steps for one
        taken = 0

        @functools.wraps(take_step)
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal taken
            result = take_step(*args, **kwargs)
            taken += 1
            if taken % order == 0:
                self._reached(taken // order)
            return result

        pipe.scheduler.step = counted

    def _reached(self, step: int) -> None:
        now = self._clock()
        # The picture follows the last step; and what tells is not told more than it can send.
        if step < self._steps and now >= self._next and not self._is_waiting:
            self._next = now + MIN_SECONDS
            self._is_waiting = True
            self._tell(self._send, step)

    def _send(self, step: int) -> None:
        try:
            self._send_step(step)
        finally:
            self._is_waiting = False
