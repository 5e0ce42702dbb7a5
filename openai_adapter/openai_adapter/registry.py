"""Which models Triton serves and whether they are ready: the last word from Triton, kept while it is away."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diffusion_backend.client import denoise_model, vae_decode_model
from diffusion_backend.errors import show
from diffusion_backend.settings import ModelLimits, check_previews

from openai_adapter.errors import ApiError, unavailable


@dataclass(frozen=True)
class Model:
    """One ensemble. ``limits`` are None until Triton has told them.

    ``stages`` are the models of its steps, each with the last description its process gave, once it gave one.
    """

    name: str
    limits: ModelLimits | None
    ready: bool = False
    stages: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)

    @property
    def denoise_facts(self) -> Mapping[str, Any] | None:
        """The last description of the stage that makes previews."""
        return self.stages.get(denoise_model(self.name))

    @property
    def decode_facts(self) -> Mapping[str, Any] | None:
        """The last description of the stage that decodes."""
        return self.stages.get(vae_decode_model(self.name))


class Registry:
    """Written by the poller (``triton.py``), read by the routes.

    ``problem`` says why the service as a whole isn't ready, and is None when it is. ``contacted`` turns true
    for good once the models are known.
    """

    def __init__(self, default_model: str | None = None) -> None:
        self._default_model = default_model
        self.models: dict[str, Model] = {}
        self.contacted = False
        self.problem: str | None = "the model server has not been reached yet"
        self._losses: dict[str, asyncio.Event] = {}

    def loss(self, name: str) -> asyncio.Event:
        """Set when a process of this model dies after now: what was running in it may never be answered."""
        return self._losses.setdefault(name, asyncio.Event())

    def report_loss(self, stage: str) -> None:
        """A process of ``stage`` has died."""
        for model in self.models.values():
            if stage in model.stages and (loss := self._losses.pop(model.name, None)):
                loss.set()

    def described(self) -> list[Model]:
        """Every model whose limits are known, by name.

        Raises:
            ApiError: 503 before the first contact.
        """
        self._require_contact()
        return [model for _, model in sorted(self.models.items()) if model.limits]

    def find(self, name: str) -> Model:
        """The model with this Triton name or, where only one has it, this hub id.

        Raises:
            ApiError: 503 before the first contact, 404 for an unknown model, 400 for an ambiguous hub id.
        """
        self._require_contact()
        if name in self.models:
            return self.models[name]
        found = [model for model in self.models.values() if model.limits and model.limits.hub_id == name]
        if not found:
            raise ApiError(
                404,
                f"The model {show(name)} does not exist; allowed: {_names(self.models.values())}",
                param="model",
                code="model_not_found",
            )
        if len(found) > 1:
            raise ApiError(
                400,
                f"'model' is {show(name)}, the hub id of several models; allowed: {_names(found)}",
                param="model",
                code="ambiguous_model",
            )
        return found[0]

    def require_ready(self, name: str | None, *tasks: str) -> tuple[str, ModelLimits]:
        """(name, limits) of the model that a request asks for, ready to generate.

        ``tasks`` are those that would do, the best one first. None asks for the default: the operator's if it has one
        of them, else the only model that has the best one that there is.

        Raises:
            ApiError: 503 while it isn't ready, 404 or 400 for a name that doesn't say which, or a model that has none
                of the tasks.
        """
        self._require_contact()
        model = self._default(tasks) if name is None else self.find(name)
        if model.limits is not None and not _can(model, *tasks):
            able = [other for other in self.models.values() if other.limits and _can(other, *tasks)]
            raise ApiError(
                400,
                f"'model' is {show(model.name)}, which is for {', '.join(model.limits.tasks)}; "
                f"allowed: {_of_tasks(able, tasks)}",
                param="model",
                code="task_not_supported",
            )
        if not model.ready or model.limits is None:
            raise unavailable(f"the model {show(model.name)} is not ready", "model_not_ready")
        return model.name, model.limits

    def check_previews(self, name: str, partial_images: int) -> None:
        """Whether a model's previews can be had, as far as its stage has said.

        Raises:
            DiffusionError: INVALID_ARG, naming ``partial_images``.
        """
        facts = self.models[name].denoise_facts or {}
        check_previews(partial_images, facts.get("no_previews"))

    def _default(self, tasks: Sequence[str]) -> Model:
        models = list(self.models.values())
        if self._default_model is not None and _can(model := self.find(self._default_model), *tasks):
            return model
        if not models:
            raise unavailable("the model server has no models", "not_ready")
        best = [task for task in tasks if any(model.limits and _can(model, task) for model in models)]
        fitting = [model for model in models if _can(model, *(best or tasks)[:1])]
        if len(fitting) != 1:
            raise ApiError(
                400,
                f"'model' is not given; allowed: {_of_tasks(fitting, tasks)}",
                param="model",
                code="model_required",
            )
        return fitting[0]

    def _require_contact(self) -> None:
        if not self.contacted:
            raise unavailable(self.problem or "the models are not known yet", "not_ready")


def _names(models: Iterable[Model]) -> str:
    return ", ".join(sorted(model.name for model in models))


def _can(model: Model, *tasks: str) -> bool:
    """Whether a model has one of the tasks. One whose limits are not known yet may have any."""
    return model.limits is None or not set(tasks).isdisjoint(model.limits.tasks)


def _of_tasks(models: Collection[Model], tasks: Sequence[str]) -> str:
    return _names(models) or f"none, as no model here is for {' or '.join(tasks)}"
