"""The step engine on a denoiser that adds one: order, bounds, fairness, cancels, and failures that stay their own."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_backend.engine import Engine, Job
from diffusion_backend.engine_events import EngineEvents
from diffusion_backend.errors import DiffusionError, Status
from diffusion_backend.rows import Denoiser
from diffusion_backend.tombstones import Tombstones
from torch import nn


class AddOne(nn.Module):
    """Adds one to each row; refuses rows that are negative. Remembers its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[float]] = []
        self.tried: list[list[float]] = []  # with those that failed
        self.before: Callable[[], object] = lambda: None
        self.after: Callable[[], object] = lambda: None

    def forward(
        self, hidden_states: torch.Tensor, timestep: torch.Tensor, scale: float = 1.0
    ) -> torch.Tensor:
        assert timestep.numel() in (1, len(hidden_states))
        self.before()
        self.tried.append(hidden_states.flatten(1)[:, 0].tolist())
        self.after()
        self.batches.append(self.tried[-1])
        if (hidden_states < 0).any():
            raise ValueError("a negative row")
        return hidden_states + scale


class Events(EngineEvents):
    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.counts: list[tuple[int, int]] = []

    def ended(self, outcome: str) -> None:
        self.outcomes.append(outcome)

    def counted(self, running: int, waiting: int) -> None:
        self.counts.append((running, waiting))


@dataclass
class Bench:
    """An engine and what came of its jobs, in the order of their ends."""

    engine: Engine
    events: Events
    tombstones: Tombstones
    model: AddOne = field(default_factory=AddOne)
    ends: list[tuple[str, Any]] = field(default_factory=list)

    def work(
        self, start: float, steps: int, size: int = 1, scale: float = 1.0
    ) -> Callable[[Denoiser], float]:
        def run(denoiser: Denoiser) -> float:
            latents = torch.full((1, size), float(start))
            for step in range(steps):
                latents = denoiser(self.model, (latents, torch.tensor(step)), {"scale": scale})
            return float(latents[0, 0])

        return run

    def submit(self, name: str, work: Callable[[Denoiser], Any], **job: Any) -> None:
        def end(value: Any = "cancelled") -> None:
            self.ends.append((name, value))

        self.engine.submit(Job(name, work, end, end, end, **job))

    def submit_at_once(self, jobs: dict[str, Callable[[Denoiser], Any]]) -> None:
        """None of them has had a step when the last one comes in."""
        self.engine.run(lambda: [self.submit(name, work) for name, work in jobs.items()])


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    yield from make_bench(tmp_path)


def make_bench(folder: Path, max_requests: int = 8, max_batch_rows: float = 4) -> Iterator[Bench]:
    events, tombstones = Events(), Tombstones(folder)
    engine = Engine(
        max_requests=max_requests, max_batch_rows=max_batch_rows, tombstones=tombstones, events=events
    )
    made = Bench(engine, events, tombstones)
    yield made
    engine.close()
    assert not made.events.counts or made.events.counts[-1] == (0, 0)


def test_requests_share_forwards_and_leave_when_they_are_done(bench: Bench) -> None:
    bench.submit_at_once({"two": bench.work(10, 2), "one": bench.work(20, 1), "three": bench.work(30, 3)})
    bench.engine.close()
    assert bench.model.batches == [[10, 20, 30], [11, 31], [32]]
    assert bench.ends == [("one", 21), ("two", 12), ("three", 33)]


def test_a_lone_request_starts_at_once(bench: Bench) -> None:
    bench.submit("a", bench.work(1, 1))
    started = time.monotonic()
    while not bench.ends and time.monotonic() < started + 5:
        time.sleep(0.001)
    assert bench.ends == [("a", 2)]


def test_a_newcomer_joins_at_the_next_step(bench: Bench) -> None:
    def join_once() -> None:
        if len(bench.model.batches) == 1:
            bench.submit("new", bench.work(50, 1))

    bench.model.before = join_once
    bench.submit("old", bench.work(10, 4))
    while len(bench.ends) < 2:
        time.sleep(0.001)
    assert bench.model.batches == [[10], [11], [12, 50], [13]]


