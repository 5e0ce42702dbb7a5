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

from diffusion_backend.deaths import Deaths, back_off
from diffusion_backend.guard import SHARED_MEMORY
from diffusion_backend.model_config import read_model_config
from diffusion_backend.model_control import LOADING, READY, UNLOADING, ControlError, ModelControl

logger = logging.getLogger(__name__)

# A stub's command line: this, <repository>/<model>/1/model.py, the name of its shared memory, ...
STUB_PROGRAM = "triton_python_backend_stub"
MAX_FAILURES = 3  # of loading in a row; after them a model is beyond repair, for the time being
_RETRY_SECONDS = (2.0, 5.0, 5.0, 10.0, 30.0, 60.0)  # after each of them, the last one for ever
_ASK_AGAIN_SECONDS = 1.0


class BeyondRepairError(Exception):
    """A model that could not be loaded again, and nothing else serves: tritonserver itself must be started anew."""


@dataclass(frozen=True)
class Stub:
    """A living stub: the model it runs, and the name of its shared memory."""

    model: str
    region: str


@dataclass
class _Patient:
    """A model that may have too few stubs; it is looked at when that is ``due``.

    ``ailing``: it has too few. ``loaded``: since its last death it was loaded again. ``failures`` to do so are those
    in a row. ``survivors`` are the stubs that the last load found alive: its own take their place.

    ``ensembles``: what does not serve because of a model beyond repair. ``absent``: an ensemble itself, which
    tritonserver was started without.
    """

    lost_at: float
    due: float
    lost: list[Stub] = field(default_factory=list)
    survivors: set[int] = field(default_factory=set)
    ailing: bool = False
    loaded: bool = False
    failures: int = 0
    ensembles: set[str] = field(default_factory=set)
    absent: bool = False


