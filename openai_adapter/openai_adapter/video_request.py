"""What ``POST /v1/videos`` takes: every field is honoured, or refused by name.

The fields that pictures have too are those of ``generation_fields``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diffusion_backend import settings
from diffusion_backend.errors import invalid, show
from diffusion_backend.settings import ModelLimits, Settings
from diffusion_backend.tasks import IMAGE_TO_VIDEO, TEXT_TO_VIDEO
from pydantic import Field

from openai_adapter import generation_fields
from openai_adapter.generation_fields import REFUSED_SIDES, GenerationFields
from openai_adapter.image_references import ONE_IMAGE
from openai_adapter.request_fields import PICTURE, Fields, check_names

TASKS = (TEXT_TO_VIDEO, IMAGE_TO_VIDEO)
REFUSED = {
    "n": "a job makes one video",
    "stream": "a video is a job: ask for its status",
    "response_format": "a video is fetched from its content route",
    **REFUSED_SIDES,
}
_NUMBER = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?")


class RemixRequest(Fields):
    """The body of a request for a video made anew."""

    prompt: Any = Field(description="a text that is not blank")


class VideoRequest(GenerationFields):
    """The body of a request for a video."""

    input_reference: Any = Field(
        None,
        json_schema_extra=PICTURE,
        description=f"{ONE_IMAGE}, for a model that takes an image",
    )
    seconds: Any = Field(
        None,
        json_schema_extra={"type": ["string", "number"]},
        description="numbers above 0, the length of the video; the nearest length that the model has is made",
    )
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
    request = generation_fields.parse(VideoRequest, given, REFUSED)
    if request.seconds is not None:
        _parse_seconds(request.seconds)
    return request


def tasks_for(request: VideoRequest) -> tuple[str, ...]:
    """Those that would do, the best one first: what a model lacks for the other, ``plan`` says by name."""
    return TASKS if request.input_reference is None else TASKS[::-1]


def plan(request: VideoRequest, limits: ModelLimits) -> Plan:
    """Resolve ``request`` on a model; where no seed is given, one is drawn here.

    Raises:
        DiffusionError: INVALID_ARG, naming the field, its value and what is allowed.
    """
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
    size = settings.parse_size(request.size, limits)
    fps = settings.check_fps(limits, limits.default_fps if request.fps is None else request.fps)
    assert fps is not None
    num_frames = _count_frames(request, fps, limits)
    images = 0 if request.input_reference is None else 1
    resolved = generation_fields.resolve(request, limits, size, images=images, num_frames=num_frames, fps=fps)
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