def test_what_cannot_be_joined_takes_turns(bench: Bench) -> None:
    jobs = {
        "small": bench.work(10, 3),
        "wide": bench.work(20, 2, size=2),
        "scaled": bench.work(30, 1, scale=5),
    }
    bench.submit_at_once(jobs)
    bench.engine.close()
    assert [batch[0] for batch in bench.model.batches] == [10, 20, 30, 11, 21, 12]


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_newcomer_that_joins_none_has_its_turn_within_a_round(bench: Bench, step: int) -> None:
    def come_once() -> None:
        if len(bench.model.batches) == step:
            bench.submit("scaled", bench.work(100, 1, scale=5))

    bench.model.before = come_once
    bench.submit_at_once({"small": bench.work(10, 9), "wide": bench.work(30, 9, size=2)})
    while len(bench.ends) < 3:
        time.sleep(0.001)
    turns = [batch[0] for batch in bench.model.batches]
    assert step < turns.index(100) <= step + 3
    assert [turn for turn in turns if turn < 30] == list(range(10, 19))
    assert [turn for turn in turns if 30 <= turn < 100] == list(range(30, 39))


def test_the_cap_is_in_rows_of_the_default_size(bench: Bench) -> None:
    """Four rows, or one of size three and one more."""
    jobs = {str(number): bench.work(10 * number, 1) for number in range(1, 7)}
    bench.submit_at_once(jobs)
    bench.engine.run(lambda: None)
    while len(bench.ends) < len(jobs):
        time.sleep(0.001)
    assert [len(batch) for batch in bench.model.batches] == [4, 2]
    bench.model.batches.clear()
    bench.engine.run(
        lambda: [
            bench.submit("large", bench.work(1, 1), size=3.0),
            bench.submit("a", bench.work(2, 1)),
            bench.submit("b", bench.work(3, 1)),
        ]
    )
    bench.engine.close()
    assert bench.model.batches == [[1, 2], [3]]


def test_a_short_request_does_not_wait_for_long_ones(tmp_path: Path) -> None:
    for bench in make_bench(tmp_path, max_batch_rows=2):
        jobs = {f"long {number}": bench.work(0, 50) for number in range(6)}
        bench.submit_at_once({**jobs, "short": bench.work(100, 4)})
        bench.engine.close()
        assert bench.ends[0] == ("short", 104)
        # Seven rows in turns of two: a step of each takes four forwards at most.
        last = max(index for index, batch in enumerate(bench.model.batches) if 103 in batch)
        assert last <= 4 * 4


def test_a_failure_is_its_own(bench: Bench) -> None:
    failure = RuntimeError("one request's fault")

    def fail(_: Denoiser) -> None:
        raise failure

    bench.submit_at_once(
        {"good": bench.work(1, 3), "raises": fail, "negative": bench.work(-5, 2), "other": bench.work(2, 3)}
    )
    bench.engine.close()
    ends = dict(bench.ends)
    assert ends["good"] == 4
    assert ends["other"] == 5
    assert ends["raises"] is failure
    assert isinstance(ends["negative"], ValueError)
    assert sorted(bench.events.outcomes) == ["failed", "failed", "succeeded", "succeeded"]


def test_a_batch_that_is_too_large_is_not_tried_again_at_every_step(bench: Bench) -> None:
    def refuse_more_than_two() -> None:
        if (rows := len(bench.model.tried[-1])) > 2:
            raise torch.OutOfMemoryError(f"no memory for {rows} rows")

    bench.model.after = refuse_more_than_two
    bench.submit_at_once({str(number): bench.work(10 * number, 5) for number in range(4)})
    bench.engine.close()
    assert sorted(bench.ends) == [(str(number), 10 * number + 5) for number in range(4)]
    assert [len(batch) for batch in bench.model.tried] == [4, 1, 1, 1, 1] + 4 * [2, 2]


def test_a_row_that_fails_its_batch_leaves_the_others_theirs(bench: Bench) -> None:
    bench.submit_at_once({"bad": bench.work(-5, 1), "a": bench.work(1, 3), "b": bench.work(2, 3)})
    bench.engine.close()
    assert bench.model.batches[-2:] == [[2, 3], [3, 4]]


