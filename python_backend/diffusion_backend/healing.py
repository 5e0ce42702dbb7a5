"""What keeps a server that was ready once alive: its parts are watched, and started again when they die."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from diffusion_backend.deaths import WINDOW_SECONDS, Deaths, back_off
from diffusion_backend.healing_report import TRITON
from diffusion_backend.model_control import LOADING, READY, ControlError, ModelControl
from diffusion_backend.processes import LaunchError
from diffusion_backend.stub_watcher import BeyondRepairError, StubWatcher

if TYPE_CHECKING:
    from diffusion_backend.launcher import Server

logger = logging.getLogger(__name__)

MAX_DEATHS = 5  # of tritonserver or the adapter, within the window
_MODELS_SECONDS = 2.0  # between two looks at which models an operator has loaded or unloaded
ADAPTER = "adapter"


class Healer:
    """``tick()`` is called again and again; it waits for nothing but the end of what has to be stopped."""

    def __init__(
        self, server: Server, say: Callable[[str], None], hurry: Callable[[], bool] = lambda: False
    ) -> None:
        self._server = server
        self._say = say
        self._hurry = hurry
        self._report = server.report
        self._control = ModelControl(server.triton.grpc_url, server.triton.admin_key)
        self._stubs = StubWatcher(
            self._control, server.triton.repository, say, self._count_death, server.triton.exit_timeout
        )
        self._deaths = {TRITON: Deaths(), ADAPTER: Deaths()}
        self._due: dict[str, float] = {}  # parts that are down, and when they are started
        self._down_since: float | None = None  # tritonserver is not ready since then
        self._models_due = 0.0

    def tick(self) -> None:
        """One look at every part.

        Raises:
            LaunchError: one died too often, and why the last time.
        """
        self._tend_adapter()
        self._tend_triton()
        triton = {TRITON: "it died and is being started again"} if self._down_since is not None else {}
        self._report.set_ailing(triton or self._stubs.ailing)

    def tend_models(self) -> None:
        """One look at the models alone, while tritonserver is ready and the adapter is starting."""
        self._watch_models()
        self._report.set_ailing(self._stubs.ailing)

    def close(self) -> None:
        self._stubs.close()

    def _count_death(self, model: str, reason: str) -> None:
        self._server.triton.note_lost_requests()
        self._report.count(model, reason)

    def _tend_adapter(self) -> None:
        adapter = self._server.adapter
        if ADAPTER in self._due:
            if time.monotonic() >= self._due[ADAPTER]:
                del self._due[ADAPTER]
                adapter.start()
        elif adapter.process.poll() is not None:
            self._bury(ADAPTER, adapter.process.obituary(), adapter.process.describe_exit())
            adapter.stop()

    def _tend_triton(self) -> None:
        triton = self._server.triton
        if TRITON in self._due:
            if time.monotonic() >= self._due[TRITON]:
                del self._due[TRITON]
                triton.start(without=self._stubs.absent)
        elif triton.process.poll() is not None:
            # While it starts, its error messages are the reason; later they may be about old requests.
            why = triton.process.obituary() if self._down_since is None else triton.failure()
            self._end_triton(why, triton.process.describe_exit())
        elif self._down_since is None:
            self._watch_models()
        elif triton.is_ready():
            self._say(f"tritonserver serves again, {time.monotonic() - self._down_since:.1f} s after it died")
            self._down_since = None

    def _watch_models(self) -> None:
        triton = self._server.triton
        try:
            self._stubs.look(triton.process.pid)
        except BeyondRepairError as error:
            self._end_triton(f"{error}: tritonserver is started anew", "a model could not be loaded again")
            return
        if time.monotonic() >= self._models_due:
            self._models_due = time.monotonic() + _MODELS_SECONDS
            try:
                states = self._control.states()
                triton.load_next_time({model for model, state in states.items() if state in (READY, LOADING)})
                self._stubs.follow_unloading(states)
            except ControlError as error:
                logger.debug("cannot ask about the models: %s", error)

    def _end_triton(self, message: str, reason: str) -> None:
        if self._down_since is None:
            self._down_since = time.monotonic()
        self._report.set_ailing({TRITON: reason})
        self._bury(TRITON, message, reason)
        self._stubs.forget()
        # Also after it has ended by itself: its stubs and its shared memory are still there.
        self._server.triton.stop(self._hurry)

    def _bury(self, part: str, message: str, reason: str) -> None:
        now = time.monotonic()
        deaths = self._deaths[part].note(now)
        if deaths > MAX_DEATHS:
            raise LaunchError(f"{message}\nit died {deaths} times in {WINDOW_SECONDS / 60:g} minutes")
        self._say(message)
        self._report.count(part, reason)
        self._due[part] = now + back_off(deaths)
