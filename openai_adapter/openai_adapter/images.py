"""``POST /v1/images/generations``."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
import uuid
from dataclasses import dataclass
from typing import Any

from diffusion_backend.client import Generation
from diffusion_backend.errors import DiffusionError, Status
from diffusion_backend.settings import Settings as ImageSettings
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse

from openai_adapter import image_files, image_request
from openai_adapter.bodies import read_json_object
from openai_adapter.disconnects import while_connected
from openai_adapter.errors import DO_NOT_RETRY, ApiError, unavailable
from openai_adapter.image_request import ImageRequest, Plan
from openai_adapter.media import MediaStore
from openai_adapter.metrics import Metrics
from openai_adapter.recovery import Recovery
from openai_adapter.registry import Registry
from openai_adapter.settings import Settings
from openai_adapter.triton import Triton
from openai_adapter.urls import base_url

logger = logging.getLogger(__name__)

_STREAM_GRACE_SECONDS = 5.0
_SHOWN = ("decode_path", "timings")
_BODY_SCHEMA = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": ImageRequest.model_json_schema()}},
    }
}


@dataclass(frozen=True)
class Picture:
    """A finished image: its file, and what the server said of making it."""

    file: bytes
    info: dict[str, Any]


class ImageGenerator:
    """From a checked request to files."""

    def __init__(self, triton: Triton, recovery: Recovery, metrics: Metrics, timeout: float) -> None:
        self._triton = triton
        self._recovery = recovery
        self._metrics = metrics
        self._timeout = timeout

    async def generate(self, model: str, plan: Plan, request: ImageRequest) -> list[Picture]:
        """All images of a request, at the same time, in the order of their seeds.

        When one fails the others are cancelled; so are all when the caller is.

        Raises:
            DiffusionError: what Triton said of the first one that failed.
            ApiError: 503, its work was lost; 504 after ``timeout`` seconds.
        """
        work = [
            asyncio.create_task(self._generate_one(model, plan.settings, seed, request))
            for seed in plan.seeds
        ]
        try:
            async with asyncio.timeout(self._timeout):
                done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_EXCEPTION)
        except TimeoutError:
            self._metrics.upstream_errors.labels("TIMEOUT").inc()
            raise ApiError(
                504,
                f"the images were not done within {self._timeout:g} seconds",
                code="timeout",
                headers=DO_NOT_RETRY,
            ) from None
        finally:
            for task in work:
                task.cancel()
        failures = [failure for task in work if task in done and (failure := task.exception())]
        if failures:
            raise _once(failures[0]) if plan.n > 1 else failures[0]
        pictures = [task.result() for task in work]
        for picture in pictures:
            path = str(picture.info.get("decode_path"))
            self._metrics.images.labels(model, plan.settings.quality, path).inc()
        return pictures

    async def _generate_one(
        self, model: str, settings: ImageSettings, seed: int, request: ImageRequest
    ) -> Picture:
        parameters = settings.model_dump(exclude={"prompt", "negative_prompt"}, exclude_none=True)
        parameters["seed"] = seed

        async def attempt() -> Generation:
            request_id = str(uuid.uuid4())
            logger.debug("generation %s on %s", request_id, model)
            return await self._triton.client.generate(
                model,
                settings.prompt,
                negative_prompt=settings.negative_prompt,
                request_id=request_id,
                # Only so that no stream outlives its request: the request's own limit comes first, as a 504.
                timeout=self._timeout + _STREAM_GRACE_SECONDS,
                **parameters,
            )

        try:
            generation = await self._recovery.run(model, attempt)
            _check(generation, settings)
        except DiffusionError as error:
            self._metrics.upstream_errors.labels(error.status).inc()
            raise _blame(error) from error
        file = await asyncio.to_thread(
            image_files.encode, generation.images, request.output_format, request.output_compression
        )
        return Picture(file, generation.info)


def _once(failure: BaseException) -> BaseException:
    """A failure of one image of several: asking again would repeat the work that the others are."""
    if isinstance(failure, DiffusionError) and failure.status is Status.UNAVAILABLE and failure.code:
        again = unavailable(failure.message, failure.code)
        again.headers.update(DO_NOT_RETRY)
        return again
    return failure


def _check(generation: Generation, settings: ImageSettings) -> None:
    expected = (settings.height, settings.width, 3)
    shape = getattr(generation.images, "shape", None)
    if shape != expected:
        raise DiffusionError(f"the ensemble answered an image of shape {shape}, not {expected}")


def _blame(error: DiffusionError) -> DiffusionError:
    """A stage's refusal is the client's fault where the client sent the field, or the pipeline refuses the whole."""
    if error.status is Status.INVALID_ARG and error.param and error.param not in image_request.FIELDS:
        return DiffusionError(error.message)
    return error


def routes(
    settings: Settings, registry: Registry, triton: Triton, store: MediaStore, metrics: Metrics
) -> APIRouter:
    """The route of image generation."""
    router = APIRouter(prefix="/v1/images", tags=["images"])
    recovery = Recovery(triton, registry, metrics)
    generator = ImageGenerator(triton, recovery, metrics, settings.request_timeout_seconds)

    @router.post("/generations", openapi_extra=_BODY_SCHEMA)
    async def generate(http_request: Request) -> JSONResponse:
        """Make n images of a prompt."""
        request = image_request.parse(await read_json_object(http_request))
        model, limits = registry.require_ready(request.model)
        plan = image_request.plan(request, limits)
        pictures = await while_connected(http_request, generator.generate(model, plan, request))
        if request.response_format == "url":
            base = base_url(http_request, settings.public_url, settings.trusted_proxies)
            contents = [{"url": f"{base}/v1/media/{name}"} for name in await publish(pictures, request)]
        else:
            contents = [{"b64_json": base64.b64encode(picture.file).decode()} for picture in pictures]
        return JSONResponse(_answer(model, plan, request, pictures, contents))

    async def publish(pictures: list[Picture], request: ImageRequest) -> list[str]:
        extension = image_files.FORMATS[request.output_format][0]
        puts = [asyncio.to_thread(store.put, picture.file, extension) for picture in pictures]
        names = await asyncio.gather(*puts)
        metrics.media_bytes.inc(sum(len(picture.file) for picture in pictures))
        return names

    return router


def _answer(
    model: str, plan: Plan, request: ImageRequest, pictures: list[Picture], contents: list[dict[str, str]]
) -> dict[str, Any]:
    """OpenAI's response object; ``model``, ``seed`` and the keys beside each file are ours."""
    data = [
        {**content, "seed": seed, **{key: picture.info.get(key) for key in _SHOWN}}
        for content, seed, picture in zip(contents, plan.seeds, pictures, strict=True)
    ]
    answer = {
        "created": int(time.time()),
        "data": data,
        "size": f"{plan.settings.width}x{plan.settings.height}",
        "quality": plan.settings.quality,
        "output_format": request.output_format,
        "background": "opaque",
        "model": model,
        "seed": plan.settings.seed,
    }
    if request.safety_identifier is not None:
        answer["safety_identifier"] = request.safety_identifier
    return answer
