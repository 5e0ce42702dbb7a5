"""The fields that requests for pictures and for videos have in common, and what they come to on a model.

The rules for prompt, size, quality, seed, steps and guidance belong to ``diffusion_backend.settings``, which the
stages go by too; a model is needed for most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from diffusion_backend import quality, settings
from diffusion_backend.settings import ModelLimits, Settings
from pydantic import Field

from openai_adapter.request_fields import Fields, Text, check_names, refuse_files, validate

REFUSED_SIDES = {
    "width": "use 'size', as 'WIDTHxHEIGHT'",
    "height": "use 'size', as 'WIDTHxHEIGHT'",
}


class GenerationFields(Fields):
    """What pictures and videos are asked for with."""

    prompt: Any = Field(
        json_schema_extra={"type": "string", "maxLength": settings.MAX_PROMPT_CHARACTERS},
        description="a text that is not blank",
    )
    model: Text | None = Field(None, description="the id of a model, as a string")
    size: Any = Field(
        None,
        json_schema_extra={"type": "string"},
        description="'auto' or 'WIDTHxHEIGHT' within the model's limits",
    )
    quality: Any = Field(
        None, json_schema_extra={"enum": list(quality.QUALITIES)}, description=", ".join(quality.QUALITIES)
    )
    user: Text | None = Field(None, description="a string of valid Unicode")
    safety_identifier: Text | None = Field(None, description="a string of valid Unicode")
    seed: Any = Field(
        None, json_schema_extra={"type": "integer"}, description=f"integers from 0 to {settings.MAX_SEED}"
    )
    negative_prompt: Any = Field(None, json_schema_extra={"type": "string"}, description="a string")
    num_inference_steps: Any = Field(
        None, json_schema_extra={"type": "integer"}, description="integers within the model's limits"
    )
    guidance_scale: Any = Field(
        None, json_schema_extra={"type": "number"}, description="numbers within the model's limits"
    )
    lora: Any = Field(
        None,
        json_schema_extra={"type": ["string", "object"]},
        description="'NAME' or 'NAME:WEIGHT', several joined with commas, or an object of names and weights",
    )


T = TypeVar("T", bound=GenerationFields)


def parse(kind: type[T], given: Mapping[str, Any], refused: Mapping[str, str]) -> T:
    """Check everything in the fields of a JSON object or a form (``unwrap``) that can be checked without a model.

    ``refused`` says why fields that clients know are none here.

    Raises:
        DiffusionError: INVALID_ARG, naming the field, its value and what is allowed.
    """
    check_names(kind, given, refused)
    refuse_files(kind, given)
    if kind.model_fields["prompt"].is_required():
        settings.check_prompt(given.get("prompt"))
    quality.resolve_tier(given.get("quality"), quality.Tier.LOSSLESS)
    return validate(kind, given)


def resolve(
    request: GenerationFields,
    limits: ModelLimits,
    size: tuple[int, int],
    *,
    images: int = 0,
    has_mask: bool = False,
    **own: object,
) -> Settings:
    """The settings of ``request`` on a model; where no seed is given, one is drawn here.

    ``size`` is (width, height) in pixels; ``images`` come with it. ``own`` are the parameters that only this kind of
    request has.

    Raises:
        DiffusionError: INVALID_ARG, naming the field, its value and what is allowed.
    """
    width, height = size
    return settings.resolve(
        limits,
        request.prompt,
        request.negative_prompt,
        {
            "width": width,
            "height": height,
            "num_inference_steps": request.num_inference_steps,
            "guidance_scale": request.guidance_scale,
            "lora": request.lora,
            "seed": request.seed,
            "quality": request.quality,
            **own,
        },
        images=images,
        has_mask=has_mask,
    )
