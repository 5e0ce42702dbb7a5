"""The tasks of a model: what goes in, and what comes out. A request's is told by what it brings."""

from __future__ import annotations

import math
from collections.abc import Sequence

from diffusion_backend.errors import invalid, show

TEXT_TO_IMAGE, IMAGE_TO_IMAGE, INPAINTING = "text-to-image", "image-to-image", "inpainting"
# After an instruction, with one image or several as references.
IMAGE_EDIT = "image-edit"
TEXT_TO_VIDEO, IMAGE_TO_VIDEO = "text-to-video", "image-to-video"
TASKS = (TEXT_TO_IMAGE, IMAGE_TO_IMAGE, INPAINTING, IMAGE_EDIT, TEXT_TO_VIDEO, IMAGE_TO_VIDEO)
MAX_IMAGES = 16  # of a request, as in OpenAI's API


def needs_image(task: str) -> bool:
    """Whether a request for ``task`` brings one."""
    return not task.startswith("text-")


def check_images(
    tasks: Sequence[str], images: int, *, has_mask: bool, max_images: int, name: str = "image"
) -> None:
    """What can be said of a request's images, which its field ``name`` has, before anybody looks at them.

    Raises:
        DiffusionError: INVALID_ARG, naming ``name`` or ``mask``: there are too many, or the model takes none.
    """
    if images > max_images:
        allowed = "none" if max_images == 0 else f"at most {max_images}"
        code = "image_not_supported" if max_images == 0 else "too_many_images"
        has = "1 picture" if images == 1 else f"{images} pictures"
        raise invalid(name, f"'{name}' has {has}, and {_has(tasks)}; allowed: {allowed}", code)
    if has_mask and images == 0:
        raise invalid("mask", "'mask' is given without 'image'; allowed: both, or 'image' alone")
    if has_mask and IMAGE_TO_VIDEO in tasks:
        raise invalid("mask", f"'mask' is given; {_has(tasks)}; allowed: none")


def choose_task(tasks: Sequence[str], images: int, *, has_mask: bool, max_images: int) -> str:
    """The one of a model's ``tasks`` that a request with so many images, and perhaps a mask, asks for.

    A mask goes to inpainting where the model has it, and is otherwise laid over the result of an edit.

    Raises:
        DiffusionError: INVALID_ARG, naming ``image`` or ``mask``: the model has no such task.
    """
    check_images(tasks, images, has_mask=has_mask, max_images=max_images)
    has = _has(tasks)
    if images == 0:
        if found := [task for task in tasks if not needs_image(task)]:
            return found[0]
        raise invalid("image", f"'image' is missing, and {has}; allowed: a PNG, JPEG or WebP file", "missing")
    wanted = (IMAGE_EDIT, IMAGE_TO_IMAGE, IMAGE_TO_VIDEO)
    for task in (INPAINTING, *wanted) if has_mask and images == 1 else wanted:
        if task in tasks:
            return task
    raise invalid(
        "mask", f"'mask' is missing, and {has}; allowed: a PNG or WebP file with transparency", "missing"
    )


def _has(tasks: Sequence[str]) -> str:
    return f"this model is one for {', '.join(tasks)}"


def size_of_image(size: tuple[int, int], multiple: int, largest: tuple[int, int]) -> tuple[int, int]:
    """(width, height) of the result where a request has none: those of its first image, as near as the model can.

    An image beyond ``largest`` is scaled down until it fits, in its proportions; then each side is rounded to the
    nearest ``multiple``.
    """
    scale = min(1.0, *(most / side for most, side in zip(largest, size, strict=True)))
    width, height = (
        min(max(multiple, round(side * scale / multiple) * multiple), most // multiple * multiple)
        for side, most in zip(size, largest, strict=True)
    )
    return width, height


def check_task(tasks: Sequence[str], task: object) -> str:
    """``task`` of settings that come from another stage; none is the model's own.

    Raises:
        DiffusionError: INVALID_ARG, naming ``task``.
    """
    if not task:
        return tasks[0]
    if task not in tasks:
        raise invalid("task", f"'task' is {show(task)}; allowed: {', '.join(tasks)}")
    return str(task)


def check_strength(task: str, value: object, num_inference_steps: int, *, has_default: bool) -> float | None:
    """How much of the image a task may change: above 0 (hardly anything), at most 1 (everything).

    Tasks that begin from the image with noise on it have a default of it, and no other takes it.

    Raises:
        DiffusionError: INVALID_ARG, naming ``strength``: the task takes none, or it is too little for one step.
    """
    if not has_default:
        if value is not None:
            raise invalid("strength", f"'strength' is {show(value)}; allowed for {task}: none")
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise invalid("strength", f"'strength' is {show(value)}; allowed: numbers above 0, at most 1")
    if steps_run(num_inference_steps, float(value)) < 1:
        raise invalid(
            "strength",
            f"'strength' is {value} with num_inference_steps {num_inference_steps}, of which that leaves none; "
            f"allowed: at least {math.ceil(1e6 / num_inference_steps) / 1e6:g}",
        )
    return float(value)


def steps_run(num_inference_steps: int, strength: float | None) -> int:
    """How many steps are run at least: pipelines with a strength leave the first ones out, and round differently."""
    return num_inference_steps if strength is None else int(num_inference_steps * strength)
