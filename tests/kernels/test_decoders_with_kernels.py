"""The fast decoders as they run on a GPU: with the kernels in their places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLWan
from diffusion_backend import fast_layers
from diffusion_backend.fast_decoders import FastDecoder
from diffusion_backend.fast_path_gate import register_vae_fast_path_gate, use_vae_fast_path
from diffusion_kernels.to_uint8 import to_uint8

from tests.kernels.numerics import DEVICE


def _kl() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        block_out_channels=[24, 32],
        norm_num_groups=8,
    )


def _wan() -> AutoencoderKLWan:
    return AutoencoderKLWan(base_dim=8, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True])


@pytest.mark.parametrize(
    ("build", "shape"), [(_kl, (2, 4, 5, 3)), (_wan, (1, 16, 2, 3, 2))], ids=["AutoencoderKL", "Wan"]
)
def test_they_decode_what_the_vae_does(
    build: Callable[[], Any], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_layers, "has_kernels", lambda _: True)
    torch.manual_seed(0)
    vae = build().to(DEVICE).eval().requires_grad_(False)
    latents = torch.randn(shape).to(DEVICE)
    register_vae_fast_path_gate(vae, FastDecoder(vae, torch.float32))
    with torch.no_grad():
        lossless = vae.decode(latents, return_dict=False)[0]
        with use_vae_fast_path(vae, True):
            fast = vae.decode(latents, return_dict=False)[0]
    assert not torch.equal(fast, lossless)
    assert (fast - lossless).abs().max() < 1e-4
    if fast.ndim == 4:
        levels = ((lossless / 2 + 0.5).clamp(0, 1) * 255).round().permute(0, 2, 3, 1)
        assert (to_uint8(fast).float() - levels).abs().max() <= 1
