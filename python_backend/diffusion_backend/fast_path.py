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
from torch.nn.functional import pixel_shuffle

from diffusion_backend import seams
from diffusion_backend.fast_decoders import CannotRewriteError, FastDecoder
from diffusion_backend.fast_layers import kernels_for
from diffusion_backend.fast_path_gate import (
    has_vae_fast_path_gate,
    register_vae_fast_path_gate,
    remove_vae_fast_path_gate,
    use_vae_fast_path,
)

logger = logging.getLogger(__name__)

IDENTICAL_DB = 200.0  # what stands for no difference at all
UNLIKE_DB = -IDENTICAL_DB  # and for one beside which there is no signal
_SIDES = ((1.0, 1.0), (0.75, 0.5))  # of the latents that are compared: two shapes
# On a side. On a CPU enough to meet every layer, and soon done; on a GPU a picture's, as kernels are tuned by it.
_MOST_LATENTS = {"cpu": 32, "cuda": 128}


@dataclass(frozen=True)
class FastPath:
    """``psnr_db`` (peak: white) and ``max_difference`` (of 255) are the worst of the pictures that were compared.

    ``own_range_psnr_db`` is of what the VAE makes before it is clamped to a picture (peak: its own span), as values
    beyond white and black would hide their differences.

    ``kernels`` are those that normalize: see ``fast_layers.kernels_for``.

    ``rewritten`` counts the modules that the fast decoder has instead of the VAE's own, by class. ``bytes`` is what it
    takes of memory besides the weights that it shares with the VAE.
    """

    state: str  # installed, or refused
    reason: str | None = None
    dtype: str | None = None
    kernels: str | None = None
    psnr_db: float | None = None
    own_range_psnr_db: float | None = None
    max_difference: int | None = None
    rewritten: dict[str, int] = field(default_factory=dict)
    bytes: int = 0


def install(
    pipe: DiffusionPipeline, latents_shape: Sequence[int], *, device: torch.device, min_psnr_db: float
) -> FastPath:
    """Give ``pipe.vae`` a fast decoder, unless it cannot be rewritten or makes other pictures.

    ``latents_shape`` is that of the model's default size, without a batch axis: [C, H, W] or [C, F, H, W].

    Raises:
        ValueError: it has one already.
    """
    if has_vae_fast_path_gate(pipe.vae):
        raise ValueError("this VAE has a fast path already")
    path = _try(pipe, latents_shape, device, min_psnr_db)
    if path.state == "installed":
        logger.info("fast VAE decoder installed: %s", path)
        return path
    remove_vae_fast_path_gate(pipe.vae)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the second decoder took
    logger.warning("no fast VAE decoder, every quality is decoded losslessly: %s", path.reason)
    return path


def _try(
    pipe: DiffusionPipeline, latents_shape: Sequence[int], device: torch.device, min_psnr_db: float
) -> FastPath:
    """Whatever goes wrong is a reason to do without: the VAE's own decoder needs none of this."""
    try:
        dtype = fast_dtype(device, pipe.vae.dtype)
        _require_kernels(device)
        decoder = FastDecoder(pipe.vae, dtype)
        register_vae_fast_path_gate(pipe.vae, decoder)
        compared = _compare(pipe, latents_shape, _MOST_LATENTS[device.type])
    except CannotRewriteError as error:
        return FastPath("refused", str(error))
    except Exception as error:
        logger.exception("the fast VAE decoder failed")
        return FastPath("refused", f"it failed: {type(error).__name__}: {error}")
    measured = FastPath(
        "installed",
        dtype=str(dtype).removeprefix("torch."),
        kernels=kernels_for(device, dtype),
        psnr_db=round(compared.psnr_db, 2),
        own_range_psnr_db=round(compared.own_range_psnr_db, 2),
        max_difference=compared.max_difference,
        rewritten=decoder.rewritten,
        bytes=_own_bytes(decoder, pipe.vae),
    )
    for what, found in (
        ("its pictures have", compared.psnr_db),
        ("before they are clamped, its pictures have", compared.own_range_psnr_db),
    ):
        if found < min_psnr_db:
            reason = f"{what} a PSNR of {found:.1f} dB against lossless ones; required: {min_psnr_db:g}"
            return replace(measured, state="refused", reason=reason, bytes=0)
    return measured


