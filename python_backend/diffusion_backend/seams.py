"""Record / replay: one unmodified diffusers pipeline, run in three processes.

- **encode** runs the pipeline's own ``__call__`` with real encoders and records what they return; the denoiser is a
  stand-in whose first forward ends the run.
- **denoise** runs ``__call__`` again with the same arguments; the recorded calls are replayed, the pipeline's own
  loop runs, and the VAE is a stand-in whose ``decode`` takes the final latents and ends the run.
- **vae_decode** decodes those latents and applies the pipeline's own post-processor.

Nothing here knows a pipeline family; ``oddities`` holds what cannot be repeated as it stands. Both runs draw from
generators seeded alike, so the result is bit-identical to the unsplit pipeline.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers import ConfigMixin, DiffusionPipeline
from PIL import Image, ImageOps
from torch import nn

from diffusion_backend import loading, oddities, values
from diffusion_backend.conditioning import Call
from diffusion_backend.errors import DiffusionError, Status, invalid
from diffusion_backend.loading import Stage
from diffusion_backend.rows import Denoiser
from diffusion_backend.settings import ModelLimits, Settings
from diffusion_backend.standins import NO_ADAPTERS, Method
from diffusion_backend.tasks import IMAGE_EDIT, INPAINTING, needs_image

Prepare = Callable[[DiffusionPipeline], None]
# A request's images as arguments of the pipeline's call: one, or of an edit a list, and perhaps a mask.
IMAGE, MASK = "image", "mask_image"
# Among the arguments for ``vae.decode``: the latents lay so, and convolutions round by it.
CHANNELS_LAST = "channels_last"
Images = Mapping[str, Image.Image | list[Image.Image]]


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
    """What vae_decode needs: float32 latents as ``vae.decode`` takes them, [1, C, ...], and its other arguments.

    The arguments are JSON, as ``values.to_json`` writes them: they go to the next stage as text.
    """

    latents: torch.Tensor
    decode_arguments: dict[str, Any]


def end_encoding(_self: Any, *_args: Any, **_kwargs: Any) -> None:
    raise EncodingDone


def end_denoising(vae: Any, *args: Any, **kwargs: Any) -> None:
    # A stand-in's class is derived from the real one, whose signature names the arguments.
    real: Any = type(vae).__mro__[1]
    _, (_, latents), *others = inspect.signature(real.decode).bind(vae, *args, **kwargs).arguments.items()
    raise DenoisingDone(latents, {name: value for name, value in others if name != "return_dict"})


def _must_not_run(component: Any, *_args: Any, **_kwargs: Any) -> None:
    raise DiffusionError(
        f"it uses its {type(component).__name__} outside the stage that holds it, so it cannot be split",
        code="unsplittable",
    )


# What the stand-ins of each stage's components do when another stage runs them.
STAND_IN_METHODS: dict[Stage, dict[str, Method]] = {
    Stage.ENCODE: {"forward": _must_not_run, **NO_ADAPTERS},
    Stage.DENOISE: {"forward": end_encoding, **NO_ADAPTERS},
    Stage.VAE_DECODE: {"forward": _must_not_run, "encode": _must_not_run, "decode": end_denoising},
}


def call_arguments(
    pipe: DiffusionPipeline,
    limits: ModelLimits,
    settings: Settings,
    images: Images | None = None,
) -> dict[str, Any]:
    """The keyword arguments of the pipeline's ``__call__`` for one request; ``images`` are some of them.

    A pipeline that takes no size takes that of the image, which has the request's. Seeds go through a CPU generator,
    whatever the device, so that a seed means the same picture everywhere.
    """
    arguments: dict[str, Any] = {
        "prompt": settings.prompt,
        "height": settings.height,
        "width": settings.width,
        "num_inference_steps": settings.num_inference_steps,
        "generator": torch.Generator("cpu").manual_seed(settings.seed),
        "output_type": "pt",
        **oddities.call_arguments(type(pipe), settings.width, settings.height),
        **limits.call_arguments,
        **{name: image for name, image in (images or {}).items() if _is_given(name, settings)},
    }
    if limits.takes_negative_prompt:
        arguments["negative_prompt"] = settings.negative_prompt
    if limits.guidance_argument is not None:
        arguments[limits.guidance_argument] = settings.guidance_scale
    if limits.frames_argument is not None:
        arguments[limits.frames_argument] = settings.num_frames
    if limits.fps_argument is not None:
        arguments[limits.fps_argument] = settings.fps
    if settings.strength is not None:
        arguments["strength"] = settings.strength
    accepted = inspect.signature(type(pipe).__call__).parameters
    if needs_image(settings.task):
        sides = [side for side in ("height", "width") if side not in accepted]
        arguments = {name: value for name, value in arguments.items() if name not in sides}
    unknown = [name for name in arguments if name not in accepted]
    if unknown:
        raise DiffusionError(
            f"{type(pipe).__name__} takes no {', '.join(unknown)}", code="unsupported_argument"
        )
    return arguments


def _is_given(image: str, settings: Settings) -> bool:
    """Whether the pipeline is given this image: no other than inpainting takes a mask."""
    return image != MASK or settings.task == INPAINTING


def blank_images(task: str, width: int, height: int) -> Images:
    """The images of a request for ``task`` that is only to have the right shapes."""
    if not needs_image(task):
        return {}
    images = {IMAGE: Image.new("RGB", (width, height), "grey")}
    return {**images, MASK: Image.new("RGB", (width, height), "white")} if task == INPAINTING else images


def check_images(limits: ModelLimits, settings: Settings, images: Images) -> None:
    """The images of a request as encode sends them on: those that its task takes, of the request's size.

    Further references of an edit may have any size within the model's.

    Raises:
        DiffusionError: INVALID_ARG, naming ``conditioning``.
    """
    _check_sizes(limits, settings, images)
    _check_references(limits, settings.task, images_of(images)[1:])


def _check_sizes(limits: ModelLimits, settings: Settings, images: Images) -> None:
    """The images that the task takes, and a mask where the model takes one, all of the request's size."""
    needed = set(blank_images(settings.task, 1, 1))
    possible = {*needed, MASK} if needed and limits.takes_mask else needed
    size = (settings.width, settings.height)
    sizes = {name: getattr(image, "size", None) for name, image in {**images, **_first(images)}.items()}
    if not needed <= set(sizes) <= possible or any(each != size for each in sizes.values()):
        allowed = dict.fromkeys(sorted(needed), size)
        raise invalid("conditioning", f"'conditioning' has images of {sizes}; allowed: {allowed}")


