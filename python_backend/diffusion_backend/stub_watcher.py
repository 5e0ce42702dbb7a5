"""Watches tritonserver's Python stubs by process id, and has a model loaded anew when one of its stubs has died.

Triton itself never starts a dead stub again, and tritonserver 2.51 goes on calling its model ready.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from diffusion_backend.guard import SHARED_MEMORY
from diffusion_backend.model_control import LOADING, READY, UNLOADING, ControlError, ModelControl

logger = logging.getLogger(__name__)

# A stub's command line: this, <repository>/<model>/1/model.py, the name of its shared memory, ...
STUB_PROGRAM = "triton_python_backend_stub"
MAX_RELOADS = 3  # in a row, before the model is beyond repair
_RETRY_SECONDS = (0.0, 2.0, 5.0)  # before each of them


class BeyondRepairError(Exception):
    """A model that could not be loaded again: tritonserver itself must be started anew."""


@dataclass(frozen=True)
class Stub:
    """A living stub: the model it runs, and the name of its shared memory."""

    model: str
    region: str


@dataclass
class _Patient:
    """A model that lost stubs. ``reloads`` are those begun; the next one is due at ``due``.

    ``survivors`` are the stubs that the last one found alive: its own take their place.
    """

    lost_at: float
    due: float
    lost: list[Stub] = field(default_factory=list)
    survivors: set[int] = field(default_factory=set)
    reloads: int = 0


class StubWatcher:
    """``look()`` is called again and again, by one thread; it never waits for a load."""

    def __init__(
        self,
        control: ModelControl,
        say: Callable[[str], None],
        count: Callable[[str, str], None],
        grace: float,
    ) -> None:
        """``say`` tells the operator; ``count`` takes what is loaded again, and why.

        ``grace``: the seconds that a stub gets for its requests after others have taken its place.
        """
        self._control = control
        self._grace = grace
        self._say = say
        self._count = count
        self._stubs: dict[int, Stub] = {}
        self._patients: dict[str, _Patient] = {}
        self._replaced: dict[int, float] = {}  # stubs, and when their grace is over
        self._requests_lost = False
        self._reloaded: set[str] = set()
        # One load at a time: tritonserver 2.51 crashed when many failed at once.
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reload")
        self._loading: tuple[str, Future[None]] | None = None

    @property
    def ailing(self) -> dict[str, str]:
        """The models that are being healed, each with the reason."""
        return {model: "a process of it died" for model, patient in self._patients.items() if patient.reloads}

    def forget(self) -> None:
        """Start over, with another tritonserver."""
        self._stubs, self._patients, self._replaced, self._loading = {}, {}, {}, None
        self._requests_lost = False
        self._reloaded = set()

    def close(self) -> None:
        """End the loading thread; a load that is still running ends with its tritonserver."""
        self._loader.shutdown(wait=False, cancel_futures=True)

    def look(self, tritonserver: int) -> None:
        """See which stubs have gone since the last look, and do what is due.

        Raises:
            BeyondRepairError: a model could not be loaded again, and why.
        """
        known = {pid: stub for pid, stub in self._stubs.items() if _read_stub(pid) == stub}
        stubs = {**known, **find_stubs(tritonserver)}
        now = time.monotonic()
        for pid in self._stubs.keys() - stubs.keys():
            lost = self._stubs[pid]
            self._patients.setdefault(lost.model, _Patient(lost_at=now, due=now)).lost.append(lost)
        self._stubs = stubs
        self._end_replaced(now)
        self._finish_loading()
        for model, patient in list(self._patients.items()):
            if self._loading is None and now >= patient.due:
                self._treat(model, patient)

    def follow_unloading(self, states: dict[str, str]) -> None:
        """Finish what an operator began by unloading an ensemble with its stages.

        Triton never ends a stage of an ensemble that lost requests, and does not begin with one that was loaded by
        itself, as a reload does.
        """
        end = time.monotonic() + self._grace
        for pid, stub in self._stubs.items():
            if self._requests_lost and states.get(stub.model) == UNLOADING:
                self._replaced.setdefault(pid, end)
        for model in [model for model in self._reloaded if states.get(model) == READY]:
            ensemble = self._control.ensemble_of(model)
            if ensemble is not None and states.get(ensemble) not in (READY, LOADING):
                self._reloaded.discard(model)
                self._control.unload(model)

    def _treat(self, model: str, patient: _Patient) -> None:
        try:
            short = self._is_short(model, besides=patient.survivors)
        except ControlError as error:
            # tritonserver may be ending; if it isn't, it will answer the next time.
            logger.debug("cannot ask about %s: %s", model, error)
            patient.due = time.monotonic() + 1
            return
        if not short:
            del self._patients[model]
            if patient.reloads:
                self._reloaded.add(model)
                self._tidy_up(patient)
                self._say(
                    f"{model} serves again, {time.monotonic() - patient.lost_at:.1f} s after its process died"
                )
            return
        if patient.reloads >= MAX_RELOADS:
            raise BeyondRepairError(f"{model} could not be loaded again in {MAX_RELOADS} tries")
        if not patient.reloads:
            self._say(f"a process of {model} died; loading it again")
        self._requests_lost = True
        patient.reloads += 1
        patient.survivors = {pid for pid, stub in self._stubs.items() if stub.model == model}
        self._count(model, "a process died" if patient.reloads == 1 else "loading failed")
        self._loading = model, self._loader.submit(self._control.reload, model)

    def _is_short(self, model: str, besides: set[int]) -> bool:
        """Whether a model that Triton calls ready has fewer stubs than instances, ``besides`` those of before.

        One that was unloaded, or is being unloaded, is in no such state: its stubs ended as they should. One that
        an operator loads anew has the new stubs before the old ones end.
        """
        if self._control.states().get(model) != READY:
            return False
        old = besides | self._replaced.keys()
        stubs = [pid for pid, stub in self._stubs.items() if stub.model == model and pid not in old]
        return len(stubs) < self._control.instances(model)

    def _tidy_up(self, patient: _Patient) -> None:
        """See to the end of what was replaced.

        Triton ends the other stubs of a model that it has loaded anew, and removes their shared memory, once their
        requests are done. But those that the dead stub was at count as running for ever.
        """
        for stub in patient.lost:
            (SHARED_MEMORY / stub.region).unlink(missing_ok=True)
        end = time.monotonic() + self._grace
        self._replaced.update(dict.fromkeys(patient.survivors, end))

    def _end_replaced(self, now: float) -> None:
        self._replaced = {pid: end for pid, end in self._replaced.items() if pid in self._stubs}
        for pid, end in self._replaced.items():
            if now >= end:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                (SHARED_MEMORY / self._stubs[pid].region).unlink(missing_ok=True)

    def _finish_loading(self) -> None:
        if self._loading is None or not self._loading[1].done():
            return
        model, load = self._loading
        self._loading = None
        error = load.exception()
        patient = self._patients.get(model)
        if error is not None and patient is not None:
            self._say(f"{model} could not be loaded again: {error}")
            patient.due = time.monotonic() + _RETRY_SECONDS[min(patient.reloads, MAX_RELOADS - 1)]


def find_stubs(tritonserver: int) -> dict[int, Stub]:
    """The living Python stubs of a tritonserver, by process id."""
    children: set[int] = set()
    # A process is its thread's child, and another thread's when that one ends: a single look may find it at neither.
    for _ in range(2):
        for thread in Path(f"/proc/{tritonserver}/task").glob("*"):
            with contextlib.suppress(OSError):  # it ended while we looked
                children.update(map(int, (thread / "children").read_text().split()))
    return {pid: stub for pid in children if (stub := _read_stub(pid))}


def _read_stub(pid: int) -> Stub | None:
    with contextlib.suppress(OSError):
        # A process that has ended and waits to be reaped has no command line.
        command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if Path(command[0]).name == STUB_PROGRAM:
            return Stub(Path(command[1]).parents[1].name, command[2])
    return None
