"""Train the autoencoder: 64 x 64 pixels to a 4 x 16 x 16 latent and back, 1.45 M parameters."""

import argparse
import copy
from pathlib import Path

import torch
from common import fit, image_loss, mixed_precision
from diffusers import AutoencoderKL
from emoji import TILE, background_colours, composite, load_sheet
from torch import Tensor


def build_vae() -> AutoencoderKL:
    """A convolutional KL autoencoder with three resolutions."""
    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 3,
        up_block_types=["UpDecoderBlock2D"] * 3,
        block_out_channels=(24, 48, 96),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=TILE,
        mid_block_add_attention=False,
    )
    # Start with nearly noiseless posteriors (log variance -6): otherwise the decoder first learns to ignore
    # the latent.
    torch.nn.init.constant_(vae.quant_conv.bias[4:], -6.0)
    return vae.to(memory_format=torch.channels_last)


def draw_batch(tiles: Tensor, size: int) -> Tensor:
    """Random tiles [n, 4, 64, 64] on random backgrounds, moved and mirrored: [size, 3, 64, 64] in -1..1."""
    colours = background_colours()[torch.randint(9, (size,))]
    # Three backgrounds in ten are any colour, so that the latent space has no gaps between the nine.
    colours = torch.where(torch.rand(size, 1) < 0.3, torch.rand(size, 3), colours)
    pictures = composite(tiles[torch.randint(len(tiles), (size,))], colours)
    pictures = pictures.roll(torch.randint(-3, 4, (2,)).tolist(), dims=(2, 3))
    if torch.rand(()) < 0.5:
        pictures = pictures.flip(3)
    return pictures.contiguous(memory_format=torch.channels_last)


def train(
    tiles: Tensor,
    *,
    minutes: float,
    max_steps: int | None = None,
    batch_size: int = 16,
    learning_rate: float = 2e-3,
    kl_weight: float = 3e-4,
    average_decay: float = 0.995,
) -> tuple[AutoencoderKL, list[float]]:
    """Train on tiles [n, 4, 64, 64]; returns the averaged autoencoder and the loss of every step."""
    vae = build_vae()
    average = copy.deepcopy(vae)
    optimizer = torch.optim.AdamW(vae.parameters(), betas=(0.9, 0.99), weight_decay=1e-4)

    def draw_loss() -> Tensor:
        pictures = draw_batch(tiles, batch_size)
        with mixed_precision():
            posterior = vae.encode(pictures).latent_dist
            output = vae.decode(posterior.sample()).sample
        mean, log_variance = posterior.mean.float(), posterior.logvar.float()
        kl = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).mean()
        loss: Tensor = image_loss(output.float(), pictures) + kl_weight * kl
        return loss

    losses = fit(
        vae,
        average,
        optimizer,
        draw_loss,
        minutes=minutes,
        max_steps=max_steps,
        learning_rate=learning_rate,
        warmup=50,
        average_decay=average_decay,
    )
    return average.eval(), losses


def main() -> None:
    """Train with the settings of the recipe and save the autoencoder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiles", type=Path, default=Path("build/emoji-flux/autoencoder.png"))
    parser.add_argument("--out", type=Path, default=Path("build/emoji-flux/vae"))
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    tiles = load_sheet(options.tiles)
    vae, _ = train(tiles, minutes=options.minutes, learning_rate=options.learning_rate)
    vae.save_pretrained(options.out)


if __name__ == "__main__":
    main()