def _check_references(limits: ModelLimits, task: str, references: list[Image.Image]) -> None:
    """As many as an edit may have beside its first image, none of them larger than the model's pictures."""
    most = limits.max_images - 1 if task == IMAGE_EDIT else 0
    too_large = [
        image.size
        for image in references
        if image.width > limits.max_width or image.height > limits.max_height
    ]
    if len(references) > most or too_large:
        raise invalid(
            "conditioning",
            f"'conditioning' has {len(references)} further images, {too_large or 'none'} of them too large; "
            f"allowed: {most}, at most {limits.max_width}x{limits.max_height}",
        )


def images_of(images: Images) -> list[Image.Image]:
    """Those that are no mask, in order."""
    given = images.get(IMAGE, [])
    return given if isinstance(given, list) else [given]


def _first(images: Images) -> dict[str, Image.Image]:
    return dict(zip((IMAGE,), images_of(images), strict=False))


def overlay_of(images: Images) -> np.ndarray[Any, Any] | None:
    """What stays of the first image where a mask says so: uint8 [H, W, 4], its colours and 255, else 0; None: nothing.

    It is laid over the result, whose size it has.
    """
    mask = images.get(MASK)
    if not isinstance(mask, Image.Image):
        return None
    kept = ImageOps.invert(mask.convert("L"))
    image = images_of(images)[0].copy()
    image.putalpha(kept)
    return np.asarray(image)


