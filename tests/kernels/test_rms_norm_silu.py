from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageRMS_norm
from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm
from diffusion_kernels.rms_norm_silu import bytes_moved, rms_norm_silu, rms_norm_silu_reference
from torch import Tensor

from tests.kernels.numerics import DEVICE, DTYPES, assert_close, channels_last, random

SHAPES = [
    pytest.param((1, 32, 2, 32, 32), id="32"),
    pytest.param((1, 96, 3, 7, 5), id="96"),
    pytest.param((2, 192, 2, 5, 4), id="192"),
    pytest.param((1, 384, 1, 7, 5), id="384"),
    pytest.param((3, 24, 1, 1, 1), id="one-pixel"),
    pytest.param((2, 30, 2, 3, 3), id="30"),
    pytest.param((2, 128, 9, 7), id="image"),
]


def parameters(channels: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return 1 + random(channels, dtype=dtype, seed=1) / 4, random(channels, dtype=dtype, seed=2)


def expected_of(x: Tensor, gamma: Tensor, bias: Tensor | None, *, silu: bool = True) -> Tensor:
    return rms_norm_silu_reference(
        x.double(), gamma.double(), None if bias is None else bias.double(), silu=silu
    )


def check(x: Tensor, *, with_bias: bool = True, silu: bool = True) -> None:
    gamma, bias = parameters(x.shape[1], x.dtype)
    optional_bias = bias if with_bias else None
    actual = rms_norm_silu(x, gamma, optional_bias, silu=silu)
    assert actual.dtype == x.dtype
    assert actual.is_contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    assert_close(actual, expected_of(x, gamma, optional_bias, silu=silu))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_float64_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(channels_last(random(*shape, dtype=dtype) * 2 + 0.5))


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("silu", [True, False])
def test_bias_and_silu_are_optional(with_bias: bool, silu: bool) -> None:
    check(channels_last(random(2, 96, 2, 3, 5)), with_bias=with_bias, silu=silu)


@pytest.mark.parametrize("norm_class", [WanRMS_norm, QwenImageRMS_norm])
@pytest.mark.parametrize("images", [True, False])
def test_is_what_diffusers_computes(norm_class: type[torch.nn.Module], images: bool) -> None:
    norm = norm_class(96, images=images, bias=True).to(DEVICE)
    gamma, bias = parameters(96)
    x = channels_last(random(1, 96, 4, 5) if images else random(1, 96, 2, 4, 5))
    with torch.no_grad():
        norm.gamma.copy_(gamma.view(norm.gamma.shape))
        norm.bias.copy_(bias.view(norm.bias.shape))
        actual = rms_norm_silu(x, norm.gamma, norm.bias)
        assert_close(actual, torch.nn.functional.silu(norm.double()(x.double())))


def test_parameters_may_be_of_another_dtype_than_the_input() -> None:
    x = channels_last(random(1, 96, 2, 3, 3, dtype=torch.bfloat16))
    gamma, bias = parameters(96)
    assert_close(rms_norm_silu(x, gamma, bias), expected_of(x, gamma, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, 3.7, -6e4])
def test_constant_videos(value: float, dtype: torch.dtype) -> None:
    check(channels_last(torch.full((1, 96, 2, 3, 3), value, dtype=dtype)))


@pytest.mark.parametrize("scale", [1e-20, 1e-13, 1e-10, 1e15])
def test_values_below_and_above_the_clamp_of_the_norm(scale: float) -> None:
    check(channels_last(random(1, 96, 2, 3, 3) * scale))


def test_what_is_not_a_number_stays_in_its_pixel() -> None:
    x = channels_last(random(1, 96, 2, 5, 5))
    gamma, bias = parameters(96)
    clean = rms_norm_silu(x, gamma, bias)
    x[0, 7, 1, 2, 3] = float("nan")
    result = rms_norm_silu(x, gamma, bias)
    assert bool(result[0, :, 1, 2, 3].isnan().all())
    result[0, :, 1, 2, 3] = clean[0, :, 1, 2, 3]
    assert torch.equal(result, clean)


REFUSED = [
    pytest.param(
        {"x": torch.zeros(1, 32, 2, 4, 4)}, "expected dense torch.channels_last_3d", id="contiguous"
    ),
    pytest.param({"x": channels_last(torch.zeros(1, 32, 2, 4, 4))[:, :, :, ::2]}, "strides", id="slice"),
    pytest.param({"x": torch.zeros(1, 32, 4)}, "has 3 dimensions: expected 4 or 5", id="dimensions"),
    pytest.param(
        {"x": torch.zeros(1, 32, 4, 4, dtype=torch.float64)}, "expected one of torch.float32", id="dtype"
    ),
    pytest.param({"x": torch.zeros(1, 32, 0, 4, 4)}, "x is empty", id="empty"),
    pytest.param({"x": torch.zeros(1, 32, 2, 4, 4, device="meta")}, "expected a CUDA tensor", id="device"),
    pytest.param({"gamma": torch.ones(1, 32)}, r"gamma has shape \(1, 32\)", id="gamma-shape"),
    pytest.param({"gamma": torch.ones(32, dtype=torch.float64)}, "gamma is torch.float64", id="gamma-dtype"),
    pytest.param(
        {"bias": torch.ones(32, device="meta")}, "bias is on meta: expected the device of x", id="bias-device"
    ),
    pytest.param({"bias": torch.ones(32, requires_grad=True)}, "bias requires a gradient", id="gradient"),
    pytest.param({"x": torch.zeros(1, 4097, 1, 1), "gamma": torch.ones(4097)}, "at most 4096", id="channels"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "x": channels_last(torch.zeros(1, 32, 2, 4, 4)),
        "gamma": torch.ones(32, device=DEVICE),
    }
    for name, value in changes.items():
        on_cpu = value.device.type == "cpu"
        arguments[name] = value.detach().to(DEVICE).requires_grad_(value.requires_grad) if on_cpu else value
    with pytest.raises(ValueError, match=message):
        rms_norm_silu(**arguments)


def test_bytes_moved() -> None:
    assert bytes_moved((1, 96, 5, 480, 832), torch.bfloat16) == 2 * 2 * 96 * 5 * 480 * 832
