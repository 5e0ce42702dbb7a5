"""Sharpen the autoencoder's decoder on the pictures the model draws; the latents stay as they are."""

import argparse
import copy
from pathlib import Path

import torch
from common import fit, image_loss, mixed_precision
from diffusers import AutoencoderKL
from emoji import HERE, background_colours, composite, load_sheet
from torch import Tensor


@torch.no_grad()
def measure_psnr(vae: AutoencoderKL, latents: Tensor, pictures: Tensor) -> float:
    """Mean peak signal-to-noise ratio, in dB, of latents [n, 4, 16, 16] decoded, against [n, 3, 64, 64]."""
    error = (vae.decode(latents).sample.clamp(-1, 1) - pictures) / 2
    return float(-10 * error.pow(2).mean((1, 2, 3)).log10().mean())


def finetune(
    vae: AutoencoderKL,
    tiles: Tensor,
    *,
    minutes: float,
    max_steps: int | None = None,
    batch_size: int = 16,
    learning_rate: float = 1.2e-3,
    average_decay: float = 0.99,
) -> AutoencoderKL:
    """Train only the decoder, on tiles [n, 4, 64, 64] on every background; returns the averaged model."""
    vae = vae.to(memory_format=torch.channels_last)
    decoder = [*vae.decoder.parameters(), *vae.post_quant_conv.parameters()]
    vae.requires_grad_(False)
    for parameter in decoder:
        parameter.requires_grad_(True)
    average = copy.deepcopy(vae)
    optimizer = torch.optim.AdamW(decoder, betas=(0.9, 0.99))

    pictures = torch.cat([composite(tiles, colour[None]) for colour in background_colours()])
    with torch.no_grad():
        moments = torch.cat(
            [vae.encode(part).latent_dist.parameters for part in pictures.chunk(len(background_colours()))]
        )
    mean, log_variance = moments.chunk(2, dim=1)
    # The transformer's latents are never exact, so the decoder learns from twice the posterior's noise.
    deviation = 2 * (0.5 * log_variance).exp()

    print(f"before: {measure_psnr(average, mean[::10], pictures[::10]):.2f} dB")

    def draw_loss() -> Tensor:
        chosen = torch.randint(len(pictures), (batch_size,))
        latents = mean[chosen] + deviation[chosen] * torch.randn_like(mean[chosen])
        with mixed_precision():
            output = vae.decode(latents.contiguous(memory_format=torch.channels_last)).sample
        return image_loss(output.float(), pictures[chosen])

    fit(
        vae,
        average,
        optimizer,
        draw_loss,
        minutes=minutes,
        max_steps=max_steps,
        learning_rate=learning_rate,
        warmup=20,
        average_decay=average_decay,
    )
    print(f"after:  {measure_psnr(average, mean[::10], pictures[::10]):.2f} dB")
    return average


def main() -> None:
    """Fine-tune the decoder of a saved pipeline in place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiles", type=Path, default=HERE / "references.png")
    parser.add_argument("--pipeline", type=Path, default=Path("build/emoji-flux/pipeline"))
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--learning-rate", type=float, default=1.2e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    vae = AutoencoderKL.from_pretrained(options.pipeline / "vae", dtype=torch.float32)
    tiles = load_sheet(options.tiles)
    average = finetune(vae, tiles, minutes=options.minutes, learning_rate=options.learning_rate)
    average.half().save_pretrained(options.pipeline / "vae")


if __name__ == "__main__":
    main()
