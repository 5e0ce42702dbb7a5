"""``/v1/models``: what is served, and within which limits."""

from __future__ import annotations

from typing import Any

from diffusion_backend.errors import show
from diffusion_backend.quality import QUALITIES
from diffusion_backend.settings import ModelLimits
from fastapi import APIRouter
from starlette.responses import JSONResponse

from openai_adapter.errors import unavailable
from openai_adapter.registry import Registry


def build_model_card(name: str, limits: ModelLimits) -> dict[str, Any]:
    """The card of a model: OpenAI's fields, then what this model is and accepts. Sizes are in pixels."""
    return {
        "id": name,
        "object": "model",
        "created": limits.created,
        "owned_by": "triton-diffusion",
        "root": limits.hub_id or name,
        "pipeline_name": limits.pipeline_class,
        "pipeline_class": limits.pipeline_class,
        "task_type": limits.task,
        "dtype": limits.dtype,
        "default_size": f"{limits.default_width}x{limits.default_height}",
        "max_size": f"{limits.max_width}x{limits.max_height}",
        "size_multiple": limits.size_multiple,
        "default_num_inference_steps": limits.default_num_inference_steps,
        "max_num_inference_steps": limits.max_num_inference_steps,
        "default_guidance_scale": limits.default_guidance_scale,
        "takes_negative_prompt": limits.takes_negative_prompt,
        "default_quality": limits.default_quality,
        "qualities": list(QUALITIES),
        "fast_path": {
            "state": "not_installed",
            "reason": "there is no fast VAE decoder yet: every quality is decoded losslessly",
        },
    }


def routes(registry: Registry) -> APIRouter:
    """The two routes of models: 503 before the first contact with Triton, afterwards from memory."""
    router = APIRouter(prefix="/v1/models", tags=["models"])

    @router.get("")
    async def list_models() -> JSONResponse:
        """Every model that is served."""
        cards = [build_model_card(name, limits) for name, limits in registry.described()]
        return JSONResponse({"object": "list", "data": cards})

    @router.get("/{model:path}")
    async def retrieve_model(model: str) -> JSONResponse:
        """One model, by its id or its hub id."""
        found = registry.find(model)
        if found.limits is None:
            raise unavailable(f"the model {show(found.name)} is not ready", "model_not_ready")
        return JSONResponse(build_model_card(found.name, found.limits))

    return router
