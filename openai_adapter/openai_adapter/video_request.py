"""What ``POST /v1/videos`` takes: every field is honoured, or refused by name.

The rules that the stages go by too belong to ``diffusion_backend.settings``; a model is needed for most.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diffusion_backend import quality, settings
from diffusion_backend.errors import invalid, show
from diffusion_backend.settings import ModelLimits, Settings
from pydantic import Field
from starlette.datastructures import UploadFile

from openai_adapter.bodies import parse_json_object
from openai_adapter.request_fields import Fields, Text, check_names, validate

REFUSED = {
    "n": "a job makes one video",
    "stream": "a video is a job: ask for its status",
    "width": "use 'size', as 'WIDTHxHEIGHT'",
    "height": "use 'size', as 'WIDTHxHEIGHT'",
    "response_format": "a video is fetched from its content route",
}
# What a form has as a text.
_INTEGERS = ("fps", "num_frames", "seed", "num_inference_steps")
_NUMBERS = ("guidance_scale",)
_INTEGER = re.compile(r"-?[0-9]{1,20}")
_NUMBER = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?")


class RemixRequest(Fields):
    """The body of a request for a video made anew."""

    prompt: Any = Field(description="a text that is not blank")


class VideoRequest(Fields):
    """The body of a request for a video."""

    prompt: Any = Field(
        json_schema_extra={"type": "string", "maxLength": settings.MAX_PROMPT_CHARACTERS},
        description="a text that is not blank",
    )
    model: Text | None = Field(None, description="the id of a model, as a string")
    input_reference: Any = Field(
        None, description="a file, a data URL, or an object with 'image_url', for a model that takes an image"
    )
    seconds: Any = Field(
        None,
        json_schema_extra={"type": ["string", "number"]},
        description="numbers above 0, the length of the video; the nearest length that the model has is made",
    )
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
    fps: Any = Field(
        None,
        json_schema_extra={"type": "integer"},
        description=f"integers from 1 to {settings.MAX_FPS}, frames a second",
    )
    num_frames: Any = Field(
        None,
        json_schema_extra={"type": "integer"},
        description="integers within the model's limits, the length in frames",
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


@dataclass(frozen=True)
class Plan:
    """What a request comes to on one model. ``seconds`` is the length as it was asked for, or as it is."""

    settings: Settings
    seconds: str


def parse(given: Mapping[str, Any]) -> VideoRequest:
    """Check everything in the fields of a JSON object or a form (``unwrap``) that can be checked without a model.

    Raises:
        DiffusionError: INVALID_ARG, naming the field, its value and what is allowed.
    """
    check_names(VideoRequest, given, REFUSED)
    _refuse_files(given)
    settings.check_prompt(given.get("prompt"))
    quality.resolve_tier(given.get("quality"), quality.Tier.LOSSLESS)
    request = validate(VideoRequest, given)
    if request.seconds is not None:
        _parse_seconds(request.seconds)
    return request


def _refuse_files(given: Mapping[str, Any]) -> None:
    """A form can send a file as any field."""
    for name, value in given.items():
        values = value.values() if isinstance(value, dict) else (value,)
        if name != "input_reference" and any(isinstance(each, UploadFile) for each in values):
            allowed = VideoRequest.model_fields[name].description
            raise invalid(name, f"'{name}' is a file; allowed: {allowed}")


def from_form(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a form with the types that JSON gives them; what has another form is refused where it is used.

    Raises:
        ApiError: 400, ``input_reference`` begins as a JSON object and is none.
    """
    typed = dict(fields)
    for names, pattern, kind in ((_INTEGERS, _INTEGER, int), (_NUMBERS, _NUMBER, float)):
        for name in names:
            if isinstance(typed.get(name), str) and pattern.fullmatch(typed[name]):
                typed[name] = kind(typed[name])
    if isinstance(typed.get("lora"), dict):
        typed["lora"] = {
            name: float(weight) if isinstance(weight, str) and _NUMBER.fullmatch(weight) else weight
            for name, weight in typed["lora"].items()
        }
    reference = typed.get("input_reference")
    if isinstance(reference, str) and reference.startswith("{"):
        typed["input_reference"] = parse_json_object(reference, "input_reference")
    return typed


def plan(request: VideoRequest, limits: ModelLimits) -> Plan:
    """Resolve ``request`` on a model; where no seed is given, one is drawn here.

    Raises:
        DiffusionError: INVALID_ARG, naming the field, its value and what is allowed.
    """
    if not limits.makes_video:
        raise invalid("model", f"'model' is one for {limits.task}; allowed here: one that makes video")
    if limits.takes_image and request.input_reference is None:
        raise invalid(
            "input_reference",
            "'input_reference' is missing; this model makes a video of an image: send a file, a data URL, or an "
            "object with 'image_url'",
            "missing",
        )
    if request.input_reference is not None and not limits.takes_image:
        raise invalid(
            "input_reference",
            f"'input_reference' is given; this model is one for {limits.task}: send none",
            "unsupported_parameter",
        )
    width, height = settings.parse_size(request.size, limits)
    fps = settings.check_fps(limits, limits.default_fps if request.fps is None else request.fps)
    assert fps is not None
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
            "num_frames": _count_frames(request, fps, limits),
            "fps": fps,
        },
        images=0 if request.input_reference is None else 1,
    )
    assert resolved.num_frames is not None
    seconds = resolved.num_frames / fps if request.seconds is None else _parse_seconds(request.seconds)
    return Plan(resolved, f"{seconds:g}")


def _count_frames(request: VideoRequest, fps: int, limits: ModelLimits) -> Any:
    """As many as ``num_frames`` says, or as come nearest to ``seconds``; None where neither is given."""
    if request.seconds is None:
        return request.num_frames
    low, high, step = limits.min_num_frames, limits.max_num_frames, limits.num_frames_step
    assert low
    assert high
    assert step
    count = low + step * math.floor((_parse_seconds(request.seconds) * fps - low) / step + 0.5)
    if not low <= count <= high:
        raise invalid(
            "seconds",
            f"'seconds' is {show(request.seconds)} at {fps} frames a second; allowed: "
            f"numbers from {low / fps:g} to {high / fps:g}",
        )
    # By its type, too: True is 1, and 5.0 is 5.
    if request.num_frames is not None and (type(request.num_frames), request.num_frames) != (int, count):
        raise invalid(
            "num_frames",
            f"'num_frames' is {show(request.num_frames)}, and {count} by 'seconds' and 'fps'; allowed: one of the two",
            "conflicting_values",
        )
    return count


def _parse_seconds(value: object) -> float:
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    # Neither NaN nor infinity is in the range.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise invalid(
            "seconds",
            f"'seconds' is {show(value)}; allowed: {VideoRequest.model_fields['seconds'].description}",
        )
    return float(value)


def parse_remix(given: Mapping[str, Any]) -> str:
    """The prompt, which is all that can be changed.

    Raises:
        DiffusionError: INVALID_ARG, naming the field, its value and what is allowed.
    """
    check_names(RemixRequest, given, REFUSED)
    return settings.check_prompt(given.get("prompt"))


def plan_remix(prompt: str, source: Mapping[str, Any], limits: ModelLimits) -> Settings:
    """The settings of a video, with another prompt.

    Raises:
        DiffusionError: INVALID_ARG, the model's limits have changed meanwhile.
    """
    return settings.check(limits, {**source, "prompt": prompt})
