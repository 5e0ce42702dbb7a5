"""The warmup of each stage: the samples its ``config.pbtxt`` declares, with the data they are made of.

Triton runs every sample before a model is ready; one that fails makes the server exit. A sample of N requests is N
requests in one ``execute``. Sizes and batches that the operator lists are warmed besides the model's default.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from PIL import Image

from diffusion_backend import conditioning, seams
from diffusion_backend.dry_runs import DryRuns
from diffusion_backend.settings import ModelLimits, Settings, resolve
from diffusion_backend.stages.decode_settings import DecodeSettings

STEPS = 2
QUALITIES = ("lossless", "high")  # one of each tier


@dataclass(frozen=True)
class WarmupInput:
    """One input of a sample; ``data`` is what its file holds, None means zeros."""

    data_type: str
    dims: tuple[int, ...]
    data: bytes | None


@dataclass(frozen=True)
class Sample:
    """One entry of ``model_warmup``. Its inputs' files are named ``<sample>.<input>``."""

    name: str
    requests: int
    inputs: dict[str, WarmupInput]


@dataclass(frozen=True)
class Warmup:
    """The samples of the three stages, and the shape of the latents of the first (without a batch axis)."""

    latents_shape: tuple[int, ...]
    encode: list[Sample] = field(default_factory=list)
    denoise: list[Sample] = field(default_factory=list)
    vae_decode: list[Sample] = field(default_factory=list)


def build_warmup(
    limits: ModelLimits, runs: DryRuns, sizes: Sequence[tuple[int, int]], batches: Sequence[int]
) -> Warmup:
    """Samples for the default size, for each of ``sizes`` (width, height), and for each of ``batches`` requests.

    The tensors come from dry runs: right shapes, zero values.
    """
    encode: list[Sample] = []
    denoise: list[Sample] = []
    vae_decode: list[Sample] = []
    default = (limits.default_width, limits.default_height)
    latents_shape: tuple[int, ...] = ()
    for width, height in dict.fromkeys((default, *sizes)):
        for task in limits.tasks:
            settings = _settings(limits, task, width, height)
            images = seams.blank_images(task, width, height)
            arguments = seams.call_arguments(runs.by_task[task], limits, settings, images)
            calls = runs.record(task, arguments)
            for count in dict.fromkeys((1, *batches)):
                name = _name(limits, task, f"{width}x{height}", count)
                denoise.append(_denoise_sample(name, calls, settings, images, count))
        settings = _settings(limits, limits.task, width, height)
        images = seams.blank_images(limits.task, width, height)
        denoised = runs.denoise(limits.task, seams.call_arguments(runs.encode, limits, settings, images))
        shape = tuple(denoised.latents.shape[1:])
        latents_shape = latents_shape or shape
        for count in dict.fromkeys((1, *batches)):
            name = _name(limits, limits.task, f"{width}x{height}", count)
            vae_decode += [
                _decode_sample(name, shape, settings, quality, denoised, count) for quality in QUALITIES
            ]
    for task in limits.tasks:
        encode += [_encode_sample(limits, task, count) for count in dict.fromkeys((1, *batches))]
    return Warmup(latents_shape, encode, denoise, vae_decode)


def _name(limits: ModelLimits, task: str, what: str, count: int) -> str:
    """Of a sample; those of the pipeline's own task do not name it."""
    further = [task] if task != limits.task else []
    return "_".join([what, *further, *([f"batch_{count}"] if count > 1 else [])])


def _settings(limits: ModelLimits, task: str, width: int, height: int) -> Settings:
    parameters: dict[str, object] = {
        "seed": 0,
        "num_inference_steps": STEPS,
        "width": width,
        "height": height,
        "strength": 1.0 if limits.strength_of(task) else None,
    }
    if limits.default_num_frames and limits.min_num_frames and limits.num_frames_step:
        # The first latent of a clip is decoded differently: a second one warms the rest.
        few = limits.min_num_frames + limits.num_frames_step
        parameters["num_frames"] = min(few, limits.default_num_frames)
    images = seams.blank_images(task, width, height)
    return resolve(
        limits,
        limits.default_prompt,
        None,
        parameters,
        images=len(seams.images_of(images)),
        has_mask=seams.MASK in images,
    )


def _encode_sample(limits: ModelLimits, task: str, count: int) -> Sample:
    inputs = {"prompt": _text(limits.default_prompt)}
    if limits.default_negative_prompt is not None:
        inputs["negative_prompt"] = _text(limits.default_negative_prompt)
    for name, image in _files(task, limits.default_width, limits.default_height).items():
        file = io.BytesIO()
        image.save(file, "PNG")
        inputs[name] = _element(file.getvalue())
    return Sample(_name(limits, task, "default", count), count, inputs)


def _files(task: str, width: int, height: int) -> dict[str, Image.Image]:
    """The images of a request for ``task``, as its client sends them."""
    blank = seams.blank_images(task, width, height)
    files = dict(zip(("image",), seams.images_of(blank), strict=False))
    return {**files, "mask": Image.new("RGBA", (width, height))} if seams.MASK in blank else files


def _denoise_sample(
    name: str,
    calls: list[conditioning.Call],
    settings: Settings,
    images: seams.Images,
    count: int,
) -> Sample:
    # denoise has no batch axis, so its batch is one request that asks for ``count`` rows.
    blob = conditioning.pack(
        conditioning.Conditioning(
            calls, settings.model_dump(), 0.0, rows=count, dtype="float32", images=images
        )
    )
    return Sample(name, 1, {"conditioning": WarmupInput("TYPE_UINT8", (len(blob),), blob)})


def _decode_sample(
    name: str,
    shape: tuple[int, ...],
    settings: Settings,
    quality: str,
    denoised: seams.Denoised,
    count: int,
) -> Sample:
    asked = settings.model_copy(update={"quality": quality})
    decode_settings = DecodeSettings.of(asked, decode_arguments=denoised.decode_arguments, timings={})
    inputs = {
        "latents": WarmupInput("TYPE_FP32", shape, None),
        "settings": _text(decode_settings.model_dump_json()),
    }
    return Sample(f"{name}_{quality}", count, inputs)


def _text(text: str) -> WarmupInput:
    return _element(text.encode())


def _element(data: bytes) -> WarmupInput:
    """One BYTES element as Triton's input_data_file wants it: little-endian length, then the bytes."""
    return WarmupInput("TYPE_STRING", (1,), struct.pack("<I", len(data)) + data)
