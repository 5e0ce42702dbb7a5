"""The adapter's side of Triton: one gRPC channel, and a poller that keeps the registry true."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from types import TracebackType
from typing import Self

from diffusion_backend.client import AsyncDiffusionClient, limits_from_config
from pydantic import ValidationError
from tritonclient.utils import InferenceServerException

from openai_adapter.registry import Model, Registry
from openai_adapter.settings import Settings

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
POLL_SECONDS_AT_START = 0.2
REFRESH_SECONDS = 10.0
CALL_TIMEOUT_SECONDS = 5.0
ADMIN_KEY_HEADER = "triton-grpc-protocol-admin-key"


class Triton:
    """Enter it inside the running event loop: the channel belongs to the loop it is made in."""

    client: AsyncDiffusionClient

    def __init__(self, settings: Settings, registry: Registry) -> None:
        self._settings = settings
        self._registry = registry
        self._refresh_at = 0.0

    async def __aenter__(self) -> Self:
        self.client = AsyncDiffusionClient(self._settings.triton_url)
        self._poller = asyncio.create_task(self._poll_forever())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._poller.cancel()
        await asyncio.gather(self._poller, return_exceptions=True)
        await self.client.close()

    async def _poll_forever(self) -> None:
        ready_once = False
        while True:
            try:
                await self._poll()
            except Exception:
                logger.exception("polling Triton failed")
                self._set_problem("the model server's state is unknown")
            ready_once = ready_once or self._registry.problem is None
            await asyncio.sleep(POLL_SECONDS if ready_once else POLL_SECONDS_AT_START)

    async def _poll(self) -> None:
        try:
            server_ready = await self.client.triton.is_server_ready(client_timeout=CALL_TIMEOUT_SECONDS)
        except InferenceServerException as error:
            logger.debug("Triton cannot be reached: %s", error)
            self._set_ready({})
            self._set_problem("the model server cannot be reached")
            return
        if time.monotonic() >= self._refresh_at or not self._registry.models:
            await self._refresh()
            self._refresh_at = time.monotonic() + REFRESH_SECONDS
            self._registry.contacted = self._registry.contacted or server_ready
        names = list(self._registry.models)
        self._set_ready(dict(zip(names, await asyncio.gather(*map(self._is_ready, names)), strict=True)))
        self._set_problem(self._find_problem(server_ready))

    def _find_problem(self, server_ready: bool) -> str | None:
        models = self._registry.models.values()
        waiting = sorted(model.name for model in models if not model.ready)
        if waiting:
            return f"models that are not ready: {', '.join(waiting)}"
        if not server_ready:
            return "the model server is not ready"
        return None if models else "the model server has no models"

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

    async def _list_names(self) -> list[str]:
        key = self._settings.triton_admin_key
        index = await self.client.triton.get_model_repository_index(
            headers={ADMIN_KEY_HEADER: key.get_secret_value()} if key else None,
            client_timeout=CALL_TIMEOUT_SECONDS,
        )
        # A model that an operator has unloaded stays listed, with this reason.
        return sorted({model.name for model in index.models if model.reason != "unloaded"})

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
        except ValidationError as error:
            logger.warning("the parameters of the ensemble %s are not ours: %s", name, error)
            return known
        return replace(known, limits=limits) if known else Model(name, limits)

    def _set_ready(self, ready: dict[str, bool]) -> None:
        models = self._registry.models
        self._registry.models = {
            name: replace(model, ready=ready.get(name, False)) for name, model in models.items()
        }

    def _set_problem(self, problem: str | None) -> None:
        if problem != self._registry.problem:
            logger.info("%s", problem or "ready")
        self._registry.problem = problem
