"""A model's limits and defaults: from the pipeline's signature, its generation_config.json, and dry runs."""

from __future__ import annotations

import inspect
import json
import logging
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline

from diffusion_backend import oddities, seams
from diffusion_backend.dry_runs import Decoded, DryRuns
from diffusion_backend.errors import show, unusable
from diffusion_backend.loading import PipelineFolder
from diffusion_backend.quality import Tier
from diffusion_backend.settings import ModelLimits, resolve
from diffusion_backend.task_pipelines import default_strength
from diffusion_backend.tasks import IMAGE_EDIT, IMAGE_TO_IMAGE, INPAINTING, MAX_IMAGES, needs_image

logger = logging.getLogger(__name__)

GENERATION_CONFIG = "generation_config.json"
DEFAULT_PROMPT = "a red apple on a wooden table"
MAX_STEPS = 200
MAX_SIDE = 16384
# Arguments of a call that belong to the request or to the stages.
RESERVED = (
    "self",
    "generator",
    "output_type",
    "return_dict",
    "num_images_per_prompt",
    "num_videos_per_prompt",
    "image",
    "mask_image",
    "latents",
    "sigmas",
    "timesteps",
)
SIZE_MULTIPLES = (2, 4, 8, 16, 32, 64, 128)
FRAMES_ARGUMENTS = ("num_frames", "frames")
FPS_ARGUMENTS = ("frame_rate", "fps")
DEFAULT_FPS = 16
MAX_FRAMES_STEP = 32
STEPS = 2  # of a dry run: some schedules cannot be made of one
# Of the limits: the default of a strength, its name in generation_config.json, and the task that takes it.
_STRENGTHS = (
    ("default_strength", "strength", IMAGE_TO_IMAGE),
    ("default_inpainting_strength", "inpainting_strength", INPAINTING),
)
_SOME_SIDE = 512  # of an image for a pipeline that chooses its size itself


def derive_limits(
    pipeline: PipelineFolder, runs: DryRuns, *, source: str, created: int, dtype: str, default_quality: Tier
) -> ModelLimits:
    """The limits and defaults of a pipeline.

    Raises:
        DiffusionError: it is of a kind that is not served, or its generation_config.json is wrong.
    """
    why_not = _refusal(pipeline, runs.encode)
    if why_not:
        raise unusable(why_not)
    call = inspect.signature(pipeline.pipeline_class.__call__).parameters
    given = _generation_config(pipeline.folder)
    argument = guidance_argument(pipeline, call)
    steps = given.pop("num_inference_steps", call["num_inference_steps"].default)
    scale = given.pop("guidance_scale", call[argument].default if argument else None)
    negative = given.pop("negative_prompt", "") if "negative_prompt" in call else None
    if "true_cfg_scale" in call and argument == "guidance_scale":
        negative = None  # only true_cfg_scale would make it count, and that stays 1
    prompt = given.pop("prompt", DEFAULT_PROMPT)
    strengths = {
        name: given.pop(in_file, _at_least_a_step(default_strength(runs.by_task, task), steps))
        for name, in_file, task in _STRENGTHS
    }
    makes_video = seams.makes_video(runs.encode)
    # Where the signature has none either, the pipeline takes its size from its models.
    width, height = (given.pop(side, _default(call, side)) for side in ("width", "height"))
    video = _video_fields(call, given) if makes_video else {}
    unknown = sorted(set(given) - set(call))
    if unknown:
        raise unusable(f"{GENERATION_CONFIG} has {unknown}, which the pipeline does not take")
    fields: dict[str, Any] = {
        "source": source,
        "source_revision": pipeline.source_revision,
        "pipeline_class": pipeline.pipeline_class.__name__,
        "created": created,
        "dtype": dtype,
        "default_quality": default_quality,
        "default_prompt": prompt,
        "default_num_inference_steps": steps,
        "max_num_inference_steps": max(MAX_STEPS, steps),
        "guidance_argument": argument,
        "default_guidance_scale": None if argument is None else scale,
        "default_negative_prompt": negative,
        **strengths,
        **video,
        "call_arguments": given,
    }
    probe = _probe(runs, fields, (width, height))
    step = probe.multiple()
    further = probe.further_tasks(step)
    return ModelLimits(
        **{**probe.fields, **probe.frames(), **further},
        default_width=probe.width,
        default_height=probe.height,
        size_multiple=step,
        max_width=2 * probe.width,
        max_height=2 * probe.height,
    )