def record(pipe: DiffusionPipeline, arguments: dict[str, Any]) -> list[Call]:
    """Run the pipeline up to its first denoiser call and return what its encoders returned, in call order.

    Raises:
        DiffusionError: INVALID_ARG with the pipeline's own words when its ``check_inputs`` refuses the arguments, or
            what it prepares images with refuses those.
    """
    run = _private_copy(pipe)
    calls: list[Call] = []
    inside = False  # a recorded call: what it calls in turn is not replayed

    def recorder(name: str, method: Method) -> Method:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return method(*args, **kwargs)
            inside, before = True, _random_state(arguments)
            try:
                result = method(*args, **kwargs)
            finally:
                inside = False
            if _random_state(arguments) != before:
                raise DiffusionError(
                    f"its {name} draws random numbers, which a replay would not: it cannot be split",
                    code="unsplittable",
                )
            calls.append(Call(name, result))
            return result

        return recorded

    _replace_encoding_methods(run, recorder)
    _blame_the_client(run)
    if IMAGE in arguments:
        _blame_the_image(run)
    try:
        with torch.no_grad():
            run(**arguments)
    except EncodingDone:
        return calls
    except DenoisingDone:
        raise DiffusionError(
            "it decodes before it denoises, so it cannot be split", code="unsplittable"
        ) from None
    raise DiffusionError("it ended without calling its denoiser, so it cannot be split", code="unsplittable")


def replay(
    pipe: DiffusionPipeline,
    calls: list[Call],
    arguments: dict[str, Any],
    seed: int,
    recorded_dtype: torch.dtype | None = None,
    denoiser: Denoiser | None = None,
    prepare: Prepare | None = None,
) -> Denoised:
    """Run the pipeline's denoising loop on recorded encoder results.

    ``denoiser`` is called in the place of the pipeline's own denoisers. ``prepare`` gets the private copy of the
    pipeline that is going to run.

    ``recorded_dtype`` is what the encoders computed in, if not in their own dtype: tensors of it are turned to the
    denoiser's (encoders on a CPU before a denoiser on a GPU; warmup files).

    Raises:
        DiffusionError: the calls do not fit the pipeline, or the result is not finite.
    """
    run = _private_copy(pipe)
    waiting: dict[str, deque[Any]] = {}

    def replayer(name: str, _method: Method) -> Method:
        waiting[name] = deque()

        def replayed(*_args: Any, **_kwargs: Any) -> Any:
            if not waiting[name]:
                raise invalid("conditioning", f"'conditioning' lacks a result of {name}")
            return waiting[name].popleft()

        return replayed

    _replace_encoding_methods(run, replayer)
    if denoiser is not None:
        _replace_denoisers(run, denoiser)
    if prepare is not None:
        prepare(run)
    device, compute_dtype = run.device, loading.denoiser_dtype(pipe)

    def arrive(tensor: torch.Tensor) -> torch.Tensor:
        # A copy: pipelines may write into it, and ``calls`` may be replayed again.
        dtype = compute_dtype if tensor.dtype == recorded_dtype else tensor.dtype
        return tensor.to(device, dtype, copy=True)

    for call in calls:
        if call.name not in waiting:
            raise invalid(
                "conditioning", f"'conditioning' holds a call of {call.name!r}, which is not replayed"
            )
        waiting[call.name].append(values.map_tensors(call.result, arrive))
    # Some pipelines call scheduler.step without the generator: the global one is seeded too.
    torch.manual_seed(seed)
    dtype = pipe.vae.dtype
    try:
        with torch.no_grad():
            run(**arguments)
    except DenoisingDone as done:
        if any(waiting.values()):
            raise invalid(
                "conditioning", "'conditioning' holds more results than the pipeline asked for"
            ) from None
        latents = done.latents.float()
        if not torch.isfinite(latents).all():
            raise DiffusionError(
                "the model computed latents that are not finite; another seed, prompt or guidance_scale may work",
                code="non_finite_latents",
            ) from None
        layout = {CHANNELS_LAST: True} if values.channels_last(latents) else {}
        return Denoised(
            latents, {**{name: values.to_json(value) for name, value in done.arguments.items()}, **layout}
        )
    finally:
        # Some pipelines turn a float16 VAE to float32 before they decode, and back afterwards, which they don't reach.
        if pipe.vae.dtype != dtype:
            pipe.vae.to(dtype)
    raise DiffusionError("it ended without decoding, so it cannot be split", code="unsplittable")


