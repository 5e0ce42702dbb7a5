"""Record / replay: one unmodified diffusers pipeline, run in three processes.

- **encode** runs the pipeline's own ``__call__`` with real encoders and records what they return; the denoiser is a
  stand-in whose first forward ends the run.
- **denoise** runs ``__call__`` again with the same arguments; the recorded calls are replayed, the pipeline's own
  loop runs, and the VAE is a stand-in whose ``decode`` takes the final latents and ends the run.
- **vae_decode** decodes those latents and applies the pipeline's own post-processor.

Nothing here knows a pipeline family. Both runs draw from generators seeded alike, so the result is bit-identical to
the unsplit pipeline.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline

from diffusion_backend.conditioning import Call
from diffusion_backend.errors import DiffusionError, Status, invalid
from diffusion_backend.loading import Stage
from diffusion_backend.settings import ModelLimits, Settings
from diffusion_backend.standins import Method

# The pipeline methods whose results travel from encode to denoise.
RECORDED = ("encode_prompt", "encode_image")


class EncodingDone(BaseException):
    """The denoiser was called: all encoders have run. A BaseException, so that no pipeline code catches it."""


class DenoisingDone(BaseException):
    """``vae.decode`` was called: carries the final latents and the call's other arguments."""

    def __init__(self, latents: torch.Tensor, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.latents = latents
        self.arguments = arguments


@dataclass(frozen=True)
class Denoised:
    """What vae_decode needs: float32 latents as ``vae.decode`` takes them, [1, C, H, W], and its other arguments."""

    latents: torch.Tensor
    decode_arguments: dict[str, Any]


def end_encoding(_self: Any, *_args: Any, **_kwargs: Any) -> None:
    raise EncodingDone


def end_denoising(_self: Any, z: torch.Tensor, **arguments: Any) -> None:
    arguments.pop("return_dict", None)
    raise DenoisingDone(z, arguments)


def _must_not_run(_self: Any, *_args: Any, **_kwargs: Any) -> None:
    raise DiffusionError(
        "this pipeline calls a component of another stage directly, so it cannot be split",
        code="unsplittable",
    )


# What the stand-ins of each stage's components do when another stage runs them.
STAND_IN_METHODS: dict[Stage, dict[str, Method]] = {
    Stage.ENCODE: {"forward": _must_not_run},
    Stage.DENOISE: {"forward": end_encoding},
    Stage.VAE_DECODE: {"forward": _must_not_run, "encode": _must_not_run, "decode": end_denoising},
}


def call_arguments(pipe: DiffusionPipeline, limits: ModelLimits, settings: Settings) -> dict[str, Any]:
    """The keyword arguments of the pipeline's ``__call__`` for one request.

    Seeds go through a CPU generator, whatever the device, so that a seed means the same picture everywhere.
    """
    arguments: dict[str, Any] = {
        "prompt": settings.prompt,
        "height": settings.height,
        "width": settings.width,
        "num_inference_steps": settings.num_inference_steps,
        "generator": torch.Generator("cpu").manual_seed(settings.seed),
        "output_type": "pt",
        **limits.call_arguments,
    }
    if limits.takes_negative_prompt:
        arguments["negative_prompt"] = settings.negative_prompt
    if limits.guidance_argument is not None:
        arguments[limits.guidance_argument] = settings.guidance_scale
    accepted = inspect.signature(type(pipe).__call__).parameters
    unknown = [name for name in arguments if name not in accepted]
    if unknown:
        raise DiffusionError(
            f"{type(pipe).__name__} takes no {', '.join(unknown)}", code="unsupported_argument"
        )
    return arguments


def record(pipe: DiffusionPipeline, arguments: dict[str, Any]) -> list[Call]:
    """Run the pipeline up to its first denoiser call and return what its encoders returned, in call order.

    Raises:
        DiffusionError: INVALID_ARG with the pipeline's own words when its ``check_inputs`` refuses the arguments.
    """
    run = _private_copy(pipe)
    calls: list[Call] = []

    def recorder(name: str, method: Any) -> Any:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            calls.append(Call(name, result))
            return result

        return recorded

    for name in RECORDED:
        if hasattr(run, name):
            setattr(run, name, recorder(name, getattr(run, name)))
    _blame_the_client(run)
    try:
        with torch.no_grad():
            run(**arguments)
    except EncodingDone:
        return calls
    raise DiffusionError("the pipeline ended without calling its denoiser", code="unsplittable")


def replay(pipe: DiffusionPipeline, calls: list[Call], arguments: dict[str, Any], seed: int) -> Denoised:
    """Run the pipeline's denoising loop on recorded encoder results.

    Raises:
        DiffusionError: the calls do not fit the pipeline, or the result is not finite.
    """
    run = _private_copy(pipe)
    waiting: dict[str, deque[Any]] = {name: deque() for name in RECORDED}
    for call in calls:
        if call.name not in waiting:
            raise invalid(
                "conditioning", f"'conditioning' holds a call of {call.name!r}, which is not replayed"
            )
        waiting[call.name].append(_to_device(call.result, run.device))

    def replayer(name: str) -> Any:
        def replayed(*_args: Any, **_kwargs: Any) -> Any:
            if not waiting[name]:
                raise invalid("conditioning", f"'conditioning' lacks a result of {name}")
            return waiting[name].popleft()

        return replayed

    for name in RECORDED:
        if hasattr(run, name):
            setattr(run, name, replayer(name))
    # Some pipelines call scheduler.step without the generator: the global one is seeded too.
    torch.manual_seed(seed)
    try:
        with torch.no_grad():
            run(**arguments)
    except DenoisingDone as done:
        latents = done.latents.float()
        if not torch.isfinite(latents).all():
            raise DiffusionError(
                "the model computed latents that are not finite; another seed, prompt or guidance_scale may work",
                code="non_finite_latents",
            ) from None
        return Denoised(latents, done.arguments)
    raise DiffusionError("the pipeline ended without decoding", code="unsplittable")


def decode(pipe: DiffusionPipeline, latents: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    """Pictures from latents [B, C, H, W]: uint8 [B, H, W, 3] on the CPU, by the untouched VAE and post-processor.

    Raises:
        DiffusionError: the pictures are not finite.
    """
    with torch.no_grad():
        z = latents.to(pipe.device, pipe.vae.dtype)
        image = pipe.vae.decode(z, return_dict=False, **arguments)[0]
        if not torch.isfinite(image).all():
            raise DiffusionError("the VAE computed a picture that is not finite", code="non_finite_image")
        image = pipe.image_processor.postprocess(image, output_type="pt")
        # As VaeImageProcessor.numpy_to_pil rounds.
        pictures: torch.Tensor = (
            (image.float() * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()
        )
        return pictures


def _private_copy(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """Pipelines keep the state of a call on self, and schedulers theirs: each run has its own of both."""
    run = copy.copy(pipe)
    run.scheduler = copy.deepcopy(pipe.scheduler)
    return run


def _blame_the_client(run: DiffusionPipeline) -> None:
    """``check_inputs`` raises for what the caller sent; anything else that raises is our fault."""
    if not hasattr(run, "check_inputs"):
        return
    check_inputs = run.check_inputs

    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return check_inputs(*args, **kwargs)
        except (ValueError, TypeError) as error:
            raise DiffusionError(
                f"the pipeline refuses the request: {error}", code="invalid_value", status=Status.INVALID_ARG
            ) from None

    run.check_inputs = checked


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(_to_device(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _to_device(item, device) for key, item in value.items()}
    return value
