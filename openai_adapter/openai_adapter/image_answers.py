"""What a client is told of its pictures: OpenAI's response object, and the events of a stream."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from openai_adapter.event_stream import encode_event
from openai_adapter.image_generation import Picture
from openai_adapter.image_request import ImageRequest, Plan

_SHOWN = ("seed", "decode_path", "timings")
# Clients with strict types need it; tokens are not counted here.
_NO_USAGE = {
    "total_tokens": 0,
    "input_tokens": 0,
    "output_tokens": 0,
    "input_tokens_details": {"text_tokens": 0, "image_tokens": 0},
}


def content_of(picture: Picture) -> dict[str, str]:
    """The file itself."""
    return {"b64_json": base64.b64encode(picture.file).decode()}


def build_answer(
    model: str,
    plan: Plan,
    request: ImageRequest,
    created_at: int,
    pictures: list[Picture],
    contents: list[dict[str, str]],
) -> dict[str, Any]:
    """OpenAI's response object; ``model``, ``seed`` and the keys beside each file are ours.

    ``created_at``: in whole seconds since 1970.
    """
    data = [{**content, **_facts(picture)} for content, picture in zip(contents, pictures, strict=True)]
    return {
        "created": created_at,
        "data": data,
        **_echo(model, plan, request),
        "seed": plan.settings.seed,
    }


async def stream_events(
    model: str, plan: Plan, request: ImageRequest, pictures: AsyncGenerator[Picture, None]
) -> AsyncGenerator[bytes, None]:
    """OpenAI's events; ``index``, ``model``, ``step`` and what is said of each picture are ours.

    Where several images are made their events come mixed: ``index`` says whose an event is.
    """
    async with aclosing(pictures):
        async for picture in pictures:
            kind, own = _own_fields(request, picture)
            event = {
                "type": kind,
                "created_at": int(time.time()),
                "index": picture.index,
                **own,
                **_echo(model, plan, request),
                **_facts(picture),
                **content_of(picture),
            }
            yield encode_event(kind, event)


def _own_fields(request: ImageRequest, picture: Picture) -> tuple[str, dict[str, Any]]:
    """What tells the two kinds of event apart."""
    if picture.preview is None:
        return f"{request.EVENTS}.completed", {"usage": _NO_USAGE}
    own = {"partial_image_index": picture.preview, "step": picture.info["step"]}
    return f"{request.EVENTS}.partial_image", own


def _echo(model: str, plan: Plan, request: ImageRequest) -> dict[str, Any]:
    """What is the same for all pictures of a request."""
    echo = {
        "size": f"{plan.settings.width}x{plan.settings.height}",
        "quality": plan.settings.quality,
        "output_format": request.output_format,
        "background": "opaque",
        "model": model,
    }
    if request.safety_identifier is not None:
        echo["safety_identifier"] = request.safety_identifier
    return echo


def _facts(picture: Picture) -> dict[str, Any]:
    return {key: picture.info.get(key) for key in _SHOWN}
