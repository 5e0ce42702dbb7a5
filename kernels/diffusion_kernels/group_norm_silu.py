# ruff: noqa: N803, N806, N812
"""GroupNorm followed by SiLU over channels_last images, in two passes over memory.

Why: a VAE decoder that runs its convolutions in channels_last spends the rest of its time here. PyTorch has no
channels_last GroupNorm on CUDA (it copies to NCHW and back) and SiLU is one more pass. This reads the tensor twice and
writes it once, which is the least without fusing into the convolutions.

Statistics: a program takes some rows (pixels) of a channel block and keeps one Welford accumulator for each position of
its tile, so that loads are coalesced along the channels whatever the width of a group, and nothing is exchanged between
threads until the end. Values are taken relative to the first row of the split, which is exact near the mean. The second
kernel merges the (count, mean, M2) of splits and channels into groups with Chan's formula in float64 and hands the mean
on as a sum of two float32 numbers: a mean far from zero costs no precision, neither in the variance (where
E[x^2] - mean^2 cancels) nor in x - mean.

The same bytes come out whatever the batch beside an image and the outcome of autotuning: the split depends on the
image's size alone, and tuning touches only what does not change the order of a sum.

Source: B. P. Welford, "Note on a method for calculating corrected sums of squares and products" (1962);
T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances"
(1979); Y. Wu, K. He, "Group Normalization" (arXiv:1803.08494).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from diffusion_kernels.checks import (
    require_channels_last,
    require_groups,
    require_input,
    require_no_grad,
    require_parameter,
)
from diffusion_kernels.gpu import INTERPRETED, require_gpu

# Elements of a statistics tile: 32 for each thread of four warps, so that x, mean and M2 stay in registers.
STATISTICS_TILE = 4096
# Tiles a split at least, so that the partial results stay small beside the data, and programs an image at most: four
# for each of an H200's 132 multiprocessors.
MIN_TILES_PER_SPLIT = 4
MAX_PROGRAMS = 528
MAX_CHANNEL_BLOCK = 256
# A narrower block would not fill the 64 bytes of a memory access at 16 bits an element.
MIN_CHANNEL_BLOCK = 32
FOLD_TILE = 1024


# What depends on a picture's size: a kernel for each sort of number (1, a multiple of 16, any other) would have the
# first picture of a size wait for a compilation. The channels alone decide on how memory is read.
_OF_A_SIZE = ["rows", "rows_per_split", "splits"]


def _tunable(configs: list[Any]) -> list[Any]:
    """The configurations to time: only the first, the default, under the interpreter, where time says nothing."""
    return configs[:1] if INTERPRETED else configs


STATISTICS_CONFIGS = [triton.Config({"STAGES": stages}, num_warps=4) for stages in (2, 1, 3, 4)]
NORMALISE_CONFIGS = [
    triton.Config({"TILE": 4096}, num_warps=4),
    triton.Config({"TILE": 2048}, num_warps=4),
    triton.Config({"TILE": 4096}, num_warps=8),
    triton.Config({"TILE": 8192}, num_warps=8),
]


@triton.autotune(  # type: ignore[untyped-decorator]
    configs=_tunable(STATISTICS_CONFIGS),
    key=["channels"],
)
@triton.jit(do_not_specialize=_OF_A_SIZE)  # type: ignore[untyped-decorator]
def _statistics_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    partials_ptr,
    rows,
    channels,
    rows_per_split,
    splits,
    channel_blocks,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Writes pivot, mean - pivot and M2 of each channel of one split of one image to ``partials[n, split, :, c]``."""
    image = tl.program_id(1).to(tl.int64)
    # Neighbours in the grid share rows, hence cache lines.
    split = tl.program_id(0) // channel_blocks
    channel = (tl.program_id(0) % channel_blocks) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    row = tl.arange(0, BLOCK_ROWS)
    in_channels = channel < channels
    first = split.to(tl.int64) * rows_per_split
    last = tl.minimum(first + rows_per_split, rows)

    image_ptr = x_ptr + image * rows * channels
    pivot = tl.load(image_ptr + first * channels + channel, mask=in_channels, other=0.0).to(tl.float32)
    offsets = row[:, None] * channels + channel[None, :]
    mean = tl.zeros((BLOCK_ROWS, BLOCK_CHANNELS), tl.float32)
    m2 = tl.zeros((BLOCK_ROWS, BLOCK_CHANNELS), tl.float32)
    step = 0.0
    for start in tl.range(first, last, BLOCK_ROWS, num_stages=STAGES):
        mask = (row < last - start)[:, None] & in_channels[None, :]
        x = tl.load(image_ptr + start * channels + offsets, mask=mask, other=0.0).to(tl.float32)
        x -= pivot[None, :]
        step += 1.0
        delta = tl.where(mask, x - mean, 0.0)
        mean += delta * (1.0 / step)
        m2 += delta * (x - mean)

    height = last - first
    count = ((height - row + BLOCK_ROWS - 1) // BLOCK_ROWS).to(tl.float32)[:, None]
    channel_mean = tl.sum(count * mean, axis=0) / height.to(tl.float32)
    deviation = mean - channel_mean[None, :]
    channel_m2 = tl.sum(m2 + count * deviation * deviation, axis=0)
    partial_ptr = partials_ptr + (image * splits + split) * 3 * channels + channel
    tl.store(partial_ptr, pivot, mask=in_channels)
    tl.store(partial_ptr + channels, channel_mean, mask=in_channels)
    tl.store(partial_ptr + 2 * channels, channel_m2, mask=in_channels)


@triton.jit  # type: ignore[untyped-decorator]
def _split_means(  # type: ignore[no-untyped-def]
    group_ptr,
    start,
    rows,
    channels,
    rows_per_split,
    splits,
    group_width,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Counts and means of the splits from ``start`` on, the pointers to their M2 and the mask of those that exist."""
    split = start + tl.arange(0, BLOCK_SPLITS).to(tl.int64)[:, None]
    lane = tl.arange(0, BLOCK_WIDTH)[None, :]
    mask = (split < splits) & (lane < group_width)
    count = tl.where(mask, tl.minimum(rows - split * rows_per_split, rows_per_split), 0).to(tl.float64)
    partial_ptr = group_ptr + split * 3 * channels + lane
    pivot = tl.load(partial_ptr, mask=mask, other=0.0).to(tl.float64)
    mean = pivot + tl.load(partial_ptr + channels, mask=mask, other=0.0).to(tl.float64)
    return count, mean, partial_ptr + 2 * channels, mask


@triton.jit(do_not_specialize=_OF_A_SIZE)  # type: ignore[untyped-decorator]
def _fold_kernel(  # type: ignore[no-untyped-def]
    partials_ptr,
    moments_ptr,
    rows,
    channels,
    rows_per_split,
    splits,
    groups,
    group_width,
    eps,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Merges the splits and channels of one group; writes the mean in two parts and 1/std to ``moments[n, :, g]``."""
    group = tl.program_id(0)
    image = tl.program_id(1).to(tl.int64)
    group_ptr = partials_ptr + image * splits * 3 * channels + group * group_width

    size = tl.zeros((BLOCK_SPLITS, BLOCK_WIDTH), tl.float64)
    total = tl.zeros((BLOCK_SPLITS, BLOCK_WIDTH), tl.float64)
    for start in range(0, splits, BLOCK_SPLITS):
        count, mean, _, _ = _split_means(
            group_ptr, start, rows, channels, rows_per_split, splits, group_width, BLOCK_SPLITS, BLOCK_WIDTH
        )
        size += count
        total += count * mean
    group_size = tl.sum(size)
    group_mean = tl.sum(total) / group_size

    m2 = tl.zeros((BLOCK_SPLITS, BLOCK_WIDTH), tl.float64)
    for start in range(0, splits, BLOCK_SPLITS):
        count, mean, m2_ptr, mask = _split_means(
            group_ptr, start, rows, channels, rows_per_split, splits, group_width, BLOCK_SPLITS, BLOCK_WIDTH
        )
        deviation = mean - group_mean
        m2 += tl.load(m2_ptr, mask=mask, other=0.0).to(tl.float64) + count * deviation * deviation
    variance = tl.sum(m2) / group_size

    mean_high = group_mean.to(tl.float32)
    moment_ptr = moments_ptr + image * 3 * groups + group
    tl.store(moment_ptr, mean_high)
    tl.store(moment_ptr + groups, (group_mean - mean_high.to(tl.float64)).to(tl.float32))
    tl.store(moment_ptr + 2 * groups, (1.0 / tl.sqrt(variance + eps)).to(tl.float32))


@triton.autotune(  # type: ignore[untyped-decorator]
    configs=_tunable(NORMALISE_CONFIGS),
    key=["channels"],
)
@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _normalise_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    weight_ptr,
    bias_ptr,
    moments_ptr,
    rows,
    channels,
    groups,
    group_width,
    channel_blocks,
    SILU: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    TILE: tl.constexpr,
):
    """y = SiLU((x - mean) / std * weight + bias), a tile of rows and channels of one image."""
    BLOCK_ROWS: tl.constexpr = TILE // BLOCK_CHANNELS
    image = tl.program_id(1).to(tl.int64)
    start = (tl.program_id(0) // channel_blocks).to(tl.int64) * BLOCK_ROWS
    channel = (tl.program_id(0) % channel_blocks) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    row = tl.arange(0, BLOCK_ROWS)
    in_channels = channel < channels
    mask = (row < rows - start)[:, None] & in_channels[None, :]

    moment_ptr = moments_ptr + image * 3 * groups + channel // group_width
    mean_high = tl.load(moment_ptr, mask=in_channels)
    mean_low = tl.load(moment_ptr + groups, mask=in_channels)
    scale = tl.load(moment_ptr + 2 * groups, mask=in_channels)
    scale *= tl.load(weight_ptr + channel, mask=in_channels).to(tl.float32)
    bias = tl.load(bias_ptr + channel, mask=in_channels).to(tl.float32)

    base = (image * rows + start) * channels
    offsets = row[:, None] * channels + channel[None, :]
    x = tl.load(x_ptr + base + offsets, mask=mask).to(tl.float32)
    y = ((x - mean_high[None, :]) - mean_low[None, :]) * scale[None, :] + bias[None, :]
    if SILU:
        y *= tl.sigmoid(y)
    tl.store(y_ptr + base + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


def _channel_block(channels: int) -> int:
    """Channels of a tile: where it can, a power of two that divides them, so that no thread idles (96 -> 32)."""
    divisor = channels & -channels
    width = divisor if divisor >= MIN_CHANNEL_BLOCK else triton.next_power_of_2(channels)
    return min(int(width), MAX_CHANNEL_BLOCK)


def _rows_per_split(rows: int, block_rows: int, channel_blocks: int) -> int:
    """Rows of an image that one program sums up: whole tiles."""
    tiles = triton.cdiv(rows, block_rows)
    max_splits = max(1, MAX_PROGRAMS // channel_blocks)
    return block_rows * max(MIN_TILES_PER_SPLIT, int(triton.cdiv(tiles, max_splits)))


def _moments(x: Tensor, num_groups: int, eps: float) -> Tensor:
    """float32 [N, 3, groups]: the mean as two numbers to be added, and 1 / sqrt(variance + eps)."""
    batch, channels, height, width = x.shape
    rows = height * width
    block_channels = _channel_block(channels)
    block_rows = STATISTICS_TILE // block_channels
    channel_blocks = triton.cdiv(channels, block_channels)
    rows_per_split = _rows_per_split(rows, block_rows, channel_blocks)
    splits = triton.cdiv(rows, rows_per_split)
    partials = torch.empty(batch, splits, 3, channels, dtype=torch.float32, device=x.device)
    moments = torch.empty(batch, 3, num_groups, dtype=torch.float32, device=x.device)
    _statistics_kernel[(splits * channel_blocks, batch)](
        x,
        partials,
        rows,
        channels,
        rows_per_split,
        splits,
        channel_blocks,
        BLOCK_ROWS=block_rows,
        BLOCK_CHANNELS=block_channels,
    )
    group_width = channels // num_groups
    block_width = triton.next_power_of_2(group_width)
    _fold_kernel[(num_groups, batch)](
        partials,
        moments,
        rows,
        channels,
        rows_per_split,
        splits,
        num_groups,
        group_width,
        eps,
        BLOCK_SPLITS=max(1, FOLD_TILE // block_width),
        BLOCK_WIDTH=block_width,
    )
    return moments


def group_norm_silu(
    x: Tensor, num_groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5, *, silu: bool = True
) -> Tensor:
    """``silu(group_norm(x, num_groups, weight, bias, eps))`` of channels_last images.

    Computed in float32 and rounded once, to the dtype of ``x``. No gradient. The first call for a number of channels
    times a few block sizes on a GPU: make it before a CUDA graph is captured.

    Args:
        x: [N, C, H, W], dense in ``torch.channels_last``; float32, bfloat16 or float16; on CUDA.
        num_groups: Divides C; the groups need not be a power of two wide.
        weight: [C], contiguous; float32, bfloat16 or float16, whatever the dtype of ``x``.
        bias: The same as ``weight``.
        eps: Added to the variance.
        silu: Whether SiLU follows.

    Returns:
        A new tensor of the shape, dtype and layout of ``x``.

    Raises:
        ValueError: ``x`` is empty, has other than 4 dimensions, is not dense in channels_last, of another dtype, on the
            CPU (unless under Triton's interpreter) or a batch of more than 65535; ``num_groups`` doesn't divide C;
            ``weight`` or ``bias`` has another shape, dtype, device or layout; a gradient is asked for.
    """
    require_input(x)
    require_gpu(x)
    layout = require_channels_last(x, (4,))
    require_parameter("weight", weight, x)
    require_parameter("bias", bias, x)
    require_no_grad(x=x, weight=weight, bias=bias)
    batch, channels, height, width = x.shape
    require_groups(num_groups, channels)
    rows = height * width
    block_channels = _channel_block(channels)
    channel_blocks = triton.cdiv(channels, block_channels)
    y = torch.empty_like(x, memory_format=layout)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _normalise_kernel[
            lambda meta: (triton.cdiv(rows, meta["TILE"] // block_channels) * channel_blocks, batch)
        ](
            x,
            y,
            weight,
            bias,
            _moments(x, num_groups, eps),
            rows,
            channels,
            num_groups,
            channels // num_groups,
            channel_blocks,
            SILU=silu,
            BLOCK_CHANNELS=block_channels,
        )
    return y


def group_norm_silu_reference(
    x: Tensor, num_groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5, *, silu: bool = True
) -> Tensor:
    """The same in PyTorch's own operations, of any layout and floating dtype."""
    y = F.group_norm(x, num_groups, weight, bias, eps)
    return F.silu(y) if silu else y


def bytes_moved(shape: Sequence[int], dtype: torch.dtype) -> int:
    """The least memory traffic of one call on an ``x`` of that shape and dtype: two reads and one write of it."""
    return 3 * math.prod(shape) * dtype.itemsize
