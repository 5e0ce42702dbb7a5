"""One request's denoising as a coroutine: the pipeline's own ``__call__`` in a greenlet.

It stands still at each call of its denoiser, until it is given what the denoiser returns. So many requests take
turns on one thread, each unmodified and at a step of its own. https://greenlet.readthedocs.io
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from greenlet import greenlet
from torch import nn

from diffusion_backend.batching import DenoiserCall, Digests, read_call

# What a pipeline's denoiser does instead of computing: (module, args, kwargs) -> what its forward would return.
Denoiser = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class RunCancelled(BaseException):
    """Ends a run where it stands. A BaseException, so that no pipeline code catches it."""


class Row:
    """A run of ``work``, which gets the ``Denoiser`` that stops it. All methods are for one and the same thread."""

    def __init__(self, work: Callable[[Denoiser], Any]) -> None:
        self._work = work
        self._digests = Digests()
        self._random: list[torch.Tensor] | None = None
        self.call: DenoiserCall | None = None
        self.result: Any = None

    @property
    def is_done(self) -> bool:
        """Whether ``work`` has ended; then ``result`` is what it returned."""
        return bool(self._greenlet.dead)

    def start(self) -> None:
        """Run to the first call of the denoiser, or to the end. What ``work`` raises, this raises."""
        # Made here, since a greenlet belongs to the thread that makes it.
        self._greenlet = greenlet(self._work)
        self._switch(self._greenlet.switch, self._stand_still)

    def resume(self, output: Any) -> None:
        """Let the denoiser return ``output``; run to its next call, or to the end, as ``start`` does."""
        self._switch(self._greenlet.switch, output)

    def cancel(self) -> None:
        """End the run where it stands, if it was started."""
        if self.call is None:
            return
        with contextlib.suppress(BaseException):  # whatever the pipeline makes of it
            self._switch(self._greenlet.throw, RunCancelled)

    def fail(self, error: Exception) -> None:
        """Let the denoiser raise ``error``."""
        self._switch(self._greenlet.throw, error)

    def _stand_still(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.call = read_call(module, args, kwargs, self._digests)
        return self._greenlet.parent.switch()

    def _switch(self, switch: Callable[..., Any], *arguments: Any) -> None:
        # Some pipelines draw from the global generators at each step: each run has a state of them of its own.
        if self._random is not None:
            _set_random_state(self._random)
        self.call = None
        try:
            self.result = switch(*arguments)
        finally:
            self._random = None if self._greenlet.dead else _random_state()


@contextlib.contextmanager
def own_random_state() -> Iterator[None]:
    """What is drawn from the global generators inside is not missing afterwards."""
    before = _random_state()
    try:
        yield
    finally:
        _set_random_state(before)


def _random_state() -> list[torch.Tensor]:
    # Asking would start CUDA in a process that does not use it.
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state() if is_used else None
    return [state for state in (torch.get_rng_state(), cuda) if state is not None]


def _set_random_state(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
