"""What a request may ask for: names, limits and defaults, with one owner.

``ModelLimits`` is read from the parameters of a model's ensemble (``config.pbtxt``), so an operator edits one file.
``resolve`` turns what a client sent into ``Settings``: every field filled and checked. The encode stage resolves;
the adapter resolves too, to refuse a bad request before it costs anything; the later stages ``check`` what reaches
them, since a direct client can forge a stage's input. Nothing here imports torch.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from diffusion_backend.errors import DiffusionError, invalid, show
from diffusion_backend.lora_choice import Loras, check_loras, to_text
from diffusion_backend.quality import Tier, resolve_tier
from diffusion_backend.tasks import (
    IMAGE_TO_IMAGE,
    INPAINTING,
    MAX_IMAGES,
    TASKS,
    check_strength,
    check_task,
    choose_task,
    needs_image,
    size_of_image,
)

MAX_PROMPT_CHARACTERS = 32_000
MAX_PARTIAL_IMAGES = 3  # as in OpenAI's API
MAX_SEED = 2**53 - 1  # the largest integer that every JSON client reads back exactly
MAX_FPS = 120
# Why a model that makes video shows no previews and no trajectory: a clip is decoded as a whole, and once.
NO_PICTURES = "this model makes video"


class ModelLimits(BaseModel):
    """What one model is and accepts: the parameters of its ensemble.

    All values arrive as strings from ``config.pbtxt``; pydantic turns them into the types below. Sizes are in pixels.
    ``source_revision`` is the commit of a source on the hub, which is what every stage loads. ``tasks`` say what
    goes in and what comes out; the first is the pipeline's own. A request brings at most ``max_images``. A model that
    makes video has the fields of frames, and no other has them; one whose tasks take a strength has a default of it.
    ``loras`` are folders by the names that requests ask for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    source: str
    source_revision: str | None = None
    pipeline_class: str
    tasks: tuple[str, ...] = Field(min_length=1)
    created: int
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    default_prompt: str
    default_width: int = Field(gt=0)
    default_height: int = Field(gt=0)
    size_multiple: int = Field(gt=0)
    max_width: int
    max_height: int
    default_num_inference_steps: int = Field(gt=0)
    max_num_inference_steps: int
    guidance_argument: str | None = None
    default_guidance_scale: float | None = None
    max_guidance_scale: float = Field(100.0, ge=0)
    default_negative_prompt: str | None = None
    frames_argument: str | None = None
    default_num_frames: int | None = Field(None, gt=0)
    min_num_frames: int | None = Field(None, gt=0)
    max_num_frames: int | None = None
    num_frames_step: int | None = Field(None, gt=0)
    fps_argument: str | None = None
    default_fps: int | None = None
    max_images: int = Field(0, ge=0, le=MAX_IMAGES)
    default_strength: float | None = Field(None, gt=0, le=1)
    default_inpainting_strength: float | None = Field(None, gt=0, le=1)
    default_quality: Tier = Tier.LOSSLESS
    call_arguments: dict[str, Any] = Field(default_factory=dict)
    loras: dict[str, str] = Field(default_factory=dict)

    @field_validator("call_arguments", "loras", mode="before")
    @classmethod
    def _parse_json(cls, value: object) -> object:
        return json.loads(value) if isinstance(value, str) else value

    @field_validator("tasks", mode="before")
    @classmethod
    def _split_tasks(cls, value: object) -> object:
        return tuple(value.split(", ")) if isinstance(value, str) else value

    @field_validator("tasks")
    @classmethod
    def _know_tasks(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [task for task in tasks if task not in TASKS]:
            raise ValueError(f"{show(unknown[0])} is no task; allowed: {', '.join(TASKS)}")
        return tasks

    @model_validator(mode="after")
    def _check_defaults(self) -> Self:
        """The defaults are requests that the limits allow."""
        check(
            self,
            {
                "prompt": self.default_prompt,
                "negative_prompt": self.default_negative_prompt,
                "width": self.default_width,
                "height": self.default_height,
                "num_inference_steps": self.default_num_inference_steps,
                "guidance_scale": self.default_guidance_scale,
                "seed": 0,
                "quality": "auto",
                "num_frames": self.default_num_frames,
                "fps": self.default_fps,
                "partial_images": 0,
                "trajectory": False,
                "progress": False,
                "strength": self.strength_of(self.task),
            },
        )
        for task in self.tasks:
            strength = self.strength_of(task)
            check_strength(task, strength, self.default_num_inference_steps, has_default=strength is not None)
        return self

    @property
    def hub_id(self) -> str | None:
        """The source when it is a hub id (``org/name``); None for a local folder, which is nobody else's business."""
        return None if self.source.startswith((".", "/")) else self.source

    @property
    def task(self) -> str:
        """The pipeline's own."""
        return self.tasks[0]

    @property
    def takes_image(self) -> bool:
        """Whether a request may bring one."""
        return any(map(needs_image, self.tasks))

    @property
    def takes_mask(self) -> bool:
        return self.takes_image and not self.makes_video

    def size_of_image(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) of the result of a request whose first image has this size, and that names none."""
        return size_of_image((width, height), self.size_multiple, (self.max_width, self.max_height))

    def strength_of(self, task: str) -> float | None:
        """The default of ``strength``; None where ``task`` takes none."""
        if task == INPAINTING:
            return self.default_inpainting_strength
        return self.default_strength if task == IMAGE_TO_IMAGE else None

    @property
    def makes_video(self) -> bool:
        return self.task.endswith("-video")

    @property
    def takes_negative_prompt(self) -> bool:
        return self.default_negative_prompt is not None


def parse_limits(parameters: Mapping[str, object]) -> ModelLimits:
    """The limits that an ensemble's parameters state.

    Raises:
        ValueError: what is wrong with the first parameter that is, in one line.
    """
    try:
        return ModelLimits.model_validate(dict(parameters))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"parameter {name!r} is {show(first['input'])}: {first['msg']}") from None
    except DiffusionError as error:
        raise ValueError(f"its defaults are outside its limits: {error.message}") from None


class Settings(BaseModel):
    """One request, resolved: what every stage goes by, and what travels with its tensors as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: str
    negative_prompt: str | None
    width: int
    height: int
    num_inference_steps: int
    guidance_scale: float | None
    seed: int
    quality: str
    num_frames: int | None
    fps: int | None
    partial_images: int
    trajectory: bool
    progress: bool
    # Jobs of adapters that knew none of these have none.
    loras: Loras = ()
    task: str = ""
    strength: float | None = None

    def to_parameters(self) -> dict[str, Any]:
        """The request parameters that ask for these settings."""
        given = self.model_dump(exclude={"prompt", "negative_prompt", "loras", "task"}, exclude_none=True)
        return {**given, "lora": to_text(self.loras)} if self.loras else given


# The request parameters of the ensemble. Prompts are tensors, not parameters.
PARAMETERS = (
    "width",
    "height",
    "num_inference_steps",
    "guidance_scale",
    "seed",
    "quality",
    "num_frames",
    "fps",
    "partial_images",
    "trajectory",
    "progress",
    "lora",
    "strength",
)


def resolve(
    limits: ModelLimits,
    prompt: object,
    negative_prompt: object,
    parameters: Mapping[str, object],
    *,
    images: int = 0,
    has_mask: bool = False,
) -> Settings:
    """Fill the model's defaults into a request, with so many images, and check every value.

    ``None`` means "not given" everywhere.

    Raises:
        DiffusionError: INVALID_ARG, naming the field, its value and what is allowed.
    """
    unknown = sorted(set(parameters) - set(PARAMETERS))
    if unknown:
        raise invalid(
            unknown[0],
            f"{show(unknown[0])} is not a parameter of this model; allowed: {', '.join(PARAMETERS)}",
            "unknown_parameter",
        )
    given = {name: value for name, value in parameters.items() if value is not None}
    task = choose_task(limits.tasks, images, has_mask=has_mask, max_images=limits.max_images)
    fields = {
        "prompt": prompt,
        "negative_prompt": limits.default_negative_prompt if negative_prompt is None else negative_prompt,
        "width": given.get("width", limits.default_width),
        "height": given.get("height", limits.default_height),
        "num_inference_steps": given.get("num_inference_steps", limits.default_num_inference_steps),
        "guidance_scale": given.get("guidance_scale", limits.default_guidance_scale),
        "seed": given.get("seed", secrets.randbelow(2**32)),
        "quality": given.get("quality", "auto"),
        "num_frames": given.get("num_frames", limits.default_num_frames),
        "fps": given.get("fps", limits.default_fps),
        "partial_images": given.get("partial_images", 0),
        "trajectory": given.get("trajectory", False),
        "progress": given.get("progress", False),
        "loras": given.get("lora"),
        "task": task,
        "strength": given.get("strength", limits.strength_of(task)),
    }
    return check(limits, fields)


def check(limits: ModelLimits, fields: Mapping[str, object]) -> Settings:
    """``Settings`` from all of their fields, each one within the model's limits.

    Raises:
        DiffusionError: INVALID_ARG, naming the field, its value and what is allowed.
    """
    missing = [
        name for name, field in Settings.model_fields.items() if field.is_required() and name not in fields
    ]
    extra = [name for name in fields if name not in Settings.model_fields]
    if missing or extra:
        raise invalid("settings", f"'settings' lacks {missing} and has unknown {extra}")
    resolve_tier(fields["quality"], limits.default_quality)
    task = check_task(limits.tasks, fields.get("task"))
    steps = _integer("num_inference_steps", fields["num_inference_steps"], 1, limits.max_num_inference_steps)
    settings = Settings(
        prompt=_prompt_of(task, fields["prompt"]),
        negative_prompt=_negative_prompt(limits, fields["negative_prompt"]),
        width=_side("width", fields["width"], limits.size_multiple, limits.max_width),
        height=_side("height", fields["height"], limits.size_multiple, limits.max_height),
        num_inference_steps=steps,
        guidance_scale=_guidance_scale(limits, fields["guidance_scale"]),
        seed=_integer("seed", fields["seed"], 0, MAX_SEED),
        quality="auto" if fields["quality"] is None else str(fields["quality"]),
        num_frames=check_num_frames(limits, fields["num_frames"]),
        fps=check_fps(limits, fields["fps"]),
        partial_images=_integer("partial_images", fields["partial_images"], 0, MAX_PARTIAL_IMAGES),
        trajectory=_boolean("trajectory", fields["trajectory"]),
        progress=_boolean("progress", fields["progress"]),
        loras=check_loras(limits.loras, fields.get("loras")),
        task=task,
        strength=check_strength(
            task, fields.get("strength"), steps, has_default=limits.strength_of(task) is not None
        ),
    )
    if limits.makes_video:
        check_previews(settings.partial_images, NO_PICTURES)
        check_trajectory(settings.trajectory, NO_PICTURES)
    if settings.trajectory and settings.partial_images:
        raise invalid(
            "partial_images", f"'partial_images' is {settings.partial_images}; allowed with 'trajectory': 0"
        )
    unguided = settings.guidance_scale is not None and settings.guidance_scale <= 1
    if settings.negative_prompt != limits.default_negative_prompt and unguided:
        raise invalid(
            "negative_prompt",
            f"'negative_prompt' has no effect with guidance_scale {settings.guidance_scale}; "
            "allowed: a guidance_scale above 1, or no negative_prompt",
        )
    return settings


def check_previews(partial_images: int, reason: str | None) -> None:
    """``reason`` says why a model shows no previews; None where it does.

    Raises:
        DiffusionError: INVALID_ARG, naming ``partial_images``.
    """
    if partial_images and reason:
        raise invalid("partial_images", f"'partial_images' is {partial_images}; allowed: 0, since {reason}")


def check_trajectory(trajectory: bool, reason: str | None) -> None:
    """The same for ``trajectory``."""
    if trajectory and reason:
        raise invalid("trajectory", f"'trajectory' is true; allowed: false, since {reason}")


def check_progress(progress: bool, reason: str | None) -> None:
    """The same for ``progress``."""
    if progress and reason:
        raise invalid("progress", f"'progress' is true; allowed: false, since {reason}")


def check_num_frames(limits: ModelLimits, value: object) -> int | None:
    """How many frames a clip has; None where the model makes pictures.

    Raises:
        DiffusionError: INVALID_ARG, naming the numbers that are allowed.
    """
    if not limits.makes_video:
        _refuse_of_pictures("num_frames", value)
        return None
    low, high, step = limits.min_num_frames, limits.max_num_frames, limits.num_frames_step
    if low is None or high is None or step is None:
        raise invalid(
            "num_frames",
            "a model that makes video has 'min_num_frames', 'max_num_frames' and 'num_frames_step'",
        )
    if isinstance(value, bool) or not isinstance(value, int) or value not in range(low, high + 1, step):
        raise invalid(
            "num_frames",
            f"'num_frames' is {show(value)}; allowed: {_progression(range(low, high + 1, step))}",
        )
    return value


def check_fps(limits: ModelLimits, value: object) -> int | None:
    """Frames a second of a clip; None where the model makes pictures.

    Raises:
        DiffusionError: INVALID_ARG, naming the numbers that are allowed.
    """
    if not limits.makes_video:
        _refuse_of_pictures("fps", value)
        return None
    return _integer("fps", value, 1, MAX_FPS)


def _refuse_of_pictures(name: str, value: object) -> None:
    if value is not None:
        raise invalid(name, f"'{name}' is {show(value)}; this model makes pictures, not video")


def _progression(numbers: range) -> str:
    if numbers.step == 1:
        return f"integers from {numbers[0]} to {numbers[-1]}"
    first = ", ".join(map(str, numbers[:3]))
    return first if len(numbers) <= 3 else f"{first}, ... {numbers[-1]} (in steps of {numbers.step})"


def parse_size(size: object, limits: ModelLimits) -> tuple[int, int]:
    """(width, height) in pixels from ``"WIDTHxHEIGHT"``; ``None`` and ``"auto"`` are the model's own size.

    Raises:
        DiffusionError: INVALID_ARG, naming the multiple and the maximum.
    """
    if size is None or size == "auto":
        return limits.default_width, limits.default_height
    match = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})", size) if isinstance(size, str) else None
    try:
        if match is None:
            raise ValueError
        width, height = int(match[1]), int(match[2])
        for side, largest in ((width, limits.max_width), (height, limits.max_height)):
            if not limits.size_multiple <= side <= largest or side % limits.size_multiple:
                raise ValueError
    except ValueError:
        raise invalid(
            "size",
            f"'size' is {show(size)}; allowed: 'auto' ({limits.default_width}x{limits.default_height}) or "
            f"'WIDTHxHEIGHT', both multiples of {limits.size_multiple}, "
            f"at least {limits.size_multiple}x{limits.size_multiple}, at most {limits.max_width}x{limits.max_height}",
            "invalid_size",
        ) from None
    return width, height


