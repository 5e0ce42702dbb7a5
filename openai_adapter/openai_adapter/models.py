"""``/v1/models``: what is served, and within which limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusion_backend.errors import show
from diffusion_backend.quality import QUALITIES
from diffusion_backend.settings import MAX_PARTIAL_IMAGES
from fastapi import APIRouter
from starlette.responses import JSONResponse

from openai_adapter.errors import unavailable
from openai_adapter.registry import Model, Registry

# What a stage says of itself that is no secret of the machine's.
_STAGE_FACTS = ("device", "bytes_loaded", "components")
_BATCHING_FACTS = ("enabled", "joined", "difference", "tolerance")


def build_model_card(model: Model) -> dict[str, Any]:
    """The card of a model: OpenAI's fields, then what this model is and accepts. Sizes are in pixels.

    ``stages`` is what runs: null for a stage until its process has answered for the first time. So are ``previews``,
    ``batching`` and ``fast_path``.

    Raises:
        ApiError: 503, Triton has not told the model's limits yet.
    """
    limits = model.limits
    if limits is None:
        raise unavailable(f"the model {show(model.name)} is not ready", "model_not_ready")
    return {
        "id": model.name,
        "object": "model",
        "created": limits.created,
        "owned_by": "triton-diffusion",
        "root": limits.hub_id or model.name,
        "source_revision": limits.source_revision,
        "pipeline_name": limits.pipeline_class,
        "pipeline_class": limits.pipeline_class,
        "task_type": limits.task,
        "tasks": list(limits.tasks),
        "max_input_images": limits.max_images,
        "dtype": limits.dtype,
        "default_size": f"{limits.default_width}x{limits.default_height}",
        "max_size": f"{limits.max_width}x{limits.max_height}",
        "size_multiple": limits.size_multiple,
        "default_num_frames": limits.default_num_frames,
        "max_num_frames": limits.max_num_frames,
        "num_frames_step": limits.num_frames_step,
        "default_fps": limits.default_fps,
        "default_num_inference_steps": limits.default_num_inference_steps,
        "max_num_inference_steps": limits.max_num_inference_steps,
        "default_guidance_scale": limits.default_guidance_scale,
        "takes_negative_prompt": limits.takes_negative_prompt,
        "default_quality": limits.default_quality,
        "qualities": list(QUALITIES),
        "loras": list(limits.loras),
        "fast_path": None if model.decode_facts is None else model.decode_facts.get("fast_path"),
        "previews": _build_previews(model.denoise_facts),
        "batching": _build_batching(model.denoise_facts),
        "stages": {
            stage: None if facts is None else {key: facts.get(key) for key in _STAGE_FACTS}
            for stage, facts in model.stages.items()
        },
    }


def _build_previews(denoise_facts: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if denoise_facts is None:
        return None
    reason = denoise_facts.get("no_previews")
    return {"max_partial_images": 0 if reason else MAX_PARTIAL_IMAGES, "reason": reason}


def _build_batching(denoise_facts: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Whether requests share the denoiser, and what the stage found when it tried that at its start."""
    if denoise_facts is None or "batching" not in denoise_facts:
        return None
    return {key: denoise_facts["batching"].get(key) for key in _BATCHING_FACTS}


def routes(registry: Registry) -> APIRouter:
    """The two routes of models: 503 before the first contact with Triton, afterwards from memory."""
    router = APIRouter(prefix="/v1/models", tags=["models"])

    @router.get("")
    async def list_models() -> JSONResponse:
        """Every model that is served."""
        cards = [build_model_card(model) for model in registry.described()]
        return JSONResponse({"object": "list", "data": cards})

    @router.get("/{model:path}")
    async def retrieve_model(model: str) -> JSONResponse:
        """One model, by its id or its hub id."""
        return JSONResponse(build_model_card(registry.find(model)))

    return router
