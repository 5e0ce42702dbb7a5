"""One request by way of the three stages, and by plain diffusers."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusion_backend import conditioning, defaults, loading, oddities, seams
from diffusion_backend.loading import Stage
from diffusion_backend.settings import ModelLimits, Settings, resolve
from diffusion_backend.stages.decode_settings import DecodeSettings
from diffusion_backend.task_pipelines import pipelines_by_task
from diffusion_backend.tasks import IMAGE_TO_IMAGE, INPAINTING
from PIL import Image

from tests.families.family import NEGATIVE_PROMPT, PROMPT, Family

CPU = torch.device("cpu")
SEED = 7
STRENGTH = 0.6


def limits_of(family: Family, folder: Path) -> ModelLimits:
    """What the family's model would accept, for families that ``add`` does not serve yet, too."""
    pipeline = loading.open_pipeline(str(folder))
    call = inspect.signature(pipeline.pipeline_class.__call__).parameters
    given = dict(family.call)
    guidance = defaults.guidance_argument(pipeline, call)
    scale = given.pop("guidance_scale", call[guidance].default if guidance else None)
    video: dict[str, Any] = {}
    if family.task.endswith("video"):
        (frames,) = {"num_frames", "frames"} & set(given)
        count = given.pop(frames)
        video = {"frames_argument": frames, "num_frames_step": 1, "default_fps": 16}
        video |= dict.fromkeys(("default_num_frames", "min_num_frames", "max_num_frames"), count)
    return ModelLimits(
        source=str(folder),
        pipeline_class=family.pipeline,
        tasks=(family.task,),
        max_images=family.images,
        default_strength=STRENGTH if family.task == IMAGE_TO_IMAGE else None,
        default_inpainting_strength=STRENGTH if family.task == INPAINTING else None,
        created=0,
        default_prompt=PROMPT,
        default_width=given.pop("width", 32),
        default_height=given.pop("height", 32),
        size_multiple=1,
        max_width=1024,
        max_height=1024,
        default_num_inference_steps=given.pop("num_inference_steps"),
        max_num_inference_steps=10,
        guidance_argument=guidance,
        default_guidance_scale=scale,
        default_negative_prompt=NEGATIVE_PROMPT if "negative_prompt" in call else None,
        call_arguments=given,
        **video,
    )


@dataclass(frozen=True)
class Made:
    """A picture or clip: floats from 0 to 1 as the post-processor makes them, and the pixels they are rounded to."""

    floats: torch.Tensor
    pixels: np.ndarray[Any, Any]
    latents_shape: tuple[int, ...]
    recorded: list[str]
    decode_arguments: dict[str, Any]


def settings_of(limits: ModelLimits) -> Settings:
    return resolve(
        limits, PROMPT, None, {"seed": SEED}, images=limits.max_images, has_mask=limits.task == INPAINTING
    )


def arguments_of(
    pipe: DiffusionPipeline, family: Family, limits: ModelLimits, settings: Settings
) -> dict[str, Any]:
    return seams.call_arguments(pipe, limits, settings, images_of(family, settings.seed))


def images_of(family: Family, seed: int = SEED) -> seams.Images:
    """Noise as the encode stage makes images: the first has the size of the result, a second one has its own."""
    if not family.takes_image:
        return {}
    width, height = family.size
    numbers = range(family.images)
    first, *others = (_noise([seed, number], width, height + 16 * number) for number in numbers)
    images: dict[str, Any] = {seams.IMAGE: [first, *others] if others else first}
    if family.task == INPAINTING:
        mask = Image.new("RGB", family.size)
        mask.paste("white", (width // 4, 0, width, height // 2))
        images[seams.MASK] = mask
    return images


def _noise(seed: list[int], width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def split(family: Family, folder: Path, dtype: torch.dtype = torch.float32) -> Made:
    """Conditioning, latents and decode settings cross as they do in Triton: as bytes, float32 and JSON."""
    pipeline = loading.open_pipeline(str(folder))
    limits = limits_of(family, folder)
    settings = settings_of(limits)
    encoder, denoiser, decoder = (
        loading.load_stage(
            pipeline,
            stage,
            device=CPU,
            dtype=dtype,
            methods=seams.STAND_IN_METHODS,
            takes_image=family.takes_image,
        )[0]
        for stage in Stage
    )
    encoder, denoiser = (pipelines_by_task(pipe)[family.task] for pipe in (encoder, denoiser))
    calls = seams.record(encoder, arguments_of(encoder, family, limits, settings))
    images = images_of(family)
    blob = conditioning.pack(conditioning.Conditioning(calls, settings.model_dump(), 0.0, images=images))
    arrived = conditioning.unpack(blob)
    denoised, again = (
        seams.replay(
            denoiser,
            arrived.calls,
            seams.call_arguments(denoiser, limits, settings, arrived.images),
            settings.seed,
        )
        for _ in range(2)
    )
    assert torch.equal(denoised.latents, again.latents), "a run left state behind"
    wire = np.ascontiguousarray(denoised.latents[0].numpy())
    assert wire.dtype == np.float32
    sent = DecodeSettings(
        **settings.model_dump(include={"width", "height", "task", "quality", "seed", "guidance_scale"}),
        num_inference_steps=settings.num_inference_steps,
        step=settings.num_inference_steps,
        is_final=True,
        num_frames=settings.num_frames,
        fps=settings.fps,
        decode_arguments=denoised.decode_arguments,
        timings={},
    )
    decode_arguments = DecodeSettings.model_validate_json(sent.model_dump_json()).decode_arguments
    latents = torch.from_numpy(wire.copy())[None]
    return Made(
        seams.decode_floats(decoder, latents, decode_arguments),
        seams.decode(decoder, latents, decode_arguments)[0].numpy(),
        tuple(denoised.latents.shape),
        [call.name for call in calls],
        decode_arguments,
    )


def plain_pipeline(family: Family, folder: Path, dtype: torch.dtype = torch.float32) -> DiffusionPipeline:
    """The class of diffusers that does the family's task, with everything that is on disk."""
    pipeline = loading.open_pipeline(str(folder))
    pipe = DiffusionPipeline.from_pretrained(
        folder,
        dtype=dtype,
        **dict.fromkeys(pipeline.processors),
        **oddities.init_arguments(pipeline.pipeline_class),
    )
    pipe.register_modules(**loading.load_processors(pipeline))
    if family.relative is not None:
        pipe = getattr(diffusers, family.relative)(**pipe.components, **family.init)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def unsplit(
    family: Family, folder: Path, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    """Plain diffusers with the same arguments: its tensor, and the pixels that its own conversion to PIL makes."""
    limits = limits_of(family, folder)
    settings = settings_of(limits)
    pipe = plain_pipeline(family, folder, dtype)
    torch.manual_seed(settings.seed)
    floats: torch.Tensor = pipe(**arguments_of(pipe, family, limits, settings))[0]
    array = floats.float().movedim(-3, -1).numpy()
    frames = array[0] if array.ndim == 5 else array
    pictures = [np.asarray(picture) for picture in _processor(pipe).numpy_to_pil(frames)]
    return floats, np.stack(pictures) if array.ndim == 5 else pictures[0]


def _processor(pipe: DiffusionPipeline) -> Any:
    return pipe.video_processor if hasattr(pipe, "video_processor") else pipe.image_processor
