# ruff: noqa: N803, N812
"""The RMS norm of the Wan and Qwen-Image VAEs followed by SiLU over channels_last videos and images, in one pass.

What: y = SiLU(x / max(||x||, 1e-12) * sqrt(C) * gamma + bias), with the 2-norm of each pixel's channels: diffusers'
``WanRMS_norm`` and ``QwenImageRMS_norm``, which are ``F.normalize`` with its clamp of the norm rather than an eps under
the root.

Why: as separate operations it reads and writes the tensor six times. In channels_last a pixel's channels lie side by
side, so a program loads whole rows of them into registers, and one read and one write are left.

The tile is fixed rather than autotuned: another one would sum a row in another order, and the bytes of a decoded video
must not depend on what a timing came out to.

Source: B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467);
diffusers, ``models/autoencoders/autoencoder_kl_wan.py`` and ``autoencoder_kl_qwenimage.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from diffusion_kernels.checks import (
    require_channels_last,
    require_input,
    require_no_grad,
    require_parameter,
)
from diffusion_kernels.gpu import require_gpu

# What F.normalize clamps the norm to.
MIN_NORM = 1e-12
# Elements of a tile, 32 for each thread of four warps; hence also the longest row.
TILE = 4096
MAX_CHANNELS = TILE


# "rows" is of a picture's size: see group_norm_silu.py.
@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _rms_norm_silu_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    gamma_ptr,
    bias_ptr,
    rows,
    channels,
    root_channels,
    min_norm,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """One block of pixels, each with all its channels."""
    start = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    row = tl.arange(0, BLOCK_ROWS)
    channel = tl.arange(0, BLOCK_CHANNELS)
    in_channels = channel < channels
    mask = (row < rows - start)[:, None] & in_channels[None, :]
    offsets = row[:, None] * channels + channel[None, :]
    x = tl.load(x_ptr + start * channels + offsets, mask=mask, other=0.0).to(tl.float32)
    norm = tl.sqrt(tl.sum(x * x, axis=1))
    # Not a number must stay one, as in F.normalize.
    norm = tl.maximum(norm, min_norm, propagate_nan=tl.PropagateNan.ALL)
    gamma = tl.load(gamma_ptr + channel, mask=in_channels, other=0.0).to(tl.float32)
    y = x * (root_channels / norm)[:, None] * gamma[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + channel, mask=in_channels, other=0.0).to(tl.float32)[None, :]
    if SILU:
        y *= tl.sigmoid(y)
    tl.store(y_ptr + start * channels + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


def rms_norm_silu(x: Tensor, gamma: Tensor, bias: Tensor | None = None, *, silu: bool = True) -> Tensor:
    """``silu(F.normalize(x, dim=1) * sqrt(C) * gamma + bias)`` of channels_last videos or images.

    Computed in float32 and rounded once, to the dtype of ``x``; diffusers rounds after each operation. No gradient.

    Args:
        x: [N, C, F, H, W], dense in ``torch.channels_last_3d``, or [N, C, H, W], dense in ``torch.channels_last``;
            float32, bfloat16 or float16; at most 4096 channels; on CUDA.
        gamma: [C], [C, 1, 1] or [C, 1, 1, 1], contiguous; float32, bfloat16 or float16, whatever the dtype of ``x``.
        bias: None, or the same as ``gamma``.
        silu: Whether SiLU follows.

    Returns:
        A new tensor of the shape, dtype and layout of ``x``.

    Raises:
        ValueError: ``x`` is empty, has other than 4 or 5 dimensions, is not dense in channels_last, of another dtype,
            on the CPU (unless under Triton's interpreter), of more than 4096 channels or a batch of more than 65535;
            ``gamma`` or ``bias`` has another shape, dtype, device or layout; a gradient is asked for.
    """
    require_input(x)
    require_gpu(x)
    layout = require_channels_last(x, (4, 5))
    require_parameter("gamma", gamma, x)
    if bias is not None:
        require_parameter("bias", bias, x)
    require_no_grad(x=x, gamma=gamma, bias=bias)
    channels = x.shape[1]
    if channels > MAX_CHANNELS:
        raise ValueError(f"x has {channels} channels: expected at most {MAX_CHANNELS}")
    rows = x.numel() // channels
    block_channels = triton.next_power_of_2(channels)
    block_rows = TILE // block_channels
    y = torch.empty_like(x, memory_format=layout)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _rms_norm_silu_kernel[(triton.cdiv(rows, block_rows),)](
            x,
            y,
            gamma,
            bias,
            rows,
            channels,
            math.sqrt(channels),
            MIN_NORM,
            HAS_BIAS=bias is not None,
            SILU=silu,
            BLOCK_ROWS=block_rows,
            BLOCK_CHANNELS=block_channels,
        )
    return y


def rms_norm_silu_reference(
    x: Tensor, gamma: Tensor, bias: Tensor | None = None, *, silu: bool = True
) -> Tensor:
    """The same in PyTorch's own operations, of any layout and floating dtype."""
    per_channel = (-1,) + (1,) * (x.dim() - 2)
    y = F.normalize(x, dim=1) * math.sqrt(x.shape[1]) * gamma.view(per_channel)
    if bias is not None:
        y = y + bias.view(per_channel)
    return F.silu(y) if silu else y


def bytes_moved(shape: Sequence[int], dtype: torch.dtype) -> int:
    """The least memory traffic of one call on an ``x`` of that shape and dtype: one read and one write of it."""
    return 2 * math.prod(shape) * dtype.itemsize
