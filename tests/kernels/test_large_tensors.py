"""Tensors of more than 2^31 elements: offsets that 32 bits do not hold.

Under the interpreter only the last program of a kernel runs,
in memory that is never touched elsewhere; on a GPU all do.
"""

from __future__ import annotations

import builtins
from typing import Any

import pytest
import torch
from diffusion_kernels import group_norm_silu as group_norm
from diffusion_kernels.group_norm_silu import group_norm_silu
from diffusion_kernels.rms_norm_silu import rms_norm_silu, rms_norm_silu_reference
from diffusion_kernels.to_uint8 import to_uint8, to_uint8_reference
from torch import Tensor

from tests.kernels.numerics import DEVICE, assert_close, random

LARGE = 2**31
CHANNELS, GROUPS = 32, 4
SEEN = 8  # pixels at the end
ON_GPU = DEVICE == "cuda"


@pytest.fixture(autouse=True)
def only_the_last_program(monkeypatch: pytest.MonkeyPatch) -> None:
    if ON_GPU:
        return
    from triton.runtime import interpreter

    def last_of(*bounds: int) -> Any:
        numbers = builtins.range(*bounds)
        is_grid = len(bounds) == 1  # the loops of a kernel have three
        return numbers[-1:] if is_grid else numbers

    monkeypatch.setattr(interpreter, "range", last_of, raising=False)
    # The interpreter copies arguments to the host and back, all of them.
    monkeypatch.setattr(
        interpreter.GridExecutor, "_init_args_hst", lambda _, args, options: (list(args), options)
    )
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)


def empty(*shape: int, layout: torch.memory_format) -> Tensor:
    made = torch.empty(shape, dtype=torch.float16, device=DEVICE, memory_format=layout)
    assert made.numel() > LARGE
    return made.zero_() if ON_GPU else made  # elsewhere, memory is taken where it is written to


def test_group_norm_normalises_pixels_far_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    x = empty(1, CHANNELS, 1, LARGE // CHANNELS + SEEN, layout=torch.channels_last)
    x[..., -SEEN:] = random(1, CHANNELS, 1, SEEN, dtype=torch.float16)
    moments = torch.tensor([[[0.25] * GROUPS, [0.0] * GROUPS, [2.0] * GROUPS]], device=DEVICE)
    monkeypatch.setattr(group_norm, "_moments", lambda *_: moments)
    weight, bias = random(CHANNELS, seed=1), random(CHANNELS, seed=2)
    made = group_norm_silu(x, GROUPS, weight, bias)[..., -SEEN:]
    normalised = (x[..., -SEEN:].double() - 0.25) * 2
    per_channel = (1, CHANNELS, 1, 1)
    expected = normalised * weight.double().view(per_channel) + bias.double().view(per_channel)
    assert_close(made, torch.nn.functional.silu(expected))


def test_group_norm_sums_up_pictures_far_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last part of the third picture: the pivot, the mean from there, and the sum of squares about the mean."""
    partials: list[Tensor] = []

    class Fold:
        """In the place of the kernel that comes next."""

        def __getitem__(self, _: Any) -> Any:
            return lambda given, *_, **__: partials.append(given)

    monkeypatch.setattr(group_norm, "_fold_kernel", Fold())
    rows = LARGE // CHANNELS // 2
    x = empty(3, CHANNELS, 1, rows, layout=torch.channels_last)
    tiles = group_norm.STATISTICS_TILE // CHANNELS
    last = rows - 1 - (rows - 1) % group_norm._rows_per_split(rows, tiles, 1)
    x[2, :, :, last:] = random(CHANNELS, 1, rows - last, dtype=torch.float16) + 3
    group_norm._moments(x, GROUPS, 1e-6)
    pivot, mean, m2 = partials[0][2, -1].double()
    values = x[2, :, 0, last:].double()
    assert torch.equal(pivot, values[:, 0])
    torch.testing.assert_close(pivot + mean, values.mean(1), rtol=0, atol=1e-5)
    torch.testing.assert_close(m2, values.var(1, correction=0) * values.shape[1], rtol=1e-4, atol=0)


def test_rms_norm() -> None:
    x = empty(1, CHANNELS, 1, 1, LARGE // CHANNELS + SEEN, layout=torch.channels_last_3d)
    x[..., -SEEN:] = random(1, CHANNELS, 1, 1, SEEN, dtype=torch.float16)
    gamma = random(CHANNELS, seed=1)
    made = rms_norm_silu(x, gamma)[..., -SEEN:]
    assert_close(made, rms_norm_silu_reference(x[..., -SEEN:].double(), gamma.double()))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_bytes(layout: torch.memory_format) -> None:
    x = empty(1, 3, 1, LARGE // 3 + 2 * SEEN, layout=layout)  # the last program writes more than those seen
    x[..., -SEEN:] = random(1, 3, 1, SEEN, dtype=torch.float16)
    assert torch.equal(to_uint8(x)[:, :, -SEEN:], to_uint8_reference(x[..., -SEEN:]))
