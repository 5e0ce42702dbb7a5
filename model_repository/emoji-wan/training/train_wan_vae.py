"""Make the autoencoder: 17 frames of 64 x 64 pixels to a 12 x 5 x 8 x 8 latent and back.

The encoder is computed, not trained: its weights are set so that a latent holds the principal components of
each square of 8 x 8 pixels in every fourth frame. So latents are there at once, and train_wan.py can run at the
same time. The decoder is trained; it draws the frames in between from the latents before and after them.
"""

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path

import clips
import torch
from common import fit, image_loss, mixed_precision
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample, patchify, unpatchify
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from emoji import BACKGROUNDS
from torch import Tensor, nn
from torch.nn.functional import unfold

LATENT_CHANNELS = 12
PATCH = 2
STEADY = 100.0  # a constant feature, so much larger than the others that the last norm only scales them
LOG_VARIANCE = -6.0


def build_vae(width: int = 24) -> AutoencoderKLWan:
    """Wan's layout: patches of 2 x 2 pixels, then two halvings of width, height and time."""
    vae = AutoencoderKLWan(
        base_dim=width,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
        in_channels=3 * PATCH**2,
        out_channels=3 * PATCH**2,
        patch_size=PATCH,
        scale_factor_temporal=4,
        scale_factor_spatial=8,
    )
    compute_encoder(vae)
    for layer in vae.modules():
        if isinstance(layer, nn.Conv3d):
            layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last_3d)
    return vae.requires_grad_(False)


def draw_pictures() -> Tensor:
    """Every name on every colour at eight places that clips go through: [960, 3, 64, 64] in -1..1."""
    middle = clips.SIZE // 2
    places = [(middle + way, middle + across) for way in (-10, -4, 2, 8) for across in (0, 4)]
    return torch.stack(
        [
            clips.place(still, x, y)
            for colour in clips.COLOURS
            for still in clips.draw_stills(clips.NAMES, torch.tensor(BACKGROUNDS[colour]) / 255)
            for x, y in places
        ]
    )


