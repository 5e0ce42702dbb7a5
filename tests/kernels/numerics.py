"""What the tests of kernels share: where they run, their inputs and how close is close enough."""

from __future__ import annotations

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Roundings that a float32 computation of a dozen operations may add up to, in units of eps.
ARITHMETIC_ROUNDINGS = 8


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compares with a float64 result: one ulp of the output's dtype, and float32's arithmetic at the largest value.

    A whole ulp, because the interpreter truncates to bfloat16 where a GPU rounds.
    """
    assert expected.dtype == torch.float64
    assert actual.shape == expected.shape
    assert bool(actual.isfinite().all())
    scale = max(1.0, expected.abs().max().item())
    arithmetic = ARITHMETIC_ROUNDINGS * torch.finfo(torch.float32).eps * scale
    allowed = torch.finfo(actual.dtype).eps * expected.abs() + arithmetic
    excess = ((actual.double() - expected).abs() / allowed).max().item()
    assert excess <= 1, f"{excess:.2f} times the allowed error"


def channels_last(x: Tensor) -> Tensor:
    """The tensor on the device under test, dense with its channels last."""
    layout = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    return x.to(DEVICE).contiguous(memory_format=layout)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normally distributed values, the same on every machine."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).to(DEVICE)