def test_a_burst_does_not_stop_those_that_run(tmp_path: Path) -> None:
    """Pipelines' beginnings take their time, too: a few of them are let in between two forwards."""
    begun: list[int] = []  # after how many forwards each newcomer began

    for bench in make_bench(tmp_path, max_requests=40):
        forwards = bench.model.batches

        def begin(_: Denoiser, forwards: list[list[float]] = forwards) -> None:
            begun.append(len(forwards))

        def arrive_at_the_second(bench: Bench = bench) -> None:
            if len(bench.model.batches) == 1:
                for number in range(30):
                    bench.submit(f"new {number}", begin)

        bench.model.before = arrive_at_the_second
        bench.submit("old", bench.work(0, 20))
        while len(bench.ends) < 31:
            time.sleep(0.001)
        bench.engine.close()
        assert max(running for running, _ in bench.events.counts) == 31
        assert max(waiting for _, waiting in bench.events.counts) == 30
    assert len(begun) == 30
    assert max(begun.count(forward) for forward in begun) <= 4


def test_jobs_come_in_together_or_not_at_all(tmp_path: Path) -> None:
    for bench in make_bench(tmp_path, max_requests=2):
        unused = [Job(str(number), bench.work(0, 1), print, print, print) for number in range(3)]
        with pytest.raises(DiffusionError, match="busy"):
            bench.engine.submit(*unused)
        bench.submit("a", bench.work(1, 1))
        bench.submit("b", bench.work(2, 1))
        bench.engine.close()
        assert sorted(bench.ends) == [("a", 2), ("b", 3)]


def test_a_closed_engine_takes_nothing_in(bench: Bench) -> None:
    bench.engine.close()
    with pytest.raises(DiffusionError, match="shutting down"):
        bench.submit("a", bench.work(1, 1))
    with pytest.raises(RuntimeError, match="closed"):
        bench.engine.run(lambda: None)