def decode(
    pipe: DiffusionPipeline, latents: torch.Tensor, decode_arguments: dict[str, Any], *, exact: bool = True
) -> torch.Tensor:
    """Pictures from latents [B, C, H, W], or a clip from latents [1, C, F, H, W]: uint8 [B, (F,) H, W, 3] on the CPU.

    ``exact``: rounded as diffusers does it in the VAE's dtype; otherwise, on a GPU, by one kernel in float32.

    Raises:
        DiffusionError: the pictures are not finite, or the arguments are none of ``replay``'s.
    """
    return to_pictures(pipe, run_vae(pipe, latents, decode_arguments), exact=exact)


def to_pictures(pipe: DiffusionPipeline, decoded: torch.Tensor, *, exact: bool = True) -> torch.Tensor:
    """The second half of ``decode``: of what ``run_vae`` returns, or of some frames of it.

    Frames are rounded where they were decoded: those of a slice of a clip take a slice's memory.
    """
    if not exact and decoded.device.type == "cuda" and _is_plain(pipe):
        from diffusion_kernels.to_uint8 import to_uint8

        if makes_video(pipe):
            frames = decoded.movedim(2, 1)
            levels = to_uint8(frames.flatten(0, 1).contiguous())
            return levels.reshape(*frames.shape[:2], *levels.shape[1:]).cpu()
        picture = oddities.picture(decoded)
        # A tile's part, or the lossless decoder's.
        is_plain = picture.is_contiguous(memory_format=torch.channels_last)
        return to_uint8(picture if is_plain else picture.contiguous()).cpu()
    # As VaeImageProcessor.numpy_to_pil rounds.
    pixels = (_to_floats(pipe, decoded).float() * 255).round().to(torch.uint8)
    return pixels.movedim(-3, -1).contiguous().cpu()


def decode_floats(
    pipe: DiffusionPipeline, latents: torch.Tensor, decode_arguments: dict[str, Any]
) -> torch.Tensor:
    """``decode`` before it rounds: values from 0 to 1, [B, (F,) 3, H, W]."""
    return _to_floats(pipe, run_vae(pipe, latents, decode_arguments))


def _to_floats(pipe: DiffusionPipeline, decoded: torch.Tensor) -> torch.Tensor:
    if makes_video(pipe):
        clip: torch.Tensor = pipe.video_processor.postprocess_video(decoded, output_type="pt")
        return clip
    image: torch.Tensor = pipe.image_processor.postprocess(oddities.picture(decoded), output_type="pt")
    return image


def _is_plain(pipe: DiffusionPipeline) -> bool:
    """Whether all that becomes of a decoded picture is that its values from -1 to 1 are turned to levels."""
    processor = pipe.video_processor if makes_video(pipe) else pipe.image_processor
    return bool(processor.config.do_normalize)


def run_vae(pipe: DiffusionPipeline, latents: torch.Tensor, decode_arguments: dict[str, Any]) -> torch.Tensor:
    """What ``vae.decode`` makes of latents: values from about -1 to 1, [B, 3, (F,) H, W], on the device.

    A clip is decoded at once: the VAE's layers look back at earlier frames.

    Raises:
        DiffusionError: they are not finite, or the arguments are none of ``replay``'s.
    """
    z = latents.to(pipe.device, pipe.vae.dtype)
    if decode_arguments.get(CHANNELS_LAST) and z.ndim == 4:
        z = z.contiguous(memory_format=torch.channels_last)
    taken = set(list(inspect.signature(pipe.vae.decode).parameters)[1:]) - {"return_dict"}
    if unknown := set(decode_arguments) - taken - {CHANNELS_LAST}:
        raise invalid(
            "settings", f"'settings' has decode_arguments that the VAE does not take: {sorted(unknown)}"
        )
    arguments = {
        name: values.map_tensors(value, lambda tensor: tensor.to(z.device))
        for name, value in read_decode_arguments(decode_arguments).items()
    }
    with torch.no_grad():
        decoded: torch.Tensor = pipe.vae.decode(z, return_dict=False, **arguments)[0]
    if not torch.isfinite(decoded).all():
        raise DiffusionError("the VAE computed a picture that is not finite", code="non_finite_image")
    return decoded


