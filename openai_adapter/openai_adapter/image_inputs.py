"""The pictures that requests bring, made what goes to Triton: PNG files of the size that is asked for.

Everything that can be wrong with them is found here, before anything is queued, by the rules of
``diffusion_backend.input_image``, which the stages go by too.
"""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass

import numpy as np
from diffusion_backend.input_image import GivenImages, editable_part, shrink
from diffusion_backend.settings import ModelLimits
from PIL import Image, ImageOps

from openai_adapter import image_request, uploads
from openai_adapter.image_files import encode
from openai_adapter.image_references import ImageReferences
from openai_adapter.image_request import EditRequest, ImageRequest, Plan, VariationRequest
from openai_adapter.settings import Settings

# Of a picture that an edit only looks at: no model looks at more.
_MAX_REFERENCE_SIDE = 2048


@dataclass(frozen=True)
class Inputs:
    """PNG files: the images that a request begins with, and where the first one may change."""

    images: tuple[bytes, ...] = ()
    mask: bytes | None = None


class ImageInputs:
    """Reads and decodes pictures, within an operator's limits: one at a time, as a large one takes a lot of memory."""

    def __init__(self, settings: Settings) -> None:
        self._references = ImageReferences(
            settings.allowed_image_hosts, settings.max_image_bytes, settings.image_fetch_seconds
        )
        self._max_pixels = settings.max_image_pixels
        self._decoding = asyncio.Semaphore(1)

    async def digest(self, value: object) -> object:
        """What stands for the fields of a request where requests are compared (``ImageReferences.digest``)."""
        return await self._references.digest(value)

    def of(self, request: ImageRequest) -> RequestInputs:
        """The pictures of a request."""
        return RequestInputs(self, request)

    async def open(self, request: ImageRequest) -> GivenImages:
        """The pictures of a request, decoded.

        Raises:
            DiffusionError: INVALID_ARG, naming the first field that is wrong, and what is allowed.
        """
        if not isinstance(request, EditRequest):
            return GivenImages([], None)
        images: list[Image.Image] = []
        for reference in image_request.list_images(request):
            image = await self._decode(reference.value, reference.field)
            # References beside the first are not needed any larger, and may be many.
            images.append(shrink(image, _MAX_REFERENCE_SIDE, _MAX_REFERENCE_SIDE) if images else image)
        if isinstance(request, VariationRequest):
            return GivenImages(images, None)
        mask = None if request.mask is None else await self._decode(request.mask, "mask")
        return GivenImages(images, await asyncio.to_thread(editable_part, images[0], mask))

    async def _decode(self, reference: object, field: str) -> Image.Image:
        data = await self._references.read(reference, field)
        async with self._decoding:
            return await asyncio.to_thread(uploads.decode, data, field, self._max_pixels)

    async def to_png(self, reference: object, field: str, size: tuple[int, int]) -> bytes:
        """The picture that ``reference`` is or refers to, of that size (width, height), as a PNG file.

        Raises:
            DiffusionError: INVALID_ARG, naming ``field`` and what is allowed.
        """
        data = await self._references.read(reference, field)
        async with self._decoding:
            return await asyncio.to_thread(uploads.to_png, data, field, self._max_pixels, size)


class RequestInputs:
    """The pictures of one request: read and decoded once, when they are first needed."""

    def __init__(self, inputs: ImageInputs, request: ImageRequest) -> None:
        self._inputs = inputs
        self._request = request
        self._given: GivenImages | None = None

    async def plan(self, limits: ModelLimits) -> Plan:
        """What the request comes to on a model, which its pictures have a say in.

        Raises:
            DiffusionError: INVALID_ARG, naming the field, its value and what is allowed.
        """
        return image_request.plan(self._request, limits, await self._open())

    async def files(self, plan: Plan) -> Inputs:
        """What goes to Triton for ``plan``, which is this request's, or an earlier one's that asked for the same."""
        given = await self._open()
        size = (plan.settings.width, plan.settings.height)
        return await asyncio.to_thread(_to_files, given, size) if given.images else Inputs()

    async def _open(self) -> GivenImages:
        if self._given is None:
            self._given = await self._inputs.open(self._request)
        return self._given


def _to_files(given: GivenImages, size: tuple[int, int]) -> Inputs:
    images = given.fitted(size, (_MAX_REFERENCE_SIDE, _MAX_REFERENCE_SIDE))
    files = tuple(encode(np.asarray(image), "png", 100) for image in images)
    part = given.fitted_part(size)
    return Inputs(files, None if part is None else _mask_file(part))


def _mask_file(part: Image.Image) -> bytes:
    mask = Image.merge("LA", (Image.new("L", part.size), ImageOps.invert(part)))
    file = io.BytesIO()
    mask.save(file, "PNG")
    return file.getvalue()