def check_prompt(prompt: object, param: str = "prompt") -> str:
    """A prompt that a text encoder can read.

    Raises:
        DiffusionError: INVALID_ARG when it is no string, blank, too long, or not valid Unicode.
    """
    text = _text(prompt, param)
    if not text.strip():
        raise invalid(param, f"'{param}' is {show(text)}; allowed: a text that is not blank", "empty_prompt")
    return text


def _prompt_of(task: str, prompt: object) -> str:
    """An image can be varied without one."""
    return "" if task == IMAGE_TO_IMAGE and prompt == "" else check_prompt(prompt)


def _text(value: object, param: str) -> str:
    if value is None:
        raise invalid(param, f"'{param}' is missing; allowed: a string", "missing")
    if not isinstance(value, str):
        raise invalid(param, f"'{param}' is {show(value)}; allowed: a string")
    if len(value) > MAX_PROMPT_CHARACTERS:
        raise invalid(
            param,
            f"'{param}' has {len(value)} characters; allowed: at most {MAX_PROMPT_CHARACTERS}",
            "string_too_long",
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid(
            param,
            f"'{param}' is {show(value)}; allowed: valid Unicode, without lone surrogates",
            "invalid_unicode",
        ) from None
    return value


def _negative_prompt(limits: ModelLimits, value: object) -> str | None:
    if limits.takes_negative_prompt:
        return _text("" if value is None else value, "negative_prompt")
    if value is not None and value != "":
        raise invalid(
            "negative_prompt", f"'negative_prompt' is {show(value)}; this model takes no negative prompt"
        )
    return None


def _guidance_scale(limits: ModelLimits, value: object) -> float | None:
    if limits.guidance_argument is None:
        if value is not None:
            raise invalid(
                "guidance_scale", f"'guidance_scale' is {show(value)}; this model takes no guidance"
            )
        return None
    largest = limits.max_guidance_scale
    # NaN is in no range, and an int of any size compares.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= largest:
        raise invalid(
            "guidance_scale", f"'guidance_scale' is {show(value)}; allowed: numbers from 0 to {largest:g}"
        )
    return float(value)


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise invalid(name, f"'{name}' is {show(value)}; allowed: integers from {low} to {high}")
    return value


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise invalid(name, f"'{name}' is {show(value)}; allowed: true, false")
    return value


def _side(name: str, value: object, multiple: int, largest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value % multiple or not 1 <= value <= largest:
        raise invalid(
            name,
            f"'{name}' is {show(value)}; allowed: multiples of {multiple} from {multiple} to {largest}",
            "invalid_size",
        )
    return value
