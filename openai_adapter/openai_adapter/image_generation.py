"""From a checked request to files: every image is one call of the ensemble, all of them at the same time."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from diffusion_backend.client import Generation, require_final
from diffusion_backend.errors import DiffusionError
from diffusion_backend.settings import Settings as ImageSettings

from openai_adapter import image_files, image_request
from openai_adapter.errors import DO_NOT_RETRY, ApiError, unavailable
from openai_adapter.image_inputs import Inputs
from openai_adapter.image_request import ImageRequest, Plan
from openai_adapter.metrics import Metrics
from openai_adapter.recovery import Recovery
from openai_adapter.request_fields import blame
from openai_adapter.settings import Settings
from openai_adapter.triton import Triton

logger = logging.getLogger(__name__)

_STREAM_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Picture:
    """A file, and what the server said of making it.

    ``index`` is the image's among those of its request. ``preview`` counts the image's previews from 0; the image
    itself has None.
    """

    index: int
    file: bytes
    info: dict[str, Any]
    preview: int | None = None


async def collect(pictures: AsyncGenerator[Picture, None]) -> list[Picture]:
    """All images of a request, in the order of their seeds; raises what making them does."""
    async with aclosing(pictures):
        images = [picture async for picture in pictures if picture.preview is None]
    return sorted(images, key=lambda image: image.index)


class ImageGenerator:
    """Makes the images of requests."""

    def __init__(self, triton: Triton, recovery: Recovery, metrics: Metrics, settings: Settings) -> None:
        self._triton = triton
        self._recovery = recovery
        self._metrics = metrics
        self._timeout = settings.request_timeout_seconds
        self._max_in_flight = settings.max_images_in_flight
        self._in_flight: Counter[str] = Counter()

    async def stream(
        self, model: str, plan: Plan, request: ImageRequest, inputs: Inputs
    ) -> AsyncGenerator[Picture, None]:
        """The pictures of a request as they are made: of each image its previews, then itself.

        When one image fails the others are cancelled; so are all when the caller stops reading (``aclose``).

        Raises:
            DiffusionError: what Triton said of the first one that failed.
            ApiError: 503, there are too many, or its work was lost; 504 after ``request_timeout_seconds``.
        """
        self._admit(model, plan.n)
        made: asyncio.Queue[Picture | Exception] = asyncio.Queue()
        work = [
            asyncio.create_task(self._work(model, index, settings, request, inputs, made.put_nowait))
            for index, settings in enumerate(plan.images)
        ]
        for task in work:
            task.add_done_callback(lambda _: self._in_flight.subtract((model,)))
        deadline = asyncio.get_running_loop().time() + self._timeout
        missing = plan.n
        try:
            while missing:
                picture = await self._next(made, deadline)
                if isinstance(picture, Exception):
                    raise picture
                self._count(model, plan, picture)
                missing -= picture.preview is None
                yield picture
        finally:
            for task in work:
                task.cancel()

    def _admit(self, model: str, count: int) -> None:
        """Before anything of a request is worked on: its images together, or none of them."""
        if self._in_flight[model] + count > self._max_in_flight:
            raise unavailable(
                f"the server is busy: {self._in_flight[model]} images are waiting or being made", "queue_full"
            )
        self._in_flight[model] += count

    async def _next(self, made: asyncio.Queue[Picture | Exception], deadline: float) -> Picture | Exception:
        try:
            async with asyncio.timeout_at(deadline):
                return await made.get()
        except TimeoutError:
            self._metrics.upstream_errors.labels("TIMEOUT").inc()
            raise ApiError(
                504,
                f"the images were not done within {self._timeout:g} seconds",
                code="timeout",
                headers=DO_NOT_RETRY,
            ) from None

    def _count(self, model: str, plan: Plan, picture: Picture) -> None:
        if picture.preview is None:
            path = str(picture.info.get("decode_path"))
            self._metrics.images.labels(model, plan.settings.quality, path).inc()
        else:
            self._metrics.previews.labels(model).inc()

    async def _work(
        self,
        model: str,
        index: int,
        settings: ImageSettings,
        request: ImageRequest,
        inputs: Inputs,
        put: Callable[[Picture | Exception], None],
    ) -> None:
        """Make one image: ``put`` is told its previews, then the image or what went wrong."""
        shown_steps: list[int] = []

        async def show(preview: Generation) -> None:
            file = await _encode(preview, request)
            step = preview.info["step"]
            # A second attempt, after a loss, repeats the previews of the first.
            if not shown_steps or step > shown_steps[-1]:
                put(Picture(index, file, preview.info, preview=len(shown_steps)))
                shown_steps.append(step)

        async def attempt() -> Generation:
            last: Generation | None = None
            async with aclosing(self._call(model, settings, inputs)) as generations:
                async for last in generations:
                    _check(last, settings)
                    if not last.info["is_final"]:
                        await show(last)
            return require_final(last)

        try:
            image = await self._recovery.run(model, attempt)
            put(Picture(index, await _encode(image, request), image.info))
        except DiffusionError as error:
            self._metrics.upstream_errors.labels(error.status).inc()
            put(blame(error, image_request.FIELDS))
        except Exception as error:
            put(error)

    def _call(self, model: str, settings: ImageSettings, inputs: Inputs) -> AsyncGenerator[Generation, None]:
        request_id = str(uuid.uuid4())
        logger.debug("generation %s on %s", request_id, model)
        return self._triton.client.stream(
            model,
            settings.prompt,
            negative_prompt=settings.negative_prompt,
            image=inputs.images or None,
            mask=inputs.mask,
            request_id=request_id,
            # Only so that no stream outlives its request: the request's own limit comes first, as a 504.
            timeout=self._timeout + _STREAM_GRACE_SECONDS,
            **settings.to_parameters(),
        )


async def _encode(generation: Generation, request: ImageRequest) -> bytes:
    return await asyncio.to_thread(
        image_files.encode, generation.images, request.output_format, request.output_compression
    )


def _check(generation: Generation, settings: ImageSettings) -> None:
    expected = (settings.height, settings.width, 3)
    shape = getattr(generation.images, "shape", None)
    if shape != expected:
        raise DiffusionError(f"the ensemble answered an image of shape {shape}, not {expected}")