def _at_least_a_step(strength: float | None, steps: int) -> float | None:
    """A pipeline's default, which is for many steps: of the few of a distilled model it may leave none."""
    return None if strength is None else max(strength, 1 / steps)


def _refusal(pipeline: PipelineFolder, pipe: DiffusionPipeline) -> str | None:
    """Why pipelines of this class are not served, or None; ``pipe`` is one, with or without weights."""
    call = inspect.signature(pipeline.pipeline_class.__call__).parameters
    missing = [name for name in ("prompt", "num_inference_steps", "height", "width") if name not in call]
    if seams.makes_video(pipe) and _frames_argument(call) is None:
        missing.append("num_frames")
    if missing:
        return f"it takes no {' and no '.join(missing)}"
    return None


def _default(call: Any, name: str) -> int | None:
    """A number that the pipeline's signature has for an argument."""
    default = call[name].default
    return int(default) if isinstance(default, int | float) else None


def _frames_argument(call: Any) -> str | None:
    """The call argument that a request's ``num_frames`` means."""
    return next((name for name in FRAMES_ARGUMENTS if name in call), None)


def _video_fields(call: Any, given: dict[str, Any]) -> dict[str, Any]:
    """How many frames, and how many a second; what says so is taken out of ``given``."""
    frames = _frames_argument(call)
    # Some models make other clips of other rates; for the others it is only what players are told.
    rate = next((name for name in FPS_ARGUMENTS if name in call), None)
    assert frames is not None
    default_rate = (_default(call, rate) if rate else None) or DEFAULT_FPS
    in_file = given.pop("num_frames", None)
    fps = given.pop("fps", None)
    return {
        "frames_argument": frames,
        "default_num_frames": given.pop(frames, in_file) or _default(call, frames),
        "fps_argument": rate,
        "default_fps": fps or (given.pop(rate, default_rate) if rate else default_rate),
    }


