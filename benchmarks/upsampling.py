"""Three ways to double a picture and convolve it with 3x3 taps, side by side; vae_decode.py prints it.

doubled     nearest-neighbour doubling, then the convolution: the VAE's own
transposed  one transposed convolution of 4x4 taps: the fast decoder's (fast_layers.Upsample)
phases      a 2x2 convolution for each of the four output pixels of a source pixel, all as one of four times the
            channels, whose results are then interleaved

The last two multiply 2.25 times less. All compute in channels_last, on the shapes of AutoencoderKL.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import measure
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from diffusion_backend.fast_layers import Upsample
from torch import nn

ROUNDS = 7
MOST_DIFFERENCE = 0.1  # of values up to about 3, in bfloat16
# By the side of the picture, in pixels: channels, and the side before the doubling.
LAYERS = {512: ((512, 64), (512, 128), (256, 256)), 1024: ((512, 128), (512, 256), (256, 512))}
# Which taps of the transposed filter meet the two source pixels of an output pixel, by whether that is even or odd.
_TAPS = ((3, 1), (2, 0))


@dataclass(frozen=True)
class UpsamplingTime:
    """The best seconds of each way, of one layer."""

    channels: int
    side: int
    seconds: dict[str, float]

    def figures(self) -> dict[str, float]:
        prefix = f"upsampling_{self.channels}x{self.side}"
        return {f"{prefix}_{way}_ms": seconds * 1000 for way, seconds in self.seconds.items()}


def phase_weight(weight: torch.Tensor) -> torch.Tensor:
    """[4 D, C, 2, 2] from the transposed filter [C, D, 4, 4]: the four output pixels', one after the other."""
    return torch.cat(
        [weight[:, :, rows][..., columns] for rows in _TAPS for columns in _TAPS], dim=1
    ).transpose(0, 1)


def phases(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """[N, C, H, W] to [N, D, 2 H, 2 W]; ``weight`` is ``phase_weight``'s, ``bias`` [4 D]."""
    n, _, height, width = x.shape
    made = F.conv2d(x, weight, bias, padding=1).unflatten(1, (4, -1))
    y = x.new_empty((n, made.shape[2], 2 * height, 2 * width)).contiguous(memory_format=torch.channels_last)
    for index in range(4):
        row, column = divmod(index, 2)
        y[..., row::2, column::2] = made[:, index, :, row : row + height, column : column + width]
    return y


def ways(
    channels: int, side: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Callable[[], torch.Tensor]]:
    """Each on the same tensor and weights."""
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, channels, 3, padding=1).requires_grad_(False)
    transposed = Upsample(conv).to(device, dtype)
    weight = phase_weight(transposed.weight).contiguous(memory_format=torch.channels_last)
    bias = transposed.bias.repeat(4)
    conv = conv.to(device, dtype, memory_format=torch.channels_last)
    transposed.weight.data = transposed.weight.data.contiguous(memory_format=torch.channels_last)
    x = torch.randn(1, channels, side, side).to(device, dtype).contiguous(memory_format=torch.channels_last)
    return {
        "doubled": lambda: conv(F.interpolate(x, scale_factor=2.0, mode="nearest")),
        "transposed": lambda: transposed(x),
        "phases": lambda: phases(x, weight, bias),
    }


def time_upsampling(
    device: torch.device, dtype: torch.dtype, picture: int, rounds: int = ROUNDS
) -> Iterator[UpsamplingTime]:
    """Of every layer of a picture of that side, in shuffled turns."""
    order = random.Random(0)
    for channels, side in LAYERS[picture]:
        calls = ways(channels, side, device, dtype)
        best = dict.fromkeys(calls, float("inf"))
        doubled, *others = (call().float() for call in calls.values())
        for other in others:
            difference = (other - doubled).abs().max().item()
            if not difference <= MOST_DIFFERENCE:
                raise AssertionError(f"a way to upsample {channels} channels differs by {difference}")
        for _ in range(rounds):
            for way in order.sample(list(calls), len(calls)):
                best[way] = min(best[way], measure.seconds_of(calls[way], device))
        yield UpsamplingTime(channels, side, best)


def report(times: list[UpsamplingTime], dtype: torch.dtype) -> None:
    """Print a table, in ms."""
    measure.report(
        f"doubling and a 3x3 convolution, {str(dtype).removeprefix('torch.')}, best ms",
        ["", *times[0].seconds],
        [
            [f"{time.channels} channels, {time.side}²", *(1000 * each for each in time.seconds.values())]
            for time in times
        ],
    )
