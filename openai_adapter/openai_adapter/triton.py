"""The adapter's side of Triton: one gRPC channel, and a poller that keeps the registry true."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from diffusion_backend.client import ADMIN_KEY_METADATA, AsyncDiffusionClient, limits_from_config
from diffusion_backend.healing_report import TRITON, HealingReport, read_report
from tritonclient.utils import InferenceServerException

from openai_adapter.canary import Canary
from openai_adapter.registry import Model, Registry
from openai_adapter.settings import Settings

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
POLL_SECONDS_AT_START = 0.2
REPORT_SECONDS = 0.2
REFRESH_SECONDS = 10.0
CALL_TIMEOUT_SECONDS = 5.0
# That requests which outlasted ``shutdown_seconds`` get to be cancelled: a denoising step is mostly much shorter.
# Who waits for the adapter's end waits for both (docs/operations.md, "Stopping").
CLOSE_SECONDS = 10.0
_UNREACHABLE = "the model server cannot be reached"


class Triton:
    """Enter it inside the running event loop: the channel belongs to the loop it is made in."""

    client: AsyncDiffusionClient

    def __init__(self, settings: Settings, registry: Registry) -> None:
        self._settings = settings
        self._registry = registry
        self._canary = Canary(self._hear)
        self._silent: set[str] = set()  # stages that no longer answer, since the last poll
        self._wake = asyncio.Event()
        self._report = HealingReport()
        self._ready: set[str] = set()  # the ensembles that Triton calls ready
        self._server_problem: str | None = registry.problem
        self._refresh_at = 0.0
        self._foreign: set[str] = set()  # ensembles that are none of ours, each said once

    async def __aenter__(self) -> Self:
        self.client = AsyncDiffusionClient(self._settings.triton_url)
        loops: list[Coroutine[Any, Any, None]] = [self._poll_forever()]
        if self._settings.healing_report:
            loops.append(self._read_report_forever())
        self._loops = [asyncio.create_task(loop) for loop in loops]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await self._canary.close()
        await self.client.close(CLOSE_SECONDS)

    def is_proven(self, name: str, moment: float) -> bool:
        """Whether a model is ready, and all of its stages have answered a question asked after ``moment``."""
        model = self._registry.models.get(name)
        return (
            model is not None
            and model.ready
            and all(self._canary.proven_since(stage, moment) for stage in model.stages)
        )

    async def _poll_forever(self) -> None:
        ready_once = False
        while True:
            try:
                await self._poll()
            except Exception:
                logger.exception("polling Triton failed")
                self._server_problem = "the model server's state is unknown"
            self._judge()
            ready_once = ready_once or self._registry.problem is None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS if ready_once else POLL_SECONDS_AT_START):
                    await self._wake.wait()
            self._wake.clear()

    async def _read_report_forever(self) -> None:
        assert self._settings.healing_report
        while True:
            try:
                self._read_report(self._settings.healing_report)
            except Exception:
                logger.exception("the healing report could not be followed")
            await asyncio.sleep(REPORT_SECONDS)

    def _read_report(self, path: Path) -> None:
        before, self._report = self._report.ailing, read_report(path)
        if self._report.ailing != before:
            for part in self._report.ailing.keys() - before.keys():
                self._registry.report_loss(part)
            for part in before.keys() - self._report.ailing.keys():
                self._canary.doubt(part)  # until it says itself that it is well, which it can at once
            self._canary.ask(self.client)
            self._judge()

    async def _poll(self) -> None:
        try:
            server_ready = await self.client.triton.is_server_ready(client_timeout=CALL_TIMEOUT_SECONDS)
        except InferenceServerException as error:
            logger.debug("Triton cannot be reached: %s", error)
            self._ready = set()
            self._server_problem = _UNREACHABLE
            return
        await self._ask_readiness()
        # A model that is not ready may be one that an operator has unloaded: then it is not missed.
        if time.monotonic() >= self._refresh_at or self._ready != self._registry.models.keys():
            await self._refresh()
            await self._ask_readiness()
            self._refresh_at = time.monotonic() + REFRESH_SECONDS
            found = any(model.limits for model in self._registry.models.values())
            self._registry.contacted = self._registry.contacted or server_ready or found
        self._canary.ask(self.client)
        self._report_losses()
        # The server as a whole is "not ready" while any model is being unloaded; what counts is who serves.
        self._server_problem = None

    async def _ask_readiness(self) -> None:
        names = list(self._registry.models)
        ready = await asyncio.gather(*map(self._is_ready, names))
        self._ready = {name for name, is_ready in zip(names, ready, strict=True) if is_ready}

    def _hear(self, stage: str) -> None:
        """A stage has begun to answer, or has ceased to."""
        if self._canary.problem(stage) is None:
            self._judge()
        else:
            self._silent.add(stage)
            self._wake.set()

    def _report_losses(self) -> None:
        """What runs in a stage that has died is lost; in one that is being unloaded it may finish."""
        for model in self._registry.models.values():
            if model.name in self._ready:
                for stage in self._silent & model.stages.keys():
                    self._registry.report_loss(stage)
        self._silent.clear()

    def _judge(self) -> None:
        """Put together what is known: Triton's word, the stages' own, and the launcher's."""
        problems = {name: self._find_problem(model) for name, model in self._registry.models.items()}
        self._registry.models = {
            name: replace(
                model,
                ready=problems[name] is None,
                stages={stage: self._canary.description(stage) for stage in model.stages},
            )
            for name, model in self._registry.models.items()
        }
        waiting = [f"{name} ({problem})" for name, problem in sorted(problems.items()) if problem]
        if TRITON in self._report.ailing:
            self._set_problem(f"the model server: {self._report.ailing[TRITON]}")
        elif self._server_problem:
            self._set_problem(self._server_problem)
        elif waiting:
            self._set_problem(f"models that are not ready: {', '.join(waiting)}")
        else:
            self._set_problem(None if problems else "the model server has no models")

    def _find_problem(self, model: Model) -> str | None:
        if TRITON in self._report.ailing or self._server_problem == _UNREACHABLE:
            return _UNREACHABLE
        if model.name not in self._ready:
            return "it is not loaded"
        if model.limits is None:
            return "its limits are not known yet"
        for stage in model.stages:
            problem = self._report.ailing.get(stage) or self._canary.problem(stage)
            if problem:
                return f"{stage}: {problem}"
        return None

    async def _is_ready(self, name: str) -> bool:
        try:
            return bool(await self.client.triton.is_model_ready(name, client_timeout=CALL_TIMEOUT_SECONDS))
        except InferenceServerException as error:
            logger.debug("readiness of %s: %s", name, error)
            return False

    async def _refresh(self) -> None:
        """Ask for the models and their limits. What cannot be asked now keeps its last answer."""
        known = self._registry.models
        try:
            names = self._settings.models or await self._list_names()
        except InferenceServerException as error:
            logger.warning("Triton does not list its models (is the admin key right?): %s", error)
            return
        found = await asyncio.gather(*map(self._describe, names))
        models = {model.name: model for model in found if model}
        for name in models.keys() - known.keys():
            logger.info("found the model %s", name)
        for name in known.keys() - models.keys():
            logger.info("the model %s is gone", name)
        self._registry.models = models
        stages = sorted({stage for model in models.values() for stage in model.stages})
        batched = await asyncio.gather(*map(self._is_batched, stages))
        self._canary.watch(
            {stage: known for stage, known in zip(stages, batched, strict=True) if known is not None}
        )

    async def _list_names(self) -> list[str]:
        key = self._settings.triton_admin_key
        index = await self.client.triton.get_model_repository_index(
            headers={ADMIN_KEY_METADATA: key.get_secret_value()} if key else None,
            client_timeout=CALL_TIMEOUT_SECONDS,
        )
        # A model that an operator has unloaded stays listed, with this reason.
        return sorted(
            {
                model.name
                for model in index.models
                if model.reason != "unloaded" and model.state != "UNLOADING"
            }
        )

    async def _describe(self, name: str) -> Model | None:
        """The model as it is known; None for what is no ensemble of ours."""
        known = self._registry.models.get(name)
        if known is None and name in self._settings.models:
            known = Model(name, None)
        try:
            answer = await self.client.triton.get_model_config(name, client_timeout=CALL_TIMEOUT_SECONDS)
            if answer.config.platform != "ensemble":
                return None
            limits = limits_from_config(answer.config)
        except InferenceServerException as error:
            logger.debug("no configuration of %s: %s", name, error)
            return known
        except ValueError as error:
            if name not in self._foreign:
                logger.warning("the parameters of the ensemble %s are not ours: %s", name, error)
            self._foreign.add(name)
            return known
        steps = [step.model_name for step in answer.config.ensemble_scheduling.step]
        return replace(
            known or Model(name, limits),
            limits=limits,
            stages={stage: self._canary.description(stage) for stage in steps},
        )

    async def _is_batched(self, stage: str) -> bool | None:
        try:
            answer = await self.client.triton.get_model_config(stage, client_timeout=CALL_TIMEOUT_SECONDS)
        except InferenceServerException as error:
            logger.debug("no configuration of %s: %s", stage, error)
            return None
        return bool(answer.config.max_batch_size > 0)

    def _set_problem(self, problem: str | None) -> None:
        if problem != self._registry.problem:
            logger.info("%s", problem or "ready")
        self._registry.problem = problem
