"""``POST /v1/images/generations``."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from openai_adapter import image_answers, image_files, image_request
from openai_adapter.bodies import read_json_object
from openai_adapter.disconnects import while_connected
from openai_adapter.event_stream import EventStream
from openai_adapter.image_generation import ImageGenerator, Picture
from openai_adapter.image_request import ImageRequest
from openai_adapter.media import MediaStore
from openai_adapter.metrics import Metrics
from openai_adapter.recovery import Recovery
from openai_adapter.registry import Registry
from openai_adapter.settings import Settings
from openai_adapter.triton import Triton
from openai_adapter.urls import base_url

_SCHEMA = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": ImageRequest.model_json_schema()}},
    }
}


def routes(
    settings: Settings, registry: Registry, triton: Triton, store: MediaStore, metrics: Metrics
) -> APIRouter:
    """The route of image generation."""
    router = APIRouter(prefix="/v1/images", tags=["images"])
    recovery = Recovery(triton, registry, metrics)
    generator = ImageGenerator(triton, recovery, metrics, settings)

    @router.post("/generations", openapi_extra=_SCHEMA)
    async def generate(http_request: Request) -> Response:
        """Make n images of a prompt."""
        request = image_request.parse(await read_json_object(http_request))
        model, limits = registry.require_ready(request.model)
        plan = image_request.plan(request, limits)
        registry.check_previews(model, request.partial_images)
        if request.stream:
            pictures = generator.stream(model, plan, request)
            return EventStream(image_answers.stream_events(model, plan, request, pictures))
        images = await while_connected(http_request, generator.generate(model, plan, request))
        if request.response_format == "url":
            base = base_url(http_request, settings.public_url, settings.trusted_proxies)
            contents = [{"url": f"{base}/v1/media/{name}"} for name in await publish(images, request)]
        else:
            contents = [image_answers.content_of(image) for image in images]
        return JSONResponse(image_answers.build_answer(model, plan, request, images, contents))

    async def publish(images: list[Picture], request: ImageRequest) -> list[str]:
        extension = image_files.FORMATS[request.output_format][0]
        puts = [asyncio.to_thread(store.put, image.file, extension) for image in images]
        names = await asyncio.gather(*puts)
        metrics.media_bytes.inc(sum(len(image.file) for image in images))
        return names

    return router
