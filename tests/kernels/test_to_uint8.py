from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusion_kernels.to_uint8 import bytes_moved, to_uint8, to_uint8_reference
from torch import Tensor

from tests.kernels.numerics import DEVICE, DTYPES, channels_last, random

LAYOUTS = [torch.contiguous_format, torch.channels_last]
SHAPES = [(1, 3, 1, 1), (1, 3, 7, 5), (2, 3, 32, 32), (3, 3, 29, 31)]


def check(x: Tensor) -> None:
    actual = to_uint8(x)
    batch, _, height, width = x.shape
    assert actual.shape == (batch, height, width, 3)
    assert actual.dtype == torch.uint8
    assert actual.is_contiguous()
    assert torch.equal(actual, to_uint8_reference(x))


def as_images(values: Tensor) -> Tensor:
    """An image [1, 3, H, 64] of these values, filled up with the last of them."""
    padding = -values.numel() % (3 * 64)
    padded = torch.cat([values, values[-1:].expand(padding)])
    return padded.view(1, -1, 64, 3).permute(0, 3, 1, 2).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(
    shape: tuple[int, ...], layout: torch.memory_format, dtype: torch.dtype
) -> None:
    check((random(*shape, dtype=dtype) * 0.8).contiguous(memory_format=layout))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_of_16_bits(dtype: torch.dtype) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    check(as_images(values[~values.isnan()]))


def test_halves_are_rounded_to_even() -> None:
    levels = (torch.arange(255, dtype=torch.float64) + 0.5) / 255 * 2 - 1
    # Of the float32 numbers around each half, those that the arithmetic takes to exactly that half.
    around = levels.float()[:, None] + torch.arange(-8, 9) * 2.0**-26
    halves = around[(around / 2 + 0.5) * 255 % 1 == 0.5]
    levels_below = ((halves / 2 + 0.5) * 255).int()
    assert set(levels_below.remainder(2).tolist()) == {0, 1}
    images = as_images(halves)
    check(images)
    assert bool((to_uint8(images) % 2 == 0).all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_is_what_diffusers_computes(layout: torch.memory_format) -> None:
    x = (random(2, 3, 16, 24) * 0.8).contiguous(memory_format=layout)
    images = VaeImageProcessor().postprocess(x, output_type="pil")
    assert np.array_equal(to_uint8(x).cpu().numpy(), np.stack([np.asarray(image) for image in images]))


def test_values_out_of_range() -> None:
    values = torch.tensor(
        [-1e30, float("-inf"), -1.0001, 1e30, float("inf"), 1.0001, -1.0, 1.0, float("nan")]
    )
    x = channels_last(values.view(1, 1, 3, 3).expand(1, 3, 3, 3))
    assert to_uint8(x)[0, :, :, 0].flatten().tolist() == [0, 0, 0, 255, 255, 255, 0, 255, 0]


REFUSED = [
    pytest.param(torch.zeros(1, 4, 2, 2), "expected \\[N, 3, H, W\\]", id="channels"),
    pytest.param(torch.zeros(3, 2, 2), "expected \\[N, 3, H, W\\]", id="dimensions"),
    pytest.param(torch.zeros(1, 3, 4, 4)[:, :, ::2], "contiguous or a channels_last", id="layout"),
    pytest.param(torch.zeros(1, 3, 0, 4), "x is empty", id="empty"),
    pytest.param(torch.zeros(1, 3, 4, 4, dtype=torch.uint8), "expected one of torch.float32", id="dtype"),
    pytest.param(torch.zeros(1, 3, 4, 4, device="meta"), "expected a CUDA tensor", id="device"),
    pytest.param(torch.zeros(1, 3, 4, 4, requires_grad=True), "x requires a gradient", id="gradient"),
]


@pytest.mark.parametrize(("x", "message"), REFUSED)
def test_refusals(x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_uint8(x if x.is_meta else x.to(DEVICE))


def test_bytes_moved() -> None:
    assert bytes_moved((1, 3, 1024, 1024), torch.bfloat16) == 3 * 3 * 1024 * 1024
