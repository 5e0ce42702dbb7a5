"""What the routes of pictures take: every field is honoured, or refused by name.

The fields that videos have too are those of ``generation_fields``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from diffusion_backend import settings
from diffusion_backend.errors import DiffusionError, invalid, show
from diffusion_backend.input_image import GivenImages
from diffusion_backend.settings import ModelLimits, Settings
from diffusion_backend.tasks import (
    IMAGE_EDIT,
    IMAGE_TO_IMAGE,
    INPAINTING,
    MAX_IMAGES,
    TEXT_TO_IMAGE,
    check_images,
    choose_task,
)
from pydantic import Field

from openai_adapter import generation_fields
from openai_adapter.generation_fields import REFUSED_SIDES, GenerationFields
from openai_adapter.image_references import ONE_IMAGE
from openai_adapter.request_fields import PICTURE

_GIF_ONLY = "it belongs to output_format 'gif', which is not supported"
_REFUSED = {
    "style": "no model here has styles; describe the style in 'prompt'",
    "complexity": "no model here has levels of complexity",
    "frame_count": _GIF_ONLY,
    "frame_duration_ms": _GIF_ONLY,
    "svg": "SVG output is not supported",
    **REFUSED_SIDES,
}
NO_IMAGES = GivenImages([], None)


class ImageRequest(GenerationFields):
    """The body of a request for images."""

    REFUSED: ClassVar[Mapping[str, str]] = _REFUSED
    EVENTS: ClassVar[str] = "image_generation"

    n: int = Field(1, ge=1, le=10, description="integers from 1 to 10")
    response_format: Literal["b64_json", "url"] = Field("b64_json", description="'b64_json', 'url'")
    output_format: Literal["png", "jpeg", "webp"] = Field("png", description="'png', 'jpeg', 'webp'")
    output_compression: int = Field(
        100, ge=0, le=100, description="integers from 0 to 100, the quality of a JPEG or WebP file"
    )
    background: Literal["auto", "opaque"] = Field(
        "auto", description="'auto', 'opaque'; no model here makes transparent pictures"
    )
    moderation: Literal["auto", "low"] = Field("auto", description="'auto', 'low'; nothing is moderated here")
    stream: bool = Field(False, description="true, false")
    partial_images: int = Field(
        0,
        ge=0,
        le=settings.MAX_PARTIAL_IMAGES,
        description=f"integers from 0 to {settings.MAX_PARTIAL_IMAGES}, the previews of each image of a stream",
    )


class EditRequest(ImageRequest):
    """The body of a request for edits of images."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        **_REFUSED,
        "markup": "no model here reads marks on a picture; describe the change in 'prompt', and where in 'mask'",
    }
    EVENTS: ClassVar[str] = "image_edit"
    MAX_IMAGES: ClassVar[int] = MAX_IMAGES

    image: Any = Field(
        None,
        json_schema_extra=PICTURE,
        description=f"{ONE_IMAGE}; or a list of 1 to {MAX_IMAGES} of these",
    )
    images: Any = Field(
        None,
        json_schema_extra=PICTURE,
        description=f"a list of 1 to {MAX_IMAGES} data URLs, or objects with 'image_url'",
    )
    mask: Any = Field(
        None,
        json_schema_extra=PICTURE,
        description=f"{ONE_IMAGE}: a picture of the first image's size, transparent where that may change",
    )
    input_fidelity: Literal["low", "high"] | None = Field(None, description="'low', 'high'")
    strength: Any = Field(
        None,
        json_schema_extra={"type": "number"},
        description="numbers above 0, up to 1: how much of the image may change",
    )


class VariationRequest(EditRequest):
    """The body of a request for variations of an image."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        **EditRequest.REFUSED,
        "prompt": "a variation has none; /v1/images/edits takes one",
        "images": "a variation is one of one image; send 'image'",
        "mask": "a variation changes the whole picture; /v1/images/edits takes a mask",
        "stream": "variations are not streamed; /v1/images/edits is",
        "partial_images": "variations are not streamed; /v1/images/edits is",
    }

    MAX_IMAGES: ClassVar[int] = 1

    prompt: Any = Field(None, json_schema_extra={"type": "null"})
    image: Any = Field(None, json_schema_extra=PICTURE, description=ONE_IMAGE)


# What a stage's refusal may blame a client for.
FIELDS = frozenset((*EditRequest.model_fields, *EditRequest.REFUSED))


@dataclass(frozen=True)
class Plan:
    """What a request comes to on one model: the settings of its first image, and how many there are.

    Image k has the seed ``settings.seed + k``.
    """

    settings: Settings
    n: int

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of the images, in pixels."""
        return self.settings.width, self.settings.height

    @property
    def images(self) -> list[Settings]:
        """The settings of each image."""
        first = self.settings.seed
        return [self.settings.model_copy(update={"seed": first + number}) for number in range(self.n)]


@dataclass(frozen=True)
class Reference:
    """A picture that a request brings: ``value`` as it was sent, as the field that errors name."""

    field: str
    value: object


T = TypeVar("T", bound=ImageRequest)


