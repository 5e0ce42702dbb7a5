"""``/v1/images``: pictures of prompts, edits of pictures, and variations of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from openai_adapter import image_answers, image_files, image_request
from openai_adapter.async_jobs import AsyncJobs
from openai_adapter.bodies import is_form, read_fields, read_json_object
from openai_adapter.disconnects import while_connected
from openai_adapter.errors import DO_NOT_RETRY, ApiError
from openai_adapter.event_stream import EventStream
from openai_adapter.idempotency import is_keyed, read_idempotency
from openai_adapter.image_generation import ImageGenerator, Picture, collect
from openai_adapter.image_inputs import ImageInputs
from openai_adapter.image_request import EditRequest, ImageRequest, VariationRequest
from openai_adapter.job_files import JobFiles
from openai_adapter.keyed_images import KeyedImages, Making
from openai_adapter.media import MediaStore
from openai_adapter.metrics import Metrics
from openai_adapter.middleware import caller_of
from openai_adapter.recovery import Recovery
from openai_adapter.registry import Registry
from openai_adapter.request_fields import from_form, unwrap
from openai_adapter.settings import Settings
from openai_adapter.triton import Triton
from openai_adapter.urls import base_url

logger = logging.getLogger(__name__)


class Images:
    """What the routes do."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        triton: Triton,
        store: MediaStore,
        jobs: AsyncJobs,
        files: JobFiles,
        inputs: ImageInputs,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._store = store
        self._inputs = inputs
        self._metrics = metrics
        recovery = Recovery(triton, registry, metrics)
        self._generator = ImageGenerator(triton, recovery, metrics, settings)
        self._keyed = KeyedImages(self._generator, jobs, files, metrics, settings)

    async def generate(self, http_request: Request) -> Response:
        """Pictures of a prompt: the body is a JSON object."""
        given = unwrap(await read_json_object(http_request))
        return await self._answer(http_request, given, image_request.parse(ImageRequest, given))

    async def edit(self, http_request: Request, kind: type[EditRequest]) -> Response:
        """Pictures of pictures: the body is a form or a JSON object, with the fields of ``kind``."""
        fields = await read_fields(
            http_request, self._settings.max_field_bytes, max_files=EditRequest.MAX_IMAGES + 1
        )
        given = unwrap(fields)
        if is_form(http_request):
            given = from_form(kind, given)
        return await self._answer(http_request, given, image_request.parse(kind, given))

    async def _answer(
        self, http_request: Request, given: Mapping[str, Any], request: ImageRequest
    ) -> Response:
        made = await self._begin(http_request, given, request)
        if request.stream:
            return EventStream(image_answers.stream_events(made.model, made.plan, request, made.pictures))
        images = await while_connected(http_request, collect(made.pictures))
        if request.response_format == "url":
            base = base_url(http_request, self._settings.public_url, self._settings.trusted_proxies)
            contents = [{"url": f"{base}/v1/media/{name}"} for name in await self._publish(images, request)]
        else:
            contents = [image_answers.content_of(image) for image in images]
        answer = image_answers.build_answer(made.model, made.plan, request, made.created_at, images, contents)
        return JSONResponse(answer)

    async def _begin(self, http_request: Request, given: Mapping[str, Any], request: ImageRequest) -> Making:
        """The pictures: as they are made, or as they were made before with the same key."""
        sent = await self._inputs.digest(given) if is_keyed(http_request) else None
        caller, key = caller_of(http_request), read_idempotency(http_request, sent)
        inputs = self._inputs.of(request)
        if key and (known := await self._keyed.find(caller, key, request, inputs)):
            return known
        model, limits = self._registry.require_ready(request.model, *image_request.tasks_for(request))
        self._registry.check_previews(model, request.partial_images)
        plan = await inputs.plan(limits)
        if key:
            return await self._keyed.begin(caller, key, model, plan, request, inputs)
        files = await inputs.files(plan)
        return Making(model, plan, int(time.time()), self._generator.stream(model, plan, request, files))

    async def _publish(self, images: list[Picture], request: ImageRequest) -> list[str]:
        extension = image_files.FORMATS[request.output_format][0]
        puts = [asyncio.to_thread(self._store.put, image.file, extension) for image in images]
        try:
            names = await asyncio.gather(*puts)
        except OSError:
            logger.exception("pictures could not be stored")
            message = "the store of pictures cannot be used now; allowed: 'response_format' 'b64_json'"
            raise ApiError(
                503, message, param="response_format", code="service_unavailable", headers=DO_NOT_RETRY
            ) from None
        self._metrics.media_bytes.inc(sum(len(image.file) for image in images))
        return names


def routes(images: Images) -> APIRouter:
    """The routes of pictures."""
    router = APIRouter(prefix="/v1/images", tags=["images"])

    @router.post("/generations", openapi_extra=_schema(ImageRequest, "application/json"))
    async def generate(request: Request) -> Response:
        """Make n images of a prompt."""
        return await images.generate(request)

    @router.post("/edits", openapi_extra=_schema(EditRequest, "application/json", "multipart/form-data"))
    async def edit(request: Request) -> Response:
        """Change images by a prompt: as a whole, or where a mask is transparent."""
        return await images.edit(request, EditRequest)

    @router.post("/variations", openapi_extra=_schema(VariationRequest, "multipart/form-data"))
    async def vary(request: Request) -> Response:
        """Make n images like an image."""
        return await images.edit(request, VariationRequest)

    return router


def _schema(kind: type[ImageRequest], *media_types: str) -> dict[str, Any]:
    schema = kind.model_json_schema()
    content = {media_type: {"schema": schema} for media_type in media_types}
    return {"requestBody": {"required": True, "content": content}}
