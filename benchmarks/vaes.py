"""The VAEs that the decode benchmarks decode with: real architectures with random weights, and latents for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage, AutoencoderKLWan

FACTOR = 8  # pixels a latent, on a side, of all of these


def _flux_vae() -> Any:
    """That of FLUX.1 and SD3; SD's and SDXL's have 4 channels of latents and are the same otherwise."""
    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[128, 256, 512, 512],
        layers_per_block=2,
        latent_channels=16,
        norm_num_groups=32,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


_BUILDERS: dict[str, tuple[Callable[[], Any], int]] = {
    "AutoencoderKL": (_flux_vae, 16),
    "AutoencoderKLFlux2": (AutoencoderKLFlux2, 32),
    "AutoencoderKLWan": (AutoencoderKLWan, 16),
    "AutoencoderKLQwenImage": (AutoencoderKLQwenImage, 16),
}


@dataclass(frozen=True)
class Case:
    """What is decoded: ``frames`` are those of the latents, of a VAE for clips (Wan makes 4 more of each but one)."""

    vae: str
    side: int
    batch: int = 1
    frames: int | None = None

    @property
    def name(self) -> str:
        clip = f" x {4 * self.frames - 3} frames" if self.frames and self.frames > 1 else ""
        return f"{self.vae} {self.side}²{clip}" + (f", batch {self.batch}" if self.batch > 1 else "")

    @property
    def prefix(self) -> str:
        """Of the names of its figures."""
        short = self.vae.removeprefix("Autoencoder").lower()
        return f"{short}_{self.side}" + (f"_b{self.batch}" if self.batch > 1 else "")

    @property
    def latents_shape(self) -> tuple[int, ...]:
        """Without the batch."""
        frames = () if self.frames is None else (self.frames,)
        return (_BUILDERS[self.vae][1], *frames, self.side // FACTOR, self.side // FACTOR)

    def build(self, device: torch.device | str, dtype: torch.dtype) -> Any:
        """The VAE; biases and scales are random, too, so that none is left out unnoticed."""
        torch.manual_seed(0)
        if str(device) == "meta":
            with torch.device("meta"):
                return _BUILDERS[self.vae][0]().to(dtype).eval().requires_grad_(False)
        vae = _BUILDERS[self.vae][0]().eval().requires_grad_(False)
        for parameter in vae.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
        return vae.to(device, dtype)

    def latents(self, device: torch.device | str, dtype: torch.dtype) -> torch.Tensor:
        shape = (self.batch, *self.latents_shape)
        if str(device) == "meta":
            return torch.empty(shape, device="meta", dtype=dtype)
        return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
