# ruff: noqa: N803
"""The end of a decode: from the decoder's [-1, 1] to bytes of RGB pixels, in one pass.

What: y = round(clamp(x / 2 + 0.5, 0, 1) * 255) from [N, 3, H, W] to [N, H, W, 3], half to even: what
diffusers' ``VaeImageProcessor`` does with ``denormalize`` and ``numpy_to_pil``.

Why: as separate operations it reads and writes the tensor six times, and copies float32 to the host instead of bytes.

All of it is computed in float32. diffusers denormalises in the tensor's own dtype first, so for bfloat16 and float16
its bytes carry one more rounding and may differ by a level or two; for float32 they are the same. Not a number, which
diffusers leaves to the cast of the platform, becomes 0.

Source: diffusers, ``image_processor.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusion_kernels.checks import require_input, require_no_grad
from diffusion_kernels.gpu import require_gpu

BLOCK = 2048
# 2^23: a float32 of this size has no bits left for a fraction, so that adding it rounds, half to even.
NO_FRACTION = 8388608.0


@triton.jit  # type: ignore[untyped-decorator]
def _to_uint8_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    pixels,
    no_fraction,
    PLANAR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of the bytes of one image, in the order in which they are written."""
    image = tl.program_id(1).to(tl.int64) * 3 * pixels
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    mask = start + index < tl.cast(pixels, tl.int64) * 3
    if PLANAR:
        # 64-bit division once a program, not once an element.
        position = (start % 3).to(tl.int32) + index
        offsets = start // 3 + position // 3 + (position % 3).to(tl.int64) * pixels
    else:
        offsets = start + index
    x = tl.load(x_ptr + image + offsets, mask=mask, other=0.0)
    value = tl.clamp(x.to(tl.float32) * 0.5 + 0.5, 0.0, 1.0) * 255.0
    rounded = (value + no_fraction) - no_fraction
    tl.store(y_ptr + image + start + index, rounded.to(tl.uint8), mask=mask)


def to_uint8(x: Tensor) -> Tensor:
    """RGB bytes of decoded images: ``((x / 2 + 0.5).clamp(0, 1) * 255).round()``, channels last.

    Args:
        x: [N, 3, H, W] in [-1, 1] (values outside are clamped), contiguous or dense in ``torch.channels_last``;
            float32, bfloat16 or float16; on CUDA.

    Returns:
        uint8 [N, H, W, 3], contiguous, on the device of ``x``.

    Raises:
        ValueError: ``x`` is empty, has another number of dimensions or channels, is neither contiguous nor dense in
            channels_last, of another dtype, on the CPU (unless under Triton's interpreter) or a batch of more than
            65535; a gradient is asked for.
    """
    require_input(x)
    require_gpu(x)
    require_no_grad(x=x)
    if x.dim() != 4 or x.shape[1] != 3:
        raise ValueError(f"x has shape {tuple(x.shape)}: expected [N, 3, H, W]")
    batch, _, height, width = x.shape
    pixels = height * width
    planar = x.is_contiguous()
    if not planar and not x.is_contiguous(memory_format=torch.channels_last):
        raise ValueError(f"x has strides {x.stride()}: expected a contiguous or a channels_last tensor")
    y = torch.empty(batch, height, width, 3, dtype=torch.uint8, device=x.device)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _to_uint8_kernel[(triton.cdiv(3 * pixels, BLOCK), batch)](
            x,
            y,
            pixels,
            NO_FRACTION,
            PLANAR=planar,
            BLOCK=BLOCK,
            # One multiply-add would not round before it rounds to a level, and halves would not go to the even one.
            enable_fp_fusion=False,
        )
    return y


def to_uint8_reference(x: Tensor) -> Tensor:
    """The same in PyTorch's own operations, of any layout and floating dtype."""
    return ((x.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def bytes_moved(shape: Sequence[int], dtype: torch.dtype) -> int:
    """The least memory traffic of one call on an ``x`` of that shape and dtype: one read, one write of bytes."""
    return math.prod(shape) * (dtype.itemsize + 1)