def find_components(features: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The main components of squares of 2 x 2 in features [n, c, h, w], and their deviations.

    As weights [count, c, 2, 2] of a convolution, and [count].
    """
    squares = unfold(features, 2, stride=2).transpose(1, 2).flatten(0, 1)
    variances, axes = torch.linalg.eigh(squares.T.cov())
    weights = axes.T.flip(0)[:count].reshape(count, features.shape[1], 2, 2)
    return weights, variances.flip(0)[:count].clamp(min=1e-8).sqrt()


@torch.no_grad()
def compute_encoder(vae: AutoencoderKLWan) -> None:
    """Make the encoder linear, its latents principal components, and latents_mean and latents_std theirs.

    The residual branches add nothing. Of two frames, halving the time keeps the later one.
    """
    encoder = vae.encoder
    for name, parameter in [*encoder.named_parameters(), *vae.quant_conv.named_parameters()]:
        parameter.fill_(float(name.endswith("gamma")))
    halvings = [layer for layer in encoder.down_blocks if isinstance(layer, WanResample)]
    for layer in halvings:
        layer.time_conv.weight[:, :, -1, 0, 0] = torch.eye(layer.dim)
    pixels, width = 3 * PATCH**2, halvings[0].dim
    encoder.conv_in.weight[:pixels, :, -1, 1, 1] = torch.eye(pixels)
    encoder.down_blocks[2].conv_shortcut.weight[:width, :, 0, 0, 0] = torch.eye(width)

    pictures = patchify(draw_pictures()[:, :, None], PATCH)[:, :, 0]
    first, _ = find_components(pictures, width)
    halvings[0].resample[1].weight[:, :pixels, :2, :2] = first
    features = nn.functional.conv2d(pictures, first, stride=2)
    second, deviations = find_components(features, LATENT_CHANNELS)
    # Make the small components larger, but not as large as the others; then mix them, so that all channels
    # have about the same deviation.
    second = second / deviations.sqrt()[:, None, None, None]
    mix = torch.linalg.qr(torch.randn(len(second), len(second), generator=torch.Generator().manual_seed(0))).Q
    second = torch.einsum("ij,jchw->ichw", mix, second)
    latents = nn.functional.conv2d(features, second, stride=2)
    scale = 1 / latents.std()
    second, latents = second * scale, latents * scale

    # The head's activation is not linear, but silu(x) - silu(-x) is x.
    z, halving, head = LATENT_CHANNELS, halvings[1].resample[1], encoder.conv_out
    halving.weight[:z, :width, :2, :2], halving.weight[z : 2 * z, :width, :2, :2] = second, -second
    halving.bias[2 * z] = STEADY
    gain = STEADY / encoder.norm_out.gamma.numel() ** 0.5
    head.weight[:z, :z, -1, 1, 1], head.weight[:z, z : 2 * z, -1, 1, 1] = (
        gain * torch.eye(z),
        -gain * torch.eye(z),
    )
    head.bias[z:] = LOG_VARIANCE
    vae.quant_conv.weight[:, :, 0, 0, 0] = torch.eye(2 * z)
    vae.register_to_config(
        latents_mean=latents.mean((0, 2, 3)).tolist(), latents_std=latents.std((0, 2, 3)).tolist()
    )


def encode_clip(vae: AutoencoderKLWan, clip: Tensor) -> DiagonalGaussianDistribution:
    """The same as vae.encode for clips [n, 3, t, h, w]: this encoder sees each fourth frame by itself."""
    frames = clip[:, :, ::4].transpose(1, 2)
    moments = vae.encode(frames.flatten(0, 1)[:, :, None]).latent_dist.parameters[:, :, 0]
    return DiagonalGaussianDistribution(moments.view(*frames.shape[:2], *moments.shape[1:]).transpose(1, 2))


def double_clip(layer: WanResample, x: Tensor) -> Tensor:
    """What the layer does to latents frame by frame, with its cache, to all of [n, c, t, h, w] at once."""
    first, rest = x[:, :, :1], x[:, :, 1:]
    if rest.shape[2]:
        n, channels, frames, height, width = rest.shape
        pairs = layer.time_conv(rest).view(n, 2, channels, frames, height, width)
        x = torch.cat([first, pairs.permute(0, 2, 3, 1, 4, 5).flatten(2, 3)], dim=2)
    pictures: Tensor = layer.resample(x.transpose(1, 2).flatten(0, 1))
    return pictures.view(len(x), x.shape[2], *pictures.shape[1:]).transpose(1, 2)


def decode_clip(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """The same as vae.decode for latents [n, c, t, h, w], in one pass and without its limits to -1..1."""
    decoder = vae.decoder
    x = decoder.mid_block(decoder.conv_in(vae.post_quant_conv(latents)))
    for block in decoder.up_blocks:
        for layer in block.resnets:
            x = layer(x)
        for layer in block.upsamplers or ():
            x = double_clip(layer, x)
    x = decoder.conv_out(decoder.nonlinearity(decoder.norm_out(x)))
    clip: Tensor = unpatchify(x, PATCH)
    return clip


def draw_batch(subjects: Sequence[clips.Subject], size: int, frames: int) -> Tensor:
    """Random clips [size, 3, frames, 64, 64] of these subjects, parts of the ones the transformer sees."""
    batch = []
    for index in torch.randint(len(subjects), (size,)).tolist():
        name, direction, colour = subjects[index]
        still = clips.draw_stills([name], torch.tensor(BACKGROUNDS[colour]) / 255)[0]
        offset = clips.OFFSETS[int(torch.randint(len(clips.OFFSETS), ()))]
        first = 4 * int(torch.randint((clips.FRAMES - frames) // 4 + 1, ()))
        batch.append(clips.draw_clip(still, direction, offset, range(first, first + frames)))
    return torch.stack(batch)


@torch.no_grad()
def measure_psnr(vae: AutoencoderKLWan, subjects: Sequence[clips.Subject]) -> float:
    """Mean peak signal-to-noise ratio, in dB, of one clip of each subject, encoded and decoded frame by frame."""
    ratios = []
    for name, direction, colour in subjects:
        still = clips.draw_stills([name], torch.tensor(BACKGROUNDS[colour]) / 255)[0]
        clip = clips.draw_clip(still, direction, 0)[None]
        error = (vae.decode(vae.encode(clip).latent_dist.mean).sample - clip) / 2
        ratios.append(-10 * error.pow(2).mean().log10())
    return float(torch.stack(ratios).mean())


def train(
    vae: AutoencoderKLWan,
    subjects: Sequence[clips.Subject],
    *,
    minutes: float,
    max_steps: int | None = None,
    batch_size: int = 4,
    frames: int = 9,
    learning_rate: float = 2e-3,
    average_decay: float = 0.99,
    folder: Path | None = None,
    compiled: bool = False,
) -> tuple[AutoencoderKLWan, list[float]]:
    """Train the decoder on clips of these subjects; returns the averaged autoencoder and every step's loss.

    With a folder, the state so far is saved there at the start and every 200 steps. Compiling pays after some
    minutes.
    """
    decoder = [*vae.decoder.parameters(), *vae.post_quant_conv.parameters()]
    for parameter in decoder:
        parameter.requires_grad_(True)
    average = copy.deepcopy(vae).eval()
    decode = torch.compile(decode_clip) if compiled else decode_clip
    optimizer = torch.optim.AdamW(decoder, betas=(0.9, 0.99), weight_decay=1e-4)

    def draw_loss() -> Tensor:
        batch = draw_batch(subjects, batch_size, frames)
        with torch.no_grad():
            # The transformer's latents are never exact, so the decoder learns from twice the posterior's noise.
            posterior = encode_clip(vae, batch)
            latents = posterior.mean + 2 * posterior.std * torch.randn_like(posterior.std)
        latents = latents.contiguous(memory_format=torch.channels_last_3d)
        with mixed_precision():
            output = decode(vae, latents)
        pictures, targets = (clip.transpose(1, 2).flatten(0, 1) for clip in (output.float(), batch))
        return image_loss(pictures, targets)

    save = None if folder is None else lambda: average.save_pretrained(folder)
    if save is not None:
        save()
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
        save=save,
        save_every=200,
    )
    return average, losses


def main() -> None:
    """Train with the settings of the recipe, save the autoencoder and print how well it keeps clips."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("build/emoji-wan/vae"))
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    vae, _ = train(
        build_vae(),
        clips.seen_subjects(),
        minutes=options.minutes,
        learning_rate=options.learning_rate,
        folder=options.out,
        compiled=True,
    )
    vae.save_pretrained(options.out)
    unseen = [clips.Subject(name, clips.held_out(name), "white") for name in clips.NAMES]
    print(f"held-out motions: {measure_psnr(vae, unseen):.2f} dB")


if __name__ == "__main__":
    main()
