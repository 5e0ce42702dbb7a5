"""Train the autoencoder: 17 frames of 64 x 64 pixels to an 8 x 5 x 8 x 8 latent and back."""

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path

import clips
import torch
from common import image_loss, set_learning_rate, training_steps, update_average
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample, patchify, unpatchify
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from emoji import BACKGROUNDS
from torch import Tensor, nn

LATENT_CHANNELS = 8
PATCH = 2

# From this share of the run on: clips of so many frames, so many in a batch.
SCHEDULE = ((0.0, 1, 16), (0.35, 5, 6), (0.75, clips.FRAMES, 2))


def build_vae(width: int = 24) -> AutoencoderKLWan:
    """Wan 2.2's layout: patches of 2 x 2 pixels, then two halvings of width, height and time."""
    vae = AutoencoderKLWan(
        base_dim=width,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
        is_residual=True,
        in_channels=3 * PATCH**2,
        out_channels=3 * PATCH**2,
        patch_size=PATCH,
        scale_factor_temporal=4,
        scale_factor_spatial=8,
    )
    # Start with nearly noiseless posteriors (log variance -6): otherwise the decoder first learns to ignore
    # the latent.
    nn.init.constant_(vae.quant_conv.bias[LATENT_CHANNELS:], -6.0)
    start_from_pictures(vae)
    for layer in vae.modules():
        if isinstance(layer, nn.Conv3d):
            layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last_3d)
    return vae


@torch.no_grad()
def start_from_pictures(vae: AutoencoderKLWan) -> None:
    """Let no frame see an earlier one yet, so that the model can first learn from single frames, which is fast.

    Halving the time then means to keep the later of two frames, doubling it to show each one twice.
    """
    for layer in vae.modules():
        if isinstance(layer, nn.Conv3d) and layer.kernel_size[0] > 1:
            layer.weight *= layer.kernel_size[0] ** 0.5  # as fewer inputs are added up
            layer.weight[:, :, :-1] = 0
    for layer in vae.modules():
        if isinstance(layer, WanResample) and layer.mode in ("upsample3d", "downsample3d"):
            copies = layer.time_conv.out_channels // layer.dim
            layer.time_conv.weight[:, :, -1, 0, 0] = torch.eye(layer.dim).repeat(copies, 1)
            layer.time_conv.bias.zero_()


def resample_clip(layer: WanResample, x: Tensor) -> Tensor:
    """What the layer does to a clip frame by frame, with its cache, to all frames [n, c, t, h, w] at once."""
    first, rest = x[:, :, :1], x[:, :, 1:]
    if layer.mode == "upsample3d" and rest.shape[2]:
        n, channels, frames, height, width = rest.shape
        pairs = layer.time_conv(rest).view(n, 2, channels, frames, height, width)
        x = torch.cat([first, pairs.permute(0, 2, 3, 1, 4, 5).flatten(2, 3)], dim=2)
    n, _, frames, _, _ = x.shape
    pictures = layer.resample(x.transpose(1, 2).flatten(0, 1))
    x = pictures.unflatten(0, (n, frames)).transpose(1, 2)
    if layer.mode == "downsample3d" and frames > 1:
        x = torch.cat([x[:, :, :1], layer.time_conv(x)], dim=2)
    return x


def encode_clip(vae: AutoencoderKLWan, clip: Tensor) -> DiagonalGaussianDistribution:
    """The same as vae.encode for clips [n, 3, t, h, w], in one pass: several times faster with gradients."""
    encoder = vae.encoder
    x = encoder.conv_in(patchify(clip, PATCH))
    for block in encoder.down_blocks:
        shortcut = block.avg_shortcut(x)
        for layer in block.resnets:
            x = layer(x)
        if block.downsampler is not None:
            x = resample_clip(block.downsampler, x)
        x = x + shortcut
    x = encoder.conv_out(encoder.nonlinearity(encoder.norm_out(encoder.mid_block(x))))
    return DiagonalGaussianDistribution(vae.quant_conv(x))