def test_a_fault_of_the_engine_itself_is_answered(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("a fault of the engine")

    with monkeypatch.context() as patch:
        patch.setattr(bench.engine, "_serve", fail)
        bench.submit_at_once({"served": bench.work(1, 1), "stands": bench.work(1, 1, size=2)})
        while len(bench.ends) < 2:
            time.sleep(0.001)
    assert {str(end) for _, end in bench.ends} == {"a fault of the engine"}
    bench.submit("next", bench.work(3, 1))
    bench.engine.close()
    assert bench.ends[-1] == ("next", 4)


def test_a_client_that_cannot_be_answered_does_not_end_the_thread(bench: Bench) -> None:
    def broken(_: Any = None) -> None:
        raise RuntimeError("the client is gone")

    bench.engine.submit(Job("a", bench.work(1, 1), broken, broken, broken))
    bench.submit("b", bench.work(2, 1))
    bench.engine.close()
    assert bench.ends == [("b", 3)]


def test_an_answer_that_cannot_be_made_is_a_failure(bench: Bench) -> None:
    told: list[BaseException] = []

    def broken(_: Any) -> None:
        raise RuntimeError("no room for it")

    bench.engine.submit(Job("a", bench.work(1, 1), broken, told.append, lambda: None))
    bench.engine.close()
    assert [str(error) for error in told] == ["no room for it"]


def test_full_and_duplicate_are_refused_and_places_are_freed(tmp_path: Path) -> None:
    for bench in make_bench(tmp_path, max_requests=2):
        release = threading.Event()
        bench.model.before = release.wait
        bench.submit("a", bench.work(1, 1))
        bench.submit("b", bench.work(2, 1))
        with pytest.raises(DiffusionError, match="busy") as full:
            bench.submit("c", bench.work(3, 1))
        with pytest.raises(DiffusionError, match="already running") as duplicate:
            bench.submit("a", bench.work(4, 1))
        assert (full.value.status, duplicate.value.status) == (Status.UNAVAILABLE, Status.INVALID_ARG)
        release.set()
        while len(bench.ends) < 2:
            time.sleep(0.001)
        bench.submit("a", bench.work(5, 1))
        bench.engine.close()
        assert [name for name, _ in bench.ends] == ["a", "b", "a"]


def test_a_cancelled_request_leaves_within_a_step_and_its_mates_go_on(bench: Bench) -> None:
    def cancel_at_the_third() -> None:
        if len(bench.model.batches) == 2:
            bench.tombstones.add("gone")

    bench.model.before = cancel_at_the_third
    bench.submit_at_once({"gone": bench.work(10, 20), "stays": bench.work(20, 5)})
    bench.engine.close()
    assert bench.ends == [("gone", "cancelled"), ("stays", 25)]
    assert bench.model.batches == [[10, 20], [11, 21], [12, 22], [23], [24]]
    assert sorted(bench.events.outcomes) == ["cancelled", "succeeded"]


def test_a_cancel_that_is_faster_than_its_request(bench: Bench) -> None:
    bench.tombstones.add("early")
    bench.submit("other", bench.work(1, 1))
    bench.submit("early", bench.work(1, 1))
    bench.engine.close()
    assert sorted(bench.ends) == [("early", "cancelled"), ("other", 2)]


def test_each_of_many_cancels_frees_its_place_within_a_step(tmp_path: Path) -> None:
    """At random moments, among rows that go on. Run with -s to see in how many forwards it still was."""
    draw, step_seconds, rows = random.Random(0), 0.002, 8
    forwards = []
    for bench in make_bench(tmp_path, max_requests=rows, max_batch_rows=rows):
        bench.model.before = lambda: time.sleep(step_seconds)
        for number in range(rows - 1):
            bench.submit(f"stays {number}", bench.work(0, 100_000))
        for number in range(200):
            name, freed = f"gone {number}", threading.Event()
            work = bench.work(1_000_000, 100_000)
            bench.engine.submit(Job(name, work, bench.ends.append, bench.ends.append, freed.set))
            time.sleep(draw.uniform(2, 4) * step_seconds)
            bench.tombstones.add(name)
            begun = len(bench.model.batches)
            assert freed.wait(5)
            forwards.append(sum(batch[-1] >= 1_000_000 for batch in bench.model.batches[begun:]))
        for number in range(rows - 1):
            bench.tombstones.add(f"stays {number}")
    print(f"cancel to free place: median {statistics.median(forwards)} forwards, worst {max(forwards)}")
    assert max(forwards) <= 1  # the one that it was in, or chosen for


def test_a_deadline_ends_a_request_that_runs(bench: Bench) -> None:
    bench.model.before = lambda: time.sleep(0.01)
    bench.submit("late", bench.work(1, 10_000), deadline=time.monotonic() + 0.1)
    bench.submit("in time", bench.work(2, 2), deadline=time.monotonic() + 60)
    bench.submit("before it began", bench.work(99, 1), deadline=time.monotonic() - 1)
    bench.engine.close()
    ends = dict(bench.ends)
    assert ends["before it began"].code == "deadline_exceeded"
    assert not any(99 in batch for batch in bench.model.batches)
    assert ends["in time"] == 4
    assert (ends["late"].status, ends["late"].code) == (Status.CANCELLED, "deadline_exceeded")


def test_without_batches_each_row_has_a_forward_of_its_own(bench: Bench) -> None:
    bench.engine.never_batch()
    bench.submit_at_once({"a": bench.work(1, 2), "b": bench.work(5, 2)})
    bench.engine.close()
    assert bench.model.batches == [[1], [5], [2], [6]]


def test_each_run_has_global_randomness_of_its_own(bench: Bench) -> None:
    """As pipelines have that call scheduler.step without a generator."""

    def draw(denoiser: Denoiser, seed: int) -> list[float]:
        torch.manual_seed(seed)
        drawn = []
        for step in range(4):
            denoiser(bench.model, (torch.zeros(1, 1), torch.tensor(step)), {})
            drawn.append(torch.rand(()).item())
        return drawn

    bench.submit_at_once({str(seed): lambda denoiser, seed=seed: draw(denoiser, seed) for seed in (1, 2, 3)})
    bench.engine.close()
    for name, drawn in bench.ends:
        torch.manual_seed(int(name))
        assert drawn == [torch.rand(()).item() for _ in range(4)]
