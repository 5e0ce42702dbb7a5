"""The kernels for CPUs: what ``group_norm_silu`` and ``rms_norm_silu`` do on a GPU, compiled from C++.

They are compiled when the package is installed, where there is a C++ compiler; ``is_built`` says whether they were. One
library has a copy of each for AVX-512, AVX2 and neither, of which the CPU chooses. So bytes depend on the sort of CPU,
but neither on the rest of a batch nor on the number of threads. There are as many of these as PyTorch has.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from functools import cache

import torch
from torch import Tensor

from diffusion_kernels.checks import (
    require_channels_last,
    require_cpu,
    require_groups,
    require_input,
    require_no_grad,
    require_parameter,
)

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)
_LIBRARY = "diffusion_kernels._cpu"
# An image is divided into so many chunks, each with its moments: more where these would be larger than the largest, and
# fewer where they would be smaller than the smallest.
_CHUNKS = 64
_MIN_CHUNK_ROWS, _MAX_CHUNK_ROWS = 64, 1024
# What group_norm_silu.cpp has under the same names.
_PARTIALS, _COEFFICIENTS = 4, 3


@cache
def _library() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec(_LIBRARY)
    if spec is None or spec.origin is None:
        return None
    try:
        # PyTorch is there already, so one OpenMP runs the threads of both.
        return declare(ctypes.CDLL(spec.origin))
    except OSError as error:  # such as one that was built for another machine
        logger.warning("the kernels for CPUs cannot be loaded: %s", error)
        return None


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library, with the types of its functions' arguments."""
    pointer, size, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.diffusion_group_norm_silu.argtypes = [*[pointer] * 6, *[size] * 5, ctypes.c_double, *[flag] * 3]
    library.diffusion_group_norm_silu.restype = None
    library.diffusion_rms_norm_silu.argtypes = [*[pointer] * 4, *[size] * 2, *[flag] * 3]
    library.diffusion_rms_norm_silu.restype = None
    return library


def is_built() -> bool:
    """Whether the library is there, and can be loaded."""
    return _library() is not None


def _require_library() -> ctypes.CDLL:
    if (library := _library()) is None:
        raise RuntimeError(
            f"{_LIBRARY} is not there: install the package again where there is a C++ compiler (g++)"
        )
    return library


def group_norm_silu(
    x: Tensor, num_groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5, *, silu: bool = True
) -> Tensor:
    """``silu(group_norm(x, num_groups, weight, bias, eps))`` of channels_last images.

    Computed in float32 (the merging of moments in float64) and rounded once, to the dtype of ``x``. No gradient.

    Args:
        x: [N, C, H, W], dense in ``torch.channels_last``; float32 or bfloat16; on the CPU.
        num_groups: Divides C.
        weight: [C], contiguous; float32, bfloat16 or float16, whatever the dtype of ``x``.
        bias: The same as ``weight``.
        eps: Added to the variance.
        silu: Whether SiLU follows.

    Returns:
        A new tensor of the shape, dtype and layout of ``x``.

    Raises:
        RuntimeError: The library is not there (``is_built``).
        ValueError: ``x`` is empty, has other than 4 dimensions, is not dense in channels_last, of another dtype or not
            on the CPU; ``num_groups`` doesn't divide C; ``weight`` or ``bias`` has another shape, dtype, device or
            layout; a gradient is asked for.
    """
    require_cpu(x)
    require_input(x, DTYPES)
    layout = require_channels_last(x, (4,))
    require_parameter("weight", weight, x)
    require_parameter("bias", bias, x)
    require_no_grad(x=x, weight=weight, bias=bias)
    batch, channels, height, width = x.shape
    require_groups(num_groups, channels)
    rows = height * width
    rows_per_chunk = min(max(rows // _CHUNKS, _MIN_CHUNK_ROWS), _MAX_CHUNK_ROWS)
    chunks = -(-rows // rows_per_chunk)
    partials = torch.empty(batch, chunks, _PARTIALS, channels, dtype=torch.float32, device=x.device)
    coefficients = torch.empty(batch, _COEFFICIENTS, channels, dtype=torch.float32, device=x.device)
    weight, bias = weight.float(), bias.float()
    y = torch.empty_like(x, memory_format=layout)
    _require_library().diffusion_group_norm_silu(
        x.data_ptr(),
        y.data_ptr(),
        weight.data_ptr(),
        bias.data_ptr(),
        partials.data_ptr(),
        coefficients.data_ptr(),
        batch,
        rows,
        channels,
        num_groups,
        rows_per_chunk,
        eps,
        x.dtype == torch.bfloat16,
        silu,
        torch.get_num_threads(),
    )
    return y


def rms_norm_silu(x: Tensor, gamma: Tensor, bias: Tensor | None = None, *, silu: bool = True) -> Tensor:
    """``silu(F.normalize(x, dim=1) * sqrt(C) * gamma + bias)`` of channels_last videos or images.

    Computed in float32 and rounded once, to the dtype of ``x``. No gradient.

    Args:
        x: [N, C, F, H, W], dense in ``torch.channels_last_3d``, or [N, C, H, W], dense in ``torch.channels_last``;
            float32 or bfloat16; on the CPU.
        gamma: [C], [C, 1, 1] or [C, 1, 1, 1], contiguous; float32, bfloat16 or float16, whatever the dtype of ``x``.
        bias: None, or the same as ``gamma``.
        silu: Whether SiLU follows.

    Returns:
        A new tensor of the shape, dtype and layout of ``x``.

    Raises:
        RuntimeError: The library is not there (``is_built``).
        ValueError: ``x`` is empty, has other than 4 or 5 dimensions, is not dense in channels_last, of another dtype or
            not on the CPU; ``gamma`` or ``bias`` has another shape, dtype, device or layout; a gradient is asked for.
    """
    require_cpu(x)
    require_input(x, DTYPES)
    layout = require_channels_last(x, (4, 5))
    require_parameter("gamma", gamma, x)
    if bias is not None:
        require_parameter("bias", bias, x)
    require_no_grad(x=x, gamma=gamma, bias=bias)
    channels = x.shape[1]
    gamma = gamma.float()
    bias = torch.zeros_like(gamma) if bias is None else bias.float()
    y = torch.empty_like(x, memory_format=layout)
    _require_library().diffusion_rms_norm_silu(
        x.data_ptr(),
        y.data_ptr(),
        gamma.data_ptr(),
        bias.data_ptr(),
        x.numel() // channels,
        channels,
        x.dtype == torch.bfloat16,
        silu,
        torch.get_num_threads(),
    )
    return y
