"""Progress: which steps are told, and when."""

from __future__ import annotations

import contextlib
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
    assert told(200, 1 / 32) == list(range(1, 200, 4))


def test_a_solver_that_takes_two_steps_for_one() -> None:
    assert told(4, 1.0, order=2) == [1, 2, 3]
    assert told(8, 1 / 16, order=2) == [1, 3, 5, 7]


def test_nothing_is_told_while_the_last_word_waits() -> None:
    assert told(50, 1.0, slow=True) == [1]


def test_the_next_step_is_told_when_the_last_word_was_sent_or_could_not_be() -> None:
    waiting: list[tuple[Callable[[int], None], int]] = []

    def send(step: int) -> None:
        if step == 2:
            raise OSError("nobody listens")

    pipe: Any = SimpleNamespace(scheduler=SimpleNamespace(step=lambda: None))
    now = iter(range(100))
    Progress(10, lambda *told: waiting.append(told), send, lambda: next(now)).watch(pipe)
    pipe.scheduler.step()
    for taken in (2, 3):
        sending, step = waiting[-1]
        assert (len(waiting), step) == (taken - 1, taken - 1)
        with contextlib.suppress(OSError):
            sending(step)
        pipe.scheduler.step()
    assert [step for _, step in waiting] == [1, 2, 3]
    pipe.scheduler.step()
    assert len(waiting) == 3, "the last word waits"
