"""One model, several tasks: pipelines of other classes that share all components of the one that was loaded.

Which class does what is diffusers' knowledge (its AutoPipeline mappings); whether it does it with these components is
found by dry runs, when a model is added.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from diffusers import DiffusionPipeline

from diffusion_backend import seams
from diffusion_backend.tasks import (
    IMAGE_EDIT,
    IMAGE_TO_IMAGE,
    IMAGE_TO_VIDEO,
    INPAINTING,
    TEXT_TO_IMAGE,
    TEXT_TO_VIDEO,
)

logger = logging.getLogger(__name__)


def pipelines_by_task(pipe: DiffusionPipeline) -> dict[str, DiffusionPipeline]:
    """The pipelines of all tasks that ``pipe`` and its relatives may do; its own tasks come first."""
    if seams.makes_video(pipe):
        return dict.fromkeys((TEXT_TO_VIDEO, IMAGE_TO_VIDEO), pipe)
    # They import every pipeline of pictures, which takes a tenth of a stage's start.
    from diffusers import AutoPipelineForImage2Image, AutoPipelineForInpainting

    call = inspect.signature(type(pipe).__call__).parameters
    found = {} if is_required("image", call) else {TEXT_TO_IMAGE: pipe}
    if "image" in call:
        found[_task_with_image(call)] = pipe
    for relatives in (AutoPipelineForImage2Image, AutoPipelineForInpainting):
        try:
            relative = relatives.from_pipe(pipe)
        except Exception as error:  # it has none, or that one needs other components
            logger.debug("%s: %s", type(pipe).__name__, error)
            continue
        relative.set_progress_bar_config(disable=True)
        found.setdefault(_task_with_image(inspect.signature(type(relative).__call__).parameters), relative)
    return found


def default_strength(pipelines: Mapping[str, DiffusionPipeline], task: str) -> float | None:
    """What the signature of the pipeline for ``task`` has; None where it takes none."""
    if task not in pipelines:
        return None
    argument = inspect.signature(type(pipelines[task]).__call__).parameters.get("strength")
    return None if argument is None else float(argument.default)


def is_required(name: str, call: Any) -> bool:
    """Whether a pipeline's call must be given the argument ``name``."""
    return name in call and call[name].default is inspect.Parameter.empty


def _task_with_image(call: Any) -> str:
    if "mask_image" in call:
        return INPAINTING
    return IMAGE_TO_IMAGE if "strength" in call else IMAGE_EDIT
