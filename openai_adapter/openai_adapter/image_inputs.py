"""The pictures that requests bring, made what goes to Triton: PNG files of the size that is asked for.

Everything that can be wrong with them is found here, before anything is queued, by the rules of
``diffusion_backend.input_image``, which the stages go by too.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from diffusion_backend.input_image import GivenImages, gather
from diffusion_backend.settings import ModelLimits
from PIL import Image, ImageOps

from openai_adapter import image_request, uploads
from openai_adapter.image_files import encode
from openai_adapter.image_references import ImageReferences
from openai_adapter.image_request import EditRequest, ImageRequest, Plan, VariationRequest
from openai_adapter.settings import Settings

T = TypeVar("T")

# Of a picture that an edit only looks at: no model looks at more.
_MAX_REFERENCE_SIDE = 2048


@dataclass(frozen=True)
class Inputs:
    """PNG files: the images that a request begins with, and where the first one may change."""

    images: tuple[bytes, ...] = ()
    mask: bytes | None = None


class ImageInputs:
    """Reads and decodes pictures, within an operator's limits.

    Those of one request at a time are decoded, as a large one takes a lot of memory.
    """

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

    async def open(self, request: EditRequest, use: Callable[[GivenImages], T]) -> T:
        """What ``use`` makes of the pictures of a request, in a thread; they are gone when it returns.

        Raises:
            DiffusionError: INVALID_ARG, naming a field that is wrong, and what is allowed; one that cannot be read
                before one that cannot be decoded.
        """
        read = self._references.read
        images = [
            (await read(each.value, each.field), each.field) for each in image_request.list_images(request)
        ]
        mask = None if request.mask is None else await read(request.mask, "mask")

        def decode_and_use() -> T:
            return use(self._decode(images, mask, takes_mask=not isinstance(request, VariationRequest)))

        async with self._decoding:
            return await asyncio.to_thread(decode_and_use)

    async def to_png(self, reference: object, field: str, size: tuple[int, int]) -> bytes:
        """The picture that ``reference`` is or refers to, of that size (width, height), as a PNG file.

        Raises:
            DiffusionError: INVALID_ARG, naming ``field`` and what is allowed.
        """
        data = await self._references.read(reference, field)
        async with self._decoding:
            return await asyncio.to_thread(uploads.to_png, data, field, self._max_pixels, size)

    def _decode(self, files: list[tuple[bytes, str]], mask: bytes | None, *, takes_mask: bool) -> GivenImages:
        opened = (uploads.decode(data, field, self._max_pixels) for data, field in files)
        largest = (_MAX_REFERENCE_SIDE, _MAX_REFERENCE_SIDE)
        if not takes_mask:
            return gather(opened, largest)
        return gather(
            opened, largest, lambda: None if mask is None else uploads.decode(mask, "mask", self._max_pixels)
        )


class RequestInputs:
    """The pictures of one request. Decoded they are held no longer than it takes to make files of them."""

    def __init__(self, inputs: ImageInputs, request: ImageRequest) -> None:
        self._inputs = inputs
        self._request = request
        self._made: tuple[tuple[int, int], Inputs] | None = None  # of the size that comes first

    async def plan(self, limits: ModelLimits) -> Plan:
        """What the request comes to on a model, which its pictures have a say in.

        Raises:
            DiffusionError: INVALID_ARG, naming the field, its value and what is allowed.
        """
        request = self._request
        if not isinstance(request, EditRequest):
            return image_request.plan(request, limits)
        image_request.check_count(request, limits)

        def use(given: GivenImages) -> tuple[Plan, Inputs]:
            plan = image_request.plan(request, limits, given)
            return plan, _to_files(given, plan.size)

        plan, files = await self._inputs.open(request, use)
        self._made = (plan.size, files)
        return plan

    async def files(self, plan: Plan) -> Inputs:
        """What goes to Triton for ``plan``, which is this request's, or an earlier one's that asked for the same."""
        request = self._request
        if not isinstance(request, EditRequest):
            return Inputs()
        if self._made is None or self._made[0] != plan.size:
            files = await self._inputs.open(request, lambda given: _to_files(given, plan.size))
            self._made = (plan.size, files)
        return self._made[1]


def _to_files(given: GivenImages, size: tuple[int, int]) -> Inputs:
    images = given.fitted(size)
    files = tuple(encode(np.asarray(image), "png", 100) for image in images)
    part = given.fitted_part(size)
    return Inputs(files, None if part is None else _mask_file(part))


def _mask_file(part: Image.Image) -> bytes:
    mask = Image.merge("LA", (Image.new("L", part.size), ImageOps.invert(part)))
    file = io.BytesIO()
    mask.save(file, "PNG")
    return file.getvalue()