def decode_clip(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """The same as vae.decode for latents [n, c, t, h, w], in one pass and without its limits to -1..1."""
    decoder = vae.decoder
    x = decoder.mid_block(decoder.conv_in(vae.post_quant_conv(latents)))
    for block in decoder.up_blocks:
        before = x
        for layer in block.resnets:
            x = layer(x)
        if block.upsampler is not None:
            x = resample_clip(block.upsampler, x) + block.avg_shortcut(before, first_chunk=True)
    x = decoder.conv_out(decoder.nonlinearity(decoder.norm_out(x)))
    clip: Tensor = unpatchify(x, PATCH)
    return clip


def draw_batch(subjects: Sequence[clips.Subject], size: int, frames: int) -> Tensor:
    """Random clips [size, 3, frames, 64, 64] of these subjects, three in ten on a colour without a name."""
    batch = []
    for index in torch.randint(len(subjects), (size,)).tolist():
        name, direction, colour = subjects[index]
        background = torch.tensor(BACKGROUNDS[colour]) / 255 if torch.rand(()) < 0.7 else torch.rand(3)
        start = clips.Start(*torch.randint(-5, 6, (2,)).tolist())
        first = int(torch.randint(clips.FRAMES - frames + 1, ()))
        still = clips.draw_stills([name], background)[0]
        batch.append(clips.draw_clip(still, direction, start, range(first, first + frames)))
    return torch.stack(batch).contiguous(memory_format=torch.channels_last_3d)


@torch.no_grad()
def measure_psnr(vae: AutoencoderKLWan, subjects: Sequence[clips.Subject]) -> float:
    """Mean peak signal-to-noise ratio, in dB, of one clip of each subject, encoded and decoded frame by frame."""
    ratios = []
    for name, direction, colour in subjects:
        still = clips.draw_stills([name], torch.tensor(BACKGROUNDS[colour]) / 255)[0]
        clip = clips.draw_clip(still, direction, clips.Start(0, 0))[None]
        error = (vae.decode(vae.encode(clip).latent_dist.mean).sample - clip) / 2
        ratios.append(-10 * error.pow(2).mean().log10())
    return float(torch.stack(ratios).mean())


def train(
    subjects: Sequence[clips.Subject],
    *,
    minutes: float,
    max_steps: int | None = None,
    width: int = 24,
    learning_rate: float = 2e-3,
    kl_weight: float = 3e-4,
    average_decay: float = 0.995,
) -> tuple[AutoencoderKLWan, list[float]]:
    """Train on clips of these subjects; returns the averaged autoencoder and the loss of every step."""
    vae = build_vae(width)
    average = copy.deepcopy(vae)
    optimizer = torch.optim.AdamW(vae.parameters(), betas=(0.9, 0.99), weight_decay=1e-4)
    losses: list[float] = []
    for step, done in training_steps(minutes, max_steps):
        set_learning_rate(optimizer, learning_rate, step, done, warmup=50)
        frames, size = next((frames, size) for start, frames, size in reversed(SCHEDULE) if done >= start)
        batch = draw_batch(subjects, size, frames)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            posterior = encode_clip(vae, batch)
            output = decode_clip(vae, posterior.sample())
        mean, log_variance = posterior.mean.float(), posterior.logvar.float()
        kl = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).mean()
        pictures, targets = (clip.transpose(1, 2).flatten(0, 1) for clip in (output.float(), batch))
        loss = image_loss(pictures, targets) + kl_weight * kl

        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        update_average(average, vae, step, average_decay)
        losses.append(loss.item())
        if step % 100 == 0:
            recent = sum(losses[-100:]) / len(losses[-100:])
            print(f"step {step:5d}  {100 * done:3.0f} %  loss {recent:.4f}  kl {kl.item():.2f}", flush=True)
    return average.eval(), losses


def main() -> None:
    """Train with the settings of the recipe, save the autoencoder and print how well it keeps clips."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/emoji-wan/vae"))
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    vae, _ = train(clips.seen_subjects(), minutes=options.minutes, learning_rate=options.learning_rate)
    vae.save_pretrained(options.out)
    unseen = [clips.Subject(name, clips.held_out(name), "white") for name in clips.NAMES]
    print(f"held-out motions: {measure_psnr(vae, unseen):.2f} dB")


if __name__ == "__main__":
    main()