class StubWatcher:
    """``look()`` is called again and again, by one thread; it never waits for a load."""

    def __init__(
        self,
        control: ModelControl,
        repository: Path,
        say: Callable[[str], None],
        count: Callable[[str, str], None],
        grace: float,
    ) -> None:
        """``say`` tells the operator; ``count`` takes what is to be loaded again, and why.

        ``grace``: the seconds that a stub gets for its requests after others have taken its place.
        """
        self._control = control
        self._repository = repository
        self._grace = grace
        self._say = say
        self._count = count
        self._stubs: dict[int, Stub] = {}
        self._is_new = True  # no look at this tritonserver yet
        self._patients: dict[str, _Patient] = {}
        self._deaths: dict[str, Deaths] = {}
        self._replaced: dict[int, float] = {}  # stubs, and when their grace is over
        self._requests_lost = False
        self._reloaded: set[str] = set()
        # One load at a time: tritonserver 2.51 crashed when many failed at once.
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reload")
        self._loading: tuple[str, Future[None]] | None = None

    @property
    def ailing(self) -> dict[str, str]:
        """The models that are being healed, each with the reason."""
        return {
            model: "it cannot be loaded again" if patient.failures >= MAX_FAILURES else "a process of it died"
            for model, patient in self._patients.items()
            if patient.ailing
        }

    @property
    def absent(self) -> set[str]:
        """The ensembles that a new tritonserver must be started without; they are loaded when they can be."""
        return {model for model, patient in self._patients.items() if patient.absent}

    def forget(self) -> None:
        """Start over, with another tritonserver, which must not fail because of a model that can't be loaded."""
        absent = self.absent.union(*(patient.ensembles for patient in self._patients.values()))
        now = time.monotonic()
        self._patients = {
            model: _Patient(lost_at=now, due=now, ailing=True, failures=MAX_FAILURES, absent=True)
            for model in absent
        }
        self._stubs, self._replaced, self._loading = {}, {}, None
        self._is_new = True
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
        if self._is_new:
            self._find_short(now)
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
            if self._is_orphan(model, states):
                self._control.unload(model)
                self._reloaded.discard(model)
        for model, patient in self._patients.items():
            if patient.ailing and not patient.absent:
                state = states.get(model)
                if state not in (READY, LOADING) or (state == READY and self._is_orphan(model, states)):
                    patient.due = 0.0  # it need not wait for its next load

    def _is_orphan(self, model: str, states: dict[str, str]) -> bool:
        """Whether the ensemble of a stage was unloaded."""
        ensemble = self._control.describe(model).ensemble
        return ensemble is not None and states.get(ensemble) not in (READY, LOADING)

    def _find_short(self, now: float) -> None:
        """What died before the first look was never seen alive."""
        try:
            ready = [model for model, state in self._control.states().items() if state == READY]
            short = [model for model in ready if self._is_short(model, besides=set())]
        except ControlError as error:
            logger.debug("cannot ask about the models: %s", error)
            return
        for model in short:
            self._patients.setdefault(model, _Patient(lost_at=now, due=now))
        self._is_new = False

    def _treat(self, model: str, patient: _Patient) -> None:
        now = time.monotonic()
        try:
            states = self._control.states()
            state = states.get(model)
            short = state == READY and not patient.absent and self._is_short(model, patient.survivors)
            if short and self._is_orphan(model, states):
                # A reload would have Triton load its ensemble, too.
                self._requests_lost = True
                patient.due = now + _ASK_AGAIN_SECONDS
                self._control.unload(model)
                return
            if short and patient.failures >= MAX_FAILURES:
                self._require_others(model, patient, states)
        except ControlError as error:
            # tritonserver may be ending; if it isn't, it will answer the next time.
            logger.debug("cannot ask about %s: %s", model, error)
            patient.due = now + _ASK_AGAIN_SECONDS
            return
        if state == LOADING:  # by an operator
            patient.due = now + _ASK_AGAIN_SECONDS
        elif patient.absent and not patient.loaded and state != READY and (self._repository / model).is_dir():
            self._load(model, patient)
        elif not short:
            self._discharge(model, patient, is_ready=state == READY)
        elif not patient.ailing or patient.loaded:
            self._admit(model, patient)
        else:
            if patient.failures:
                self._count(model, "loading failed")
            self._load(model, patient)

    def _admit(self, model: str, patient: _Patient) -> None:
        """It has died, perhaps once more: the more often of late, the longer it waits."""
        now = time.monotonic()
        wait = back_off(self._deaths.setdefault(model, Deaths()).note(now))
        patient.ailing, patient.loaded = True, False
        self._requests_lost = True
        self._count(model, "a process died")
        self._say(f"a process of {model} died; loading it again{f' in {wait:g} s' if wait else ''}")
        patient.due = now + wait
        if not wait:
            self._load(model, patient)

    def _discharge(self, model: str, patient: _Patient, *, is_ready: bool) -> None:
        del self._patients[model]
        if not patient.ailing:
            return
        self._tidy_up(patient)
        if is_ready:
            if not patient.absent:
                self._reloaded.add(model)
            seconds = time.monotonic() - patient.lost_at
            self._say(f"{model} serves again, {seconds:.1f} s after its process died")
        else:
            self._say(f"{model} is not loaded any more, and so not healed")

    def _load(self, model: str, patient: _Patient) -> None:
        patient.survivors = {pid for pid, stub in self._stubs.items() if stub.model == model}
        load = self._control.load if patient.absent else self._control.reload
        self._loading = model, self._loader.submit(_load, load, self._repository, model)

    def _require_others(self, model: str, patient: _Patient, states: dict[str, str]) -> None:
        """Raise a BeyondRepairError unless something serves that has nothing to do with what is beyond repair."""
        lost = {model for model, each in self._patients.items() if each.failures >= MAX_FAILURES}
        ready = {
            name: self._control.describe(name)
            for name, state in states.items()
            if state == READY and name not in lost
        }
        patient.ensembles = {name for name, loaded in ready.items() if model in loaded.steps}
        ensembles = {name for name, loaded in ready.items() if lost & loaded.steps}
        if not any(name not in ensembles and each.ensemble not in ensembles for name, each in ready.items()):
            self._patients.clear()
            raise BeyondRepairError(f"{model} could not be loaded again in {patient.failures} tries")

    def _is_short(self, model: str, besides: set[int]) -> bool:
        """Whether a model that Triton calls ready has fewer stubs than instances, ``besides`` those of before.

        One that was unloaded, or is being unloaded, is not called so: its stubs ended as they should. One that an
        operator loads anew has the new stubs before the old ones end.
        """
        old = besides | self._replaced.keys()
        stubs = [pid for pid, stub in self._stubs.items() if stub.model == model and pid not in old]
        return len(stubs) < self._control.describe(model).processes

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
        patient = self._patients[model]
        error = load.exception()
        if error is None:
            patient.loaded, patient.failures = True, 0
            return
        patient.failures += 1
        wait = _RETRY_SECONDS[min(patient.failures, len(_RETRY_SECONDS)) - 1]
        patient.due = time.monotonic() + wait
        self._say(f"{model} could not be loaded again, next try in {wait:g} s: {error}")


def _load(load: Callable[[str], None], repository: Path, model: str) -> None:
    try:
        _require_code(repository, model)
    except (OSError, ValueError) as error:
        raise ControlError(str(error)) from None
    load(model)


def _require_code(repository: Path, model: str) -> None:
    """Raise an OSError if a Python model, or a step of an ensemble, has no model.py: Triton would wait for ever."""
    config = read_model_config(repository / model).message
    file = config.default_model_filename or "model.py"
    if config.backend == "python" and not any((repository / model).glob(f"*/{file}")):
        raise FileNotFoundError(f"{repository / model} has no {file}")
    for step in config.ensemble_scheduling.step:
        _require_code(repository, step.model_name)


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