def parse(kind: type[T], given: Mapping[str, Any]) -> T:
    """Check everything in the fields of a JSON object or a form (``unwrap``) that can be checked without a model.

    Raises:
        DiffusionError: INVALID_ARG, naming the field, its value and what is allowed.
    """
    request = generation_fields.parse(kind, given, kind.REFUSED)
    _check_stream(request)
    if request.output_format == "png" and request.output_compression != 100:
        raise invalid(
            "output_compression",
            f"'output_compression' is {request.output_compression} with output_format 'png', which is always "
            "exact; allowed: 100, or output_format 'jpeg' or 'webp'",
        )
    if isinstance(request, EditRequest):
        list_images(request)
        _check_fidelity(request)
    return request


def _check_stream(request: ImageRequest) -> None:
    if request.partial_images and not request.stream:
        raise invalid(
            "partial_images",
            f"'partial_images' is {request.partial_images} without 'stream'; allowed: 0, or 'stream' true",
        )
    if request.stream and request.response_format != "b64_json":
        # As OpenAI's own: its events have no url.
        raise invalid(
            "response_format",
            f"'response_format' is '{request.response_format}' with 'stream' true; allowed: 'b64_json'",
        )


def _check_fidelity(request: EditRequest) -> None:
    if request.input_fidelity is not None and request.strength is not None:
        raise invalid(
            "input_fidelity",
            f"'input_fidelity' is '{request.input_fidelity}' with 'strength', which says the same more finely; "
            "allowed: one of the two",
            "conflicting_values",
        )


def list_images(request: EditRequest) -> list[Reference]:
    """The images that are edited, the main one first.

    Raises:
        DiffusionError: INVALID_ARG, there are none, too many, or two lists of them.
    """
    if request.image is not None and request.images is not None:
        raise invalid(
            "images", "'images' is given, and 'image', too; allowed: one of the two", "conflicting_values"
        )
    if request.image is not None and not isinstance(request.image, list):
        return [Reference("image", request.image)]
    name = "image" if request.images is None else "images"
    given = request.image if request.images is None else request.images
    allowed = type(request).model_fields[name].description
    if given is None:
        raise invalid(name, f"'{name}' is missing; allowed: {allowed}", "missing")
    if not isinstance(given, list):
        raise invalid(name, f"'{name}' is {show(given)}; allowed: {allowed}")
    if not 1 <= len(given) <= request.MAX_IMAGES:
        raise invalid(name, f"'{name}' has {len(given)} pictures; allowed: {allowed}", "too_many_images")
    return [Reference(f"{name}[{index}]", value) for index, value in enumerate(given)]


def check_count(request: EditRequest, limits: ModelLimits) -> None:
    """Whether the model takes as many images, before anybody fetches or decodes them.

    Raises:
        DiffusionError: INVALID_ARG, naming the field.
    """
    check_images(
        limits.tasks,
        len(list_images(request)),
        has_mask=request.mask is not None,
        max_images=limits.max_images,
        name="image" if request.images is None else "images",
    )


def tasks_for(request: ImageRequest) -> tuple[str, ...]:
    """The tasks of models that would do, the best one first."""
    if not isinstance(request, EditRequest):
        return (TEXT_TO_IMAGE,)
    if isinstance(request, VariationRequest):
        return (IMAGE_TO_IMAGE,)
    if request.mask is not None:
        return (INPAINTING, IMAGE_EDIT, IMAGE_TO_IMAGE)
    return (IMAGE_EDIT, IMAGE_TO_IMAGE, INPAINTING)  # the image's own transparency may be a mask


def plan(request: ImageRequest, limits: ModelLimits, given: GivenImages = NO_IMAGES) -> Plan:
    """Resolve ``request``, with the images it brings, on a model; where no seed is given, one is drawn here.

    Raises:
        DiffusionError: INVALID_ARG, naming the field, its value and what is allowed.
    """
    own: dict[str, object] = {"partial_images": request.partial_images}
    has_mask = given.part is not None
    size = settings.parse_size(request.size, limits)
    if isinstance(request, EditRequest):
        if given.size and request.size in (None, "auto"):
            size = limits.size_of_image(*given.size)
        own["strength"] = _strength(request, limits, len(given.images), has_mask)
    if isinstance(request, VariationRequest):
        request = request.model_copy(update={"prompt": ""})
    try:
        resolved = generation_fields.resolve(
            request, limits, size, images=len(given.images), has_mask=has_mask, **own
        )
    except DiffusionError as error:
        half = isinstance(request, EditRequest) and request.input_fidelity == "high"
        if error.param != "strength" or not half:
            raise
        raise invalid("input_fidelity", f"'input_fidelity' is 'high', so that {error.message}") from None
    largest = settings.MAX_SEED - request.n + 1
    if resolved.seed > largest:
        raise invalid(
            "seed",
            f"'seed' is {resolved.seed} with n {request.n}, whose images take the seeds that follow; "
            f"allowed: integers from 0 to {largest}",
        )
    return Plan(resolved, request.n)


def _strength(request: EditRequest, limits: ModelLimits, images: int, has_mask: bool) -> object:
    """The one that is asked for; "high" fidelity is half of the model's own, where its task has one."""
    if request.input_fidelity != "high":
        return request.strength
    task = choose_task(limits.tasks, images, has_mask=has_mask, max_images=limits.max_images)
    own = limits.strength_of(task)
    if own is None:
        raise invalid("input_fidelity", f"'input_fidelity' is 'high'; allowed for {task}: 'low', or none")
    return own / 2
