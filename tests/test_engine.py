"""The engine: order, bounds, and a thread that survives whatever a job does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from diffusion_backend.engine import Engine, Job
from diffusion_backend.errors import DiffusionError, Status


class Results:
    """Collects what jobs answer."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def job(self, request_id: str, run: Callable[[], Any]) -> Job:
        return Job(request_id, run, self.values.append, self.values.append)


def test_jobs_run_in_order_and_failures_stay_their_own() -> None:
    engine, results = Engine(max_queued=10), Results()
    failure = ValueError("one job's fault")

    def fail() -> None:
        raise failure

    for number, run in enumerate([lambda: 1, fail, lambda: 3]):
        engine.submit(results.job(str(number), run))
    engine.close()
    assert results.values == [1, failure, 3]


def test_a_client_that_cannot_be_answered_does_not_end_the_thread() -> None:
    engine, results = Engine(max_queued=10), Results()

    def broken(_: Any) -> None:
        raise RuntimeError("the client is gone")

    engine.submit(Job("a", lambda: 1, broken, broken))
    engine.submit(results.job("b", lambda: 2))
    engine.close()
    assert results.values == [2]


def test_full_and_duplicate_are_refused_and_places_are_freed() -> None:
    engine, results = Engine(max_queued=2), Results()
    release = threading.Event()
    engine.submit(results.job("a", release.wait))
    engine.submit(results.job("b", lambda: "b"))
    with pytest.raises(DiffusionError, match="busy") as full:
        engine.submit(results.job("c", lambda: "c"))
    with pytest.raises(DiffusionError, match="already running") as duplicate:
        engine.submit(results.job("a", lambda: "again"))
    assert (full.value.status, duplicate.value.status) == (Status.UNAVAILABLE, Status.INVALID_ARG)
    done = threading.Event()
    release.set()
    while "b" not in results.values:
        done.wait(0.01)
    engine.submit(results.job("a", lambda: "again"))
    engine.close()
    assert results.values == [True, "b", "again"]
