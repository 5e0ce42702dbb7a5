"""The fast decoders as they run on a GPU: with the kernels in their places."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage, AutoencoderKLWan
from diffusion_backend import fast_layers
from diffusion_backend.fast_decoders import FastDecoder
from diffusion_backend.fast_path_gate import register_vae_fast_path_gate, use_vae_fast_path
from diffusion_kernels.to_uint8 import to_uint8

from tests.kernels.numerics import DEVICE, DTYPES

# Of the rounding errors of the VAE's own decoder in the same dtype. The interpreter truncates to bfloat16, which is off
# by up to a whole ulp where a GPU, which rounds, is off by half of one.
MORE_ROUNDING = {torch.float32: 1.5, torch.bfloat16: 2.5, torch.float16: 1.5}


def _kl() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        block_out_channels=[24, 32],
        norm_num_groups=8,
    )


def _flux2() -> AutoencoderKLFlux2:
    return AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        latent_channels=4,
    )


def _wan() -> AutoencoderKLWan:
    return AutoencoderKLWan(base_dim=8, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True])


def _qwen() -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(base_dim=8, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True])


VAES = [
    pytest.param(_kl, (2, 4, 5, 3), id="AutoencoderKL"),
    pytest.param(_flux2, (1, 4, 4, 6), id="FLUX.2"),
    pytest.param(_wan, (1, 16, 2, 3, 2), id="Wan"),
    pytest.param(_qwen, (1, 16, 1, 3, 2), id="Qwen-Image"),
]


def make(build: Callable[[], Any], shape: tuple[int, ...]) -> tuple[Any, torch.Tensor]:
    """A VAE with random weights (biases and affine parameters, too) and latents for it."""
    torch.manual_seed(0)
    vae = build().to(DEVICE).eval().requires_grad_(False)
    for parameter in vae.parameters():
        if parameter.ndim == 1:
            parameter += 0.1 * torch.randn_like(parameter)
    return vae, torch.randn(shape).to(DEVICE)


def decode(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        decoded: torch.Tensor = vae.decode(latents, return_dict=False)[0]
    return decoded


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("build", "shape"), VAES)
def test_they_decode_what_the_vae_does(
    build: Callable[[], Any], shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They round about as much as the VAE's own decoder in that dtype: both are compared with float64."""
    monkeypatch.setattr(fast_layers, "kernels_for", lambda *_: "triton")
    vae, latents = make(build, shape)
    exact = decode(copy.deepcopy(vae).double(), latents.double())
    own = decode(copy.deepcopy(vae).to(dtype), latents.to(dtype))
    register_vae_fast_path_gate(vae, FastDecoder(vae, dtype))
    with use_vae_fast_path(vae, True):
        fast = decode(vae, latents)
    assert not torch.equal(fast, own.float())
    assert rms(fast - exact) < MORE_ROUNDING[dtype] * rms(own - exact)
    if fast.ndim == 4:
        levels = ((fast.float() / 2 + 0.5).clamp(0, 1) * 255).round().permute(0, 2, 3, 1)
        assert torch.equal(to_uint8(fast).float(), levels)
