"""What ``POST /v1/images/generations`` takes: every field is honoured, or refused by name.

The rules for prompt, size, quality, seed, steps and guidance belong to ``diffusion_backend.settings``, which the
stages go by too; a model is needed for most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from diffusion_backend import quality, settings
from diffusion_backend.errors import invalid
from diffusion_backend.settings import Settings
from pydantic import Field

from openai_adapter.request_fields import Fields, Text, check_names, unwrap, validate

_GIF_ONLY = "it belongs to output_format 'gif', which is not supported"
REFUSED = {
    "style": "no model here has styles; describe the style in 'prompt'",
    "complexity": "no model here has levels of complexity",
    "frame_count": _GIF_ONLY,
    "frame_duration_ms": _GIF_ONLY,
    "svg": "SVG output is not supported",
    "width": "use 'size', as 'WIDTHxHEIGHT'",
    "height": "use 'size', as 'WIDTHxHEIGHT'",
}


class ImageRequest(Fields):
    """The body of a request for images."""

    prompt: Any = Field(
        json_schema_extra={"type": "string", "maxLength": settings.MAX_PROMPT_CHARACTERS},
        description="a text that is not blank",
    )
    model: Text | None = Field(None, description="the id of a model, as a string")
    n: int = Field(1, ge=1, le=10, description="integers from 1 to 10")
    size: Any = Field(
        None,
        json_schema_extra={"type": "string"},
        description="'auto' or 'WIDTHxHEIGHT' within the model's limits",
    )
    quality: Any = Field(
        None, json_schema_extra={"enum": list(quality.QUALITIES)}, description=", ".join(quality.QUALITIES)
    )
    response_format: Literal["b64_json", "url"] = Field("b64_json", description="'b64_json', 'url'")
    output_format: Literal["png", "jpeg", "webp"] = Field("png", description="'png', 'jpeg', 'webp'")
    output_compression: int = Field(
        100, ge=0, le=100, description="integers from 0 to 100, the quality of a JPEG or WebP file"
    )
    background: Literal["auto", "opaque"] = Field(
        "auto", description="'auto', 'opaque'; no model here makes transparent pictures"
    )
    moderation: Literal["auto", "low"] = Field("auto", description="'auto', 'low'; nothing is moderated here")
    user: Text | None = Field(None, description="a string of valid Unicode")
    safety_identifier: Text | None = Field(None, description="a string of valid Unicode")
    stream: bool = Field(False, description="true, false")
    partial_images: int = Field(
        0,
        ge=0,
        le=settings.MAX_PARTIAL_IMAGES,
        description=f"integers from 0 to {settings.MAX_PARTIAL_IMAGES}, the previews of each image of a stream",
    )
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


FIELDS = frozenset((*ImageRequest.model_fields, *REFUSED))


@dataclass(frozen=True)
class Plan:
    """What a request comes to on one model: the settings of its first image, and how many there are.

    Image k has the seed ``settings.seed + k``.
    """

    settings: Settings
    n: int

    @property
    def images(self) -> list[Settings]:
        """The settings of each image."""
        first = self.settings.seed
        return [self.settings.model_copy(update={"seed": first + number}) for number in range(self.n)]


def parse(body: Mapping[str, Any]) -> ImageRequest:
    """Check everything in ``body`` that can be checked without a model.

    Raises:
        DiffusionError: INVALID_ARG, naming the field, its value and what is allowed.
    """
    given = unwrap(body)
    check_names(ImageRequest, given, REFUSED)
    settings.check_prompt(given.get("prompt"))
    quality.resolve_tier(given.get("quality"), quality.Tier.LOSSLESS)
    request = validate(ImageRequest, given)
    _check_stream(request)
    if request.output_format == "png" and request.output_compression != 100:
        raise invalid(
            "output_compression",
            f"'output_compression' is {request.output_compression} with output_format 'png', which is always "
            "exact; allowed: 100, or output_format 'jpeg' or 'webp'",
        )
    return request


def _check_stream(request: ImageRequest) -> None:
    if request.partial_images and not request.stream:
        raise invalid(
            "partial_images",
            f"'partial_images' is {request.partial_images} without 'stream'; allowed: 0, or 'stream' true",
        )
    if request.stream and request.response_format != "b64_json":
        # As OpenAI's own: its events have no url.
        raise invalid(
            "response_format",
            f"'response_format' is '{request.response_format}' with 'stream' true; allowed: 'b64_json'",
        )


def plan(request: ImageRequest, limits: settings.ModelLimits) -> Plan:
    """Resolve ``request`` on a model; where no seed is given, one is drawn here.

    Raises:
        DiffusionError: INVALID_ARG, naming the field, its value and what is allowed.
    """
    if "text-to-image" not in limits.tasks:
        raise invalid("model", f"'model' is one for {limits.task}; allowed here: one for text-to-image")
    width, height = settings.parse_size(request.size, limits)
    resolved = settings.resolve(
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
            "partial_images": request.partial_images,
        },
    )
    largest = settings.MAX_SEED - request.n + 1
    if resolved.seed > largest:
        raise invalid(
            "seed",
            f"'seed' is {resolved.seed} with n {request.n}, whose images take the seeds that follow; "
            f"allowed: integers from 0 to {largest}",
        )
    return Plan(resolved, request.n)
