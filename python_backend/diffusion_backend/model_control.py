"""Triton's model-control API, as the launcher uses it: which models are loaded, and loading one anew."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass

import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from diffusion_backend.client import ADMIN_KEY_METADATA, CHANNEL_ARGS

READY, LOADING, UNLOADING = "READY", "LOADING", "UNLOADING"
_CALL_SECONDS = 5.0
# Loading reads weights and runs the warmup; one that takes longer than this has failed.
_LOAD_SECONDS = 1800.0
_RELOAD_MARK = "reloaded"


@dataclass(frozen=True)
class LoadedModel:
    """``processes``: how many stubs a Python model should have; 0 for others.

    ``ensemble``: the one that a stage of ours belongs to. ``steps``: the models of an ensemble.
    """

    processes: int
    ensemble: str | None
    steps: frozenset[str]


class ModelControl:
    """Speaks to a tritonserver that may be away; each call then raises a ControlError."""

    def __init__(self, grpc_url: str, admin_key: str) -> None:
        self._client = triton_grpc.InferenceServerClient(grpc_url, channel_args=CHANNEL_ARGS)
        self._headers = {ADMIN_KEY_METADATA: admin_key}

    def states(self) -> dict[str, str]:
        """The state of every model of the repository; "" for one that was never loaded."""
        try:
            index = self._client.get_model_repository_index(
                headers=self._headers, client_timeout=_CALL_SECONDS
            )
        except InferenceServerException as error:
            raise ControlError(str(error)) from None
        return {model.name: model.state for model in index.models}

    def describe(self, model: str) -> LoadedModel:
        """What a loaded model is."""
        try:
            config = self._client.get_model_config(model, client_timeout=_CALL_SECONDS).config
        except InferenceServerException as error:
            raise ControlError(str(error)) from None
        return LoadedModel(
            processes=sum(group.count * max(1, len(group.gpus)) for group in config.instance_group)
            if config.backend == "python"
            else 0,
            ensemble=config.parameters["ensemble"].string_value if "ensemble" in config.parameters else None,
            steps=frozenset(step.model_name for step in config.ensemble_scheduling.step),
        )

    def load(self, model: str) -> None:
        """Load a model that is not loaded, an ensemble with its stages."""
        try:
            self._client.load_model(model, headers=self._headers, client_timeout=_LOAD_SECONDS)
        except InferenceServerException as error:
            raise ControlError(str(error)) from None

    def unload(self, model: str) -> None:
        """Unload a model; its running requests may finish."""
        try:
            self._client.unload_model(model, headers=self._headers, client_timeout=_CALL_SECONDS)
        except InferenceServerException as error:
            raise ControlError(str(error)) from None

    def reload(self, model: str) -> None:
        """Load a model anew as it is configured now; the instances it has serve until the new ones are ready.

        Triton takes a load for done when nothing has changed, whatever became of the processes. So the
        configuration that it gets back has a parameter of its own.
        """
        try:
            config = self._client.get_model_config(model, as_json=True, client_timeout=_CALL_SECONDS)[
                "config"
            ]
            config.setdefault("parameters", {})[_RELOAD_MARK] = {"string_value": uuid.uuid4().hex}
            self._client.load_model(
                model, headers=self._headers, config=json.dumps(config), client_timeout=_LOAD_SECONDS
            )
        except InferenceServerException as error:
            raise ControlError(str(error)) from None


class ControlError(Exception):
    """What Triton or gRPC said of a call that failed."""
