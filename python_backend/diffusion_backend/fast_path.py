"""The fast path of a VAE: built, compared with the VAE's own decoder, and then used or refused.

What happened is told as ``FastPath``: in the log, in the stage's description, and on the model's card.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from diffusers import DiffusionPipeline

from diffusion_backend import loading, seams
from diffusion_backend.fast_decoders import CannotRewriteError, FastDecoder
from diffusion_backend.fast_path_gate import (
    register_vae_fast_path_gate,
    remove_vae_fast_path_gate,
    use_vae_fast_path,
)

logger = logging.getLogger(__name__)

_IDENTICAL_DB = 200.0  # what stands for no difference at all
_SIDES = ((1.0, 1.0), (0.75, 0.5))  # of the latents that are compared: two shapes
_MOST_LATENTS = 32  # on a side: enough to meet every layer, and soon done on a CPU


@dataclass(frozen=True)
class FastPath:
    """``psnr_db`` (peak: white) and ``max_difference`` (of 255) are the worst of the pictures that were compared.

    ``rewritten`` counts the modules that the fast decoder has instead of the VAE's own, by class. ``bytes`` is what it
    takes of memory.
    """

    state: str  # installed, or refused
    reason: str | None = None
    dtype: str | None = None
    psnr_db: float | None = None
    max_difference: int | None = None
    rewritten: dict[str, int] = field(default_factory=dict)
    bytes: int = 0


def install(
    pipe: DiffusionPipeline, latents_shape: Sequence[int], *, device: torch.device, min_psnr_db: float
) -> FastPath:
    """Give ``pipe.vae`` a fast decoder, unless it cannot be rewritten or makes other pictures.

    ``latents_shape`` is that of the model's default size, without a batch axis: [C, H, W] or [C, F, H, W].
    """
    vae = pipe.vae
    dtype = _fast_dtype(device, vae.dtype)
    try:
        _require_kernels(device)
        decoder = FastDecoder(vae, dtype)
    except CannotRewriteError as error:
        return _refuse(FastPath("refused", str(error)))
    register_vae_fast_path_gate(vae, decoder)
    try:
        psnr_db, difference = _compare(pipe, latents_shape)
    except Exception as error:
        logger.exception("the fast VAE decoder failed")
        remove_vae_fast_path_gate(vae)
        return _refuse(FastPath("refused", f"it failed: {type(error).__name__}: {error}"))
    measured = FastPath(
        "installed",
        dtype=str(dtype).removeprefix("torch."),
        psnr_db=round(psnr_db, 2),
        max_difference=difference,
        rewritten=decoder.rewritten,
        bytes=loading.module_bytes(decoder),
    )
    if psnr_db < min_psnr_db:
        remove_vae_fast_path_gate(vae)
        reason = (
            f"its pictures have a PSNR of {psnr_db:.1f} dB against lossless ones; required: {min_psnr_db:g}"
        )
        return _refuse(replace(measured, state="refused", reason=reason, bytes=0))
    logger.info("fast VAE decoder installed: %s", measured)
    return measured


def _refuse(path: FastPath) -> FastPath:
    logger.warning("no fast VAE decoder, every quality is decoded losslessly: %s", path.reason)
    return path


def _require_kernels(device: torch.device) -> None:
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        # channels_last without them is slower than the VAE's own decoder.
        raise CannotRewriteError("triton is not installed, and so there are no kernels for the GPU")


def _fast_dtype(device: torch.device, vae_dtype: torch.dtype) -> torch.dtype:
    """By what the hardware can do, never by a timing: the same machine makes the same bytes after each restart.

    On a CPU without bfloat16 units float32 is faster than emulated bfloat16.
    """
    if device.type == "cuda":
        return vae_dtype if vae_dtype == torch.float16 else torch.bfloat16
    has_units = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if has_units else torch.float32


def _compare(pipe: DiffusionPipeline, latents_shape: Sequence[int]) -> tuple[float, int]:
    """PSNR in dB and the largest difference in levels of 255: the worst of fixed latents of two shapes."""
    generator = torch.Generator("cpu").manual_seed(0)
    *lead, height, width = latents_shape
    psnr_db, difference = _IDENTICAL_DB, 0
    for tall, wide in _SIDES:
        sides = (_side(height, tall), _side(width, wide))
        latents = _denormalize(torch.randn((1, *lead, *sides), generator=generator), pipe.vae)
        pictures = []
        for enabled in (False, True):
            with use_vae_fast_path(pipe.vae, enabled):
                pictures.append(seams.decode(pipe, latents, {}, exact=not enabled).int())
        delta = (pictures[0] - pictures[1]).abs()
        mse = delta.double().pow(2).mean().item() / 255**2
        psnr_db = min(psnr_db, -10 * math.log10(mse)) if mse else psnr_db
        difference = max(difference, int(delta.max()))
    return psnr_db, difference


def _side(side: int, share: float) -> int:
    return max(1, min(int(side * share), int(_MOST_LATENTS * share)))


def _denormalize(noise: torch.Tensor, vae: Any) -> torch.Tensor:
    """Noise of the mean and deviation that the latents of this VAE have."""
    config = vae.config
    if config.get("latents_std"):
        mean, std = (
            torch.tensor(config[name]).view(1, -1, *[1] * (noise.ndim - 2))
            for name in ("latents_mean", "latents_std")
        )
        return noise * std + mean
    scaled = noise / (config.get("scaling_factor") or 1.0)
    return scaled + (config.get("shift_factor") or 0.0)