def _generation_config(folder: Path) -> dict[str, Any]:
    """A model's own serving defaults: call arguments of its pipeline, the prompt to warm up with, and ``fps``."""
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise unusable(f"{GENERATION_CONFIG} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise unusable(f"{GENERATION_CONFIG} is not a JSON object")
    for key, value in config.items():
        parts = value if isinstance(value, list) else [value]
        plain = all(part is None or isinstance(part, bool | int | float | str) for part in parts)
        if key in RESERVED or key.endswith("_embeds") or not plain:
            raise unusable(f"{GENERATION_CONFIG} has {show(key)}: {show(value)}, which a default cannot be")
    for key in ("width", "height", "num_inference_steps", *FPS_ARGUMENTS, *FRAMES_ARGUMENTS):
        value = config.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIDE:
            raise unusable(
                f"{GENERATION_CONFIG} has {key} {show(value)}; allowed: integers from 1 to {MAX_SIDE}"
            )
    return config


def guidance_argument(pipeline: PipelineFolder, call: Any) -> str | None:
    """The call argument that a request's ``guidance_scale`` means.

    Pipelines with both arguments (FLUX, Qwen-Image) read ``guidance_scale`` only when the transformer has a guidance
    embedding; without one, guidance is classifier-free and called ``true_cfg_scale``.
    """
    if "true_cfg_scale" in call:
        config = json.loads((pipeline.folder / "transformer" / "config.json").read_text())
        if not config.get("guidance_embeds", False):
            return "true_cfg_scale"
    return "guidance_scale" if "guidance_scale" in call else None


def _probe(runs: DryRuns, fields: dict[str, Any], size: tuple[int | None, int | None]) -> _Probe:
    """A probe of the first of the pipeline's own tasks that can be run: without an image, or else with one."""
    problem: Exception | None = None
    own = type(runs.encode)
    for task in [task for task, pipe in runs.by_task.items() if type(pipe) is own]:
        if needs_image(task):
            runs.take_images()
        try:
            return _Probe(runs, {**fields, "tasks": (task,), "max_images": int(needs_image(task))}, *size)
        except Exception as error:
            # What it says without an image is of no interest where it only takes one.
            problem = error if problem is None or needs_image(task) else problem
    assert problem is not None
    raise problem


class _Probe:
    """Finds out by dry runs which sizes, and which numbers of frames, a pipeline really makes.

    ``width`` and ``height`` are what comes out when these are asked for; None is the pipeline's own default.
    """

    def __init__(self, runs: DryRuns, fields: dict[str, Any], width: int | None, height: int | None) -> None:
        self._runs = runs
        self.fields = fields
        self._made = self._make(width, height, fields.get("default_num_frames"))
        self.width, self.height = self._made.width, self._made.height

    def multiple(self) -> int:
        """The smallest step by which both sides may grow and still come out as asked."""
        for step in SIZE_MULTIPLES:
            sides = (self.width + step, self.height + step)
            if (
                self.width % step == 0
                and self.height % step == 0
                and self._makes(*sides, self._made.num_frames)
            ):
                return step
        raise unusable(f"it makes no picture of {self.width}x{self.height} or a little more")

    def frames(self) -> dict[str, int]:
        """The limits of ``num_frames``: the smallest step by which it may grow and still come out as asked."""
        default = self._made.num_frames
        if default is None:
            return {}

        def comes_out(count: int) -> bool:
            return self._makes(self.width, self.height, count)

        for step in range(1, MAX_FRAMES_STEP + 1):
            # By two steps, too: some VAEs make a number now and then that is in no series.
            if comes_out(default + step) and comes_out(default + 2 * step):
                break
        else:
            raise unusable(f"it makes no clip of {default} frames or a few more")
        low = default % step or step
        while low < default and not comes_out(low):
            low += step
        return {
            "default_num_frames": default,
            "min_num_frames": low,
            "max_num_frames": default + default // step * step,
            "num_frames_step": step,
        }

    def further_tasks(self, step: int) -> dict[str, Any]:
        """The fields of the tasks that pictures can be had by: those that make the size that they are asked for.

        Both the default size and the next one: some pipelines always make one.
        """
        first = self.fields["tasks"][0]
        if "frames_argument" in self.fields:
            return {}
        if any(map(needs_image, self._runs.by_task)):
            self._runs.take_images()
        others = [task for task in self._runs.by_task if task != first]
        tasks = (first, *(task for task in others if self._makes_sizes(step, task)))
        images = int(any(map(needs_image, tasks)))
        if IMAGE_EDIT in tasks and self._makes(self.width, self.height, None, IMAGE_EDIT, images=2):
            images = MAX_IMAGES
        kept = {name: self.fields[name] if task in tasks else None for name, _, task in _STRENGTHS}
        return {"tasks": tasks, "max_images": images, **kept}

    def _makes_sizes(self, step: int, task: str) -> bool:
        return all(self._makes(self.width + more, self.height + more, None, task) for more in (0, step))

    def _makes(
        self,
        width: int,
        height: int,
        num_frames: int | None,
        task: str | None = None,
        *,
        images: int = 1,
    ) -> bool:
        try:
            made = self._make(width, height, num_frames, task, images=images)
        except Exception as error:  # its check_inputs refuses this size, or its shapes do not fit together
            logger.debug("%s of %dx%d: %s", task or "it", width, height, error)
            return False
        return made == Decoded(width, height, num_frames)

    def _make(
        self,
        width: int | None,
        height: int | None,
        num_frames: int | None,
        task: str | None = None,
        *,
        images: int = 1,
    ) -> Decoded:
        """What comes out when this is asked for; None is the pipeline's default, and the first task."""
        task = task or self.fields["tasks"][0]
        given: seams.Images = seams.blank_images(task, width or _SOME_SIDE, height or _SOME_SIDE)
        names = ("default_num_frames", "min_num_frames", "max_num_frames")
        frames = {**dict.fromkeys(names, num_frames or 1), "num_frames_step": 1}
        limits = ModelLimits(
            **{
                **self.fields,
                **(frames if "frames_argument" in self.fields else {}),
                "tasks": (task,),
                "max_images": len(given) and images,
            },
            default_width=width or 1,
            default_height=height or 1,
            size_multiple=1,
            max_width=width or 1,
            max_height=height or 1,
        )
        settings = resolve(
            limits,
            limits.default_prompt,
            None,
            {"seed": 0, "num_inference_steps": STEPS, "strength": 1.0 if limits.strength_of(task) else None},
            images=limits.max_images,
            has_mask=seams.MASK in given,
        )
        if images > 1:
            given = {**given, seams.IMAGE: seams.images_of(given) * images}
        arguments = seams.call_arguments(self._runs.by_task[task], limits, settings, given)
        if width is None or height is None:
            arguments = oddities.default_size(arguments)
        if limits.frames_argument is not None:
            arguments[limits.frames_argument] = num_frames
        return self._runs.decode(task, arguments)
