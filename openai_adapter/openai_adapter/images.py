"""``POST /v1/images/generations``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from openai_adapter import image_answers, image_files, image_request
from openai_adapter.async_jobs import AsyncJobs
from openai_adapter.bodies import read_json_object
from openai_adapter.disconnects import while_connected
from openai_adapter.event_stream import EventStream
from openai_adapter.idempotency import read_idempotency
from openai_adapter.image_generation import ImageGenerator, Picture, collect
from openai_adapter.image_request import ImageRequest
from openai_adapter.job_files import JobFiles
from openai_adapter.keyed_images import KeyedImages, Making
from openai_adapter.media import MediaStore
from openai_adapter.metrics import Metrics
from openai_adapter.middleware import caller_of
from openai_adapter.recovery import Recovery
from openai_adapter.registry import Registry
from openai_adapter.request_fields import unwrap
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
    settings: Settings,
    registry: Registry,
    triton: Triton,
    store: MediaStore,
    jobs: AsyncJobs,
    files: JobFiles,
    metrics: Metrics,
) -> APIRouter:
    """The route of image generation."""
    router = APIRouter(prefix="/v1/images", tags=["images"])
    recovery = Recovery(triton, registry, metrics)
    generator = ImageGenerator(triton, recovery, metrics, settings)
    keyed_images = KeyedImages(generator, jobs, files, metrics, settings)

    @router.post("/generations", openapi_extra=_SCHEMA)
    async def generate(http_request: Request) -> Response:
        """Make n images of a prompt."""
        body = await read_json_object(http_request)
        request = image_request.parse(body)
        made = await begin(http_request, body, request)
        if request.stream:
            return EventStream(image_answers.stream_events(made.model, made.plan, request, made.pictures))
        images = await while_connected(http_request, collect(made.pictures))
        if request.response_format == "url":
            base = base_url(http_request, settings.public_url, settings.trusted_proxies)
            contents = [{"url": f"{base}/v1/media/{name}"} for name in await publish(images, request)]
        else:
            contents = [image_answers.content_of(image) for image in images]
        answer = image_answers.build_answer(made.model, made.plan, request, made.created_at, images, contents)
        return JSONResponse(answer)

    async def begin(http_request: Request, body: Mapping[str, Any], request: ImageRequest) -> Making:
        """The pictures: as they are made, or as they were made before with the same key."""
        caller, key = caller_of(http_request), read_idempotency(http_request, unwrap(body))
        if key and (known := await keyed_images.find(caller, key, request)):
            return known
        model, limits = registry.require_ready(request.model, makes_video=False)
        plan = image_request.plan(request, limits)
        registry.check_previews(model, request.partial_images)
        if key:
            return await keyed_images.begin(caller, key, model, plan, request)
        return Making(model, plan, int(time.time()), generator.stream(model, plan, request))

    async def publish(images: list[Picture], request: ImageRequest) -> list[str]:
        extension = image_files.FORMATS[request.output_format][0]
        puts = [asyncio.to_thread(store.put, image.file, extension) for image in images]
        names = await asyncio.gather(*puts)
        metrics.media_bytes.inc(sum(len(image.file) for image in images))
        return names

    return router