def _require_kernels(device: torch.device) -> None:
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        # channels_last without them is slower than the VAE's own decoder.
        raise CannotRewriteError("triton is not installed, and so there are no kernels for the GPU")


def fast_dtype(device: torch.device, vae_dtype: torch.dtype) -> torch.dtype:
    """By what the hardware can do, never by a timing: the same machine makes the same bytes after each restart.

    On a CPU without bfloat16 units float32 is faster than emulated bfloat16; a GPU without them has float16's. What the
    units of an ARM CPU ("bf16") gain was never measured: float32, there, too.
    """
    if device.type == "cuda":
        has_units = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has_units and vae_dtype != torch.float16 else torch.float16
    able = torch.cpu.get_capabilities()
    has_units = able.get("amx_bf16", False) or able.get("avx512_bf16", False)
    return torch.bfloat16 if has_units else torch.float32


def _own_bytes(decoder: FastDecoder, vae: Any) -> int:
    """What it takes of memory: the weights that have the VAE's dtype and layout are the VAE's own."""
    shared = {parameter.data_ptr() for parameter in vae.decoder.parameters()}
    return sum(p.numel() * p.element_size() for p in decoder.parameters() if p.data_ptr() not in shared)


@dataclass
class _Comparison:
    """The worst of what was compared; see ``FastPath``."""

    psnr_db: float = IDENTICAL_DB
    own_range_psnr_db: float = IDENTICAL_DB
    max_difference: int = 0


def _compare(pipe: DiffusionPipeline, latents_shape: Sequence[int], most_latents: int) -> _Comparison:
    """Of fixed latents of two shapes, with sides of so many at most: one alone, and two together."""
    generator = torch.Generator("cpu").manual_seed(0)
    *lead, height, width = latents_shape
    worst = _Comparison()
    for rows, (tall, wide) in enumerate(_SIDES, start=1):
        sides = [
            max(1, int(min(side, most_latents) * share)) for side, share in ((height, tall), (width, wide))
        ]
        latents = _denormalize(torch.randn((rows, *lead, *sides), generator=generator), pipe.vae)
        decoded, pictures = [], []
        for enabled in (False, True):
            with use_vae_fast_path(pipe.vae, enabled):
                made = seams.run_vae(pipe, latents, {})
            decoded.append(made)
            pictures.append(seams.to_pictures(pipe, made, exact=not enabled).int())
        span = (decoded[0].double().max() - decoded[0].double().min()).item()
        worst.own_range_psnr_db = min(worst.own_range_psnr_db, psnr_db(decoded[0], decoded[1], span))
        worst.psnr_db = min(worst.psnr_db, psnr_db(pictures[0], pictures[1], 255))
        worst.max_difference = max(worst.max_difference, int((pictures[0] - pictures[1]).abs().max()))
    return worst


def psnr_db(a: torch.Tensor, b: torch.Tensor, peak: float) -> float:
    """The peak signal-to-noise ratio of two tensors of one shape, in dB.

    IDENTICAL_DB where they are equal; UNLIKE_DB where no peak or no finite difference is.
    """
    mse = (a.double() - b.double()).square().mean().item()
    if mse == 0:
        return IDENTICAL_DB
    return 10 * math.log10(peak**2 / mse) if peak and math.isfinite(mse) else UNLIKE_DB


def _denormalize(noise: torch.Tensor, vae: Any) -> torch.Tensor:
    """Noise of the mean and deviation that the latents of this VAE have."""
    config = vae.config
    if (norm := getattr(vae, "bn", None)) is not None:  # FLUX.2's, of 2x2 latents each
        mean, std = (
            pixel_shuffle(of.float().cpu().view(1, -1, 1, 1), 2)
            for of in (norm.running_mean, (norm.running_var + norm.eps).sqrt())
        )
        height, width = noise.shape[-2:]
        tiles = (1, 1, -(-height // 2), -(-width // 2))
        return (noise * std.repeat(tiles)[..., :height, :width]) + mean.repeat(tiles)[..., :height, :width]
    if config.get("latents_std"):
        mean, std = (
            torch.tensor(config[name]).view(1, -1, *[1] * (noise.ndim - 2))
            for name in ("latents_mean", "latents_std")
        )
        return noise * std + mean
    scaled = noise / (config.get("scaling_factor") or 1.0)
    return scaled + (config.get("shift_factor") or 0.0)
