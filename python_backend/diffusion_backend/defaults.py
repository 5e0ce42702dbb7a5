"""A model's limits and defaults: from the pipeline's signature, its generation_config.json, and dry runs."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline

from diffusion_backend import oddities, seams
from diffusion_backend.dry_runs import DryRuns
from diffusion_backend.errors import show, unusable
from diffusion_backend.loading import PipelineFolder
from diffusion_backend.quality import Tier
from diffusion_backend.settings import ModelLimits, resolve

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
    "latents",
    "sigmas",
    "timesteps",
)
SIZE_MULTIPLES = (2, 4, 8, 16, 32, 64, 128)


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
    width, height = given.pop("width", None), given.pop("height", None)
    unknown = sorted(set(given) - set(call))
    if unknown:
        raise unusable(f"{GENERATION_CONFIG} has {unknown}, which the pipeline does not take")
    fields: dict[str, Any] = {
        "source": source,
        "source_revision": pipeline.source_revision,
        "pipeline_class": pipeline.pipeline_class.__name__,
        "task": "text-to-image",
        "created": created,
        "dtype": dtype,
        "default_quality": default_quality,
        "default_prompt": prompt,
        "default_num_inference_steps": steps,
        "max_num_inference_steps": max(MAX_STEPS, steps),
        "guidance_argument": argument,
        "default_guidance_scale": None if argument is None else scale,
        "default_negative_prompt": negative,
        "call_arguments": given,
    }
    sizes = _SizeProbe(runs, fields)
    try:
        width, height = sizes.picture(width, height)
    except Exception as error:
        if "image" in call:  # some pipelines do without one; this one does not
            raise unusable(f"it takes an image, which is not served yet ({error})") from error
        raise
    return ModelLimits(
        **fields,
        default_width=width,
        default_height=height,
        size_multiple=sizes.multiple(width, height),
        max_width=2 * width,
        max_height=2 * height,
    )


def _refusal(pipeline: PipelineFolder, pipe: DiffusionPipeline) -> str | None:
    """Why pipelines of this class are not served, or None; ``pipe`` is one, with or without weights."""
    call = inspect.signature(pipeline.pipeline_class.__call__).parameters
    if seams.makes_video(pipe):
        return "it makes video, which is not served yet"
    if "image" in call and call["image"].default is inspect.Parameter.empty:
        return "it takes an image, which is not served yet"
    missing = [name for name in ("prompt", "num_inference_steps", "height", "width") if name not in call]
    if missing:
        return f"it takes no {' and no '.join(missing)}"
    return None


def _generation_config(folder: Path) -> dict[str, Any]:
    """A model's own serving defaults: call arguments of its pipeline, and the prompt to warm up with."""
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
    for key in ("width", "height", "num_inference_steps"):
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


class _SizeProbe:
    """Finds out by dry runs which picture sizes a pipeline really makes."""

    def __init__(self, runs: DryRuns, fields: dict[str, Any]) -> None:
        self._runs = runs
        self._fields = fields

    def picture(self, width: int | None, height: int | None) -> tuple[int, int]:
        """The (width, height) that comes out when ``width`` and ``height`` are asked for; None is the default."""
        limits = ModelLimits(
            **self._fields,
            default_width=width or 1,
            default_height=height or 1,
            size_multiple=1,
            max_width=width or 1,
            max_height=height or 1,
        )
        settings = resolve(limits, limits.default_prompt, None, {"seed": 0, "num_inference_steps": 1})
        arguments = seams.call_arguments(self._runs.encode, limits, settings)
        if width is None or height is None:
            arguments = oddities.default_size(arguments)
        return self._runs.picture_size(arguments)

    def multiple(self, width: int, height: int) -> int:
        """The smallest step by which both sides may grow and still come out as asked."""
        for step in SIZE_MULTIPLES:
            if width % step == 0 and height % step == 0 and self._makes(width + step, height + step):
                return step
        raise unusable(f"it makes no picture of {width}x{height} or a little more")

    def _makes(self, width: int, height: int) -> bool:
        try:
            return self.picture(width, height) == (width, height)
        except Exception:  # its check_inputs refuses this size, or its shapes do not fit together
            return False
