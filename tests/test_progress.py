"""Progress: which steps are told, and when."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from diffusion_backend.progress import Progress


def told(steps: int, seconds_a_step: float, *, order: int = 1, slow: bool = False) -> list[int]:
    """The steps that are told of a run; ``slow``: nothing goes out while it runs."""
    now = 0.0
    sent: list[int] = []
    waiting: list[tuple[Callable[[int], None], int]] = []

    def tell(send: Callable[[int], None], step: int) -> None:
        waiting.append((send, step)) if slow else send(step)

    pipe: Any = SimpleNamespace(scheduler=SimpleNamespace(step=lambda latents: latents, order=order))
    Progress(steps, tell, sent.append, lambda: now).watch(pipe)
    for number in range(steps * order):
        now += seconds_a_step / order
        assert pipe.scheduler.step(number) == number
    for send, step in waiting:
        send(step)
    return sent


def test_slow_steps_are_all_told_but_the_last() -> None:
    assert told(4, 1.0) == [1, 2, 3]
    assert told(1, 1.0) == []


def test_fast_steps_are_told_now_and_then() -> None:
    assert told(200, 0.02) == list(range(1, 200, 5)) or len(told(200, 0.02)) in range(33, 42)


def test_a_solver_that_takes_two_steps_for_one() -> None:
    assert told(4, 1.0, order=2) == [1, 2, 3]


def test_nothing_is_told_while_the_last_word_waits() -> None:
    assert told(50, 1.0, slow=True) == [1]