def read_decode_arguments(decode_arguments: dict[str, Any]) -> dict[str, Any]:
    """``Denoised.decode_arguments`` as ``vae.decode`` takes them.

    Raises:
        DiffusionError: INVALID_ARG when they are none of ``replay``'s.
    """
    try:
        return {
            name: values.from_json(value) for name, value in decode_arguments.items() if name != CHANNELS_LAST
        }
    except values.MALFORMED as error:
        raise invalid("settings", f"'settings' has decode_arguments that nobody wrote: {error}") from None


def makes_video(pipe: DiffusionPipeline) -> bool:
    """Whether clips come out: pipelines that make them have a post-processor for them."""
    return hasattr(pipe, "video_processor")


def _private_copy(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """Pipelines keep the state of a call on self; schedulers, guiders and processors keep theirs: one of each a run.

    The models are shared, but for the VAE's own object, on which ``encode`` is replaced.
    """
    run = copy.copy(pipe)
    for name, part in vars(pipe).items():
        if isinstance(part, ConfigMixin) and not isinstance(part, nn.Module):
            vars(run)[name] = copy.deepcopy(part)
    vars(run)["vae"] = copy.copy(pipe.vae)
    return run


def _replace_encoding_methods(run: DiffusionPipeline, replacement: Callable[[str, Method], Method]) -> None:
    """Put ``replacement(name, method)`` in the place of every method whose results travel from encode to denoise."""
    for name in dir(type(run)):
        if name.startswith("encode_"):
            setattr(run, name, replacement(name, getattr(run, name)))
    run.vae.encode = replacement("vae.encode", run.vae.encode)


def _replace_denoisers(run: DiffusionPipeline, denoiser: Denoiser) -> None:
    """Have ``denoiser`` called for each denoiser; in all else they stay what they are."""

    def forward_of(module: nn.Module) -> Callable[..., Any]:
        return lambda *args, **kwargs: denoiser(module, args, kwargs)

    for name, module in loading.modules_of(run, Stage.DENOISE).items():
        stand_in = copy.copy(module)
        vars(stand_in)["forward"] = forward_of(module)
        vars(run)[name] = stand_in


def _random_state(arguments: dict[str, Any]) -> bytes:
    states = [arguments["generator"].get_state(), torch.get_rng_state()]
    # Where it is not, asking would initialize it, and take memory of a GPU that is not used.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return b"".join(state.numpy().tobytes() for state in states)


def _blame_the_client(run: DiffusionPipeline) -> None:
    """``check_inputs`` raises for what the caller sent; but for images, all else that raises is our fault."""
    if hasattr(run, "check_inputs"):
        run.check_inputs = _blaming(run.check_inputs, "the pipeline refuses the request")


def _blame_the_image(run: DiffusionPipeline) -> None:
    """What turns images to tensors raises for those it can do nothing with: too small, too long, ..."""
    for name in ("image_processor", "video_processor", "processor", "feature_extractor"):
        if (processor := getattr(run, name, None)) is not None:
            vars(run)[name] = _BlamingProcessor(processor)


class _BlamingProcessor:
    """A processor, of which every call blames the image."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _blame_image(self._processor.__call__)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._processor, name)
        return _blame_image(value) if inspect.isroutine(value) else value


def _blame_image(function: Callable[..., Any]) -> Callable[..., Any]:
    return _blaming(function, "the pipeline can do nothing with 'image'", IMAGE)


def _blaming(function: Callable[..., Any], what: str, param: str | None = None) -> Callable[..., Any]:
    @functools.wraps(function)
    def blamed(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (ValueError, TypeError) as error:
            raise DiffusionError(
                f"{what}: {error}", param=param, code="invalid_value", status=Status.INVALID_ARG
            ) from None

    return blamed
