from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusion_kernels import group_norm_silu as group_norm
from diffusion_kernels.group_norm_silu import bytes_moved, group_norm_silu, group_norm_silu_reference
from torch import Tensor

from tests.kernels.numerics import DEVICE, DTYPES, assert_close, channels_last, random

EPS = 1e-6
SHAPES = [
    pytest.param((1, 32, 32, 32), 32, id="one-channel-a-group"),
    pytest.param((2, 64, 37, 15), 8, id="ragged-splits"),
    pytest.param((2, 96, 7, 5), 32, id="three-channels-a-group"),
    pytest.param((3, 24, 1, 1), 8, id="one-pixel"),
    pytest.param((1, 128, 13, 11), 32, id="128"),
    pytest.param((1, 192, 9, 7), 32, id="192"),
    pytest.param((1, 384, 6, 5), 32, id="384"),
    pytest.param((1, 300, 5, 4), 5, id="ragged-channel-blocks"),
    pytest.param((2, 24, 3, 3), 1, id="one-group"),
]


def parameters(channels: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return 1 + random(channels, dtype=dtype, seed=1) / 4, random(channels, dtype=dtype, seed=2)


def expected_of(x: Tensor, groups: int, weight: Tensor, bias: Tensor, *, silu: bool = True) -> Tensor:
    return group_norm_silu_reference(x.double(), groups, weight.double(), bias.double(), EPS, silu=silu)


def check(x: Tensor, groups: int, *, silu: bool = True) -> None:
    weight, bias = parameters(x.shape[1], x.dtype)
    actual = group_norm_silu(x, groups, weight, bias, EPS, silu=silu)
    assert actual.dtype == x.dtype
    assert actual.is_contiguous(memory_format=torch.channels_last)
    assert_close(actual, expected_of(x, groups, weight, bias, silu=silu))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "groups"), SHAPES)
def test_equals_the_float64_reference(shape: tuple[int, ...], groups: int, dtype: torch.dtype) -> None:
    check(channels_last(random(*shape, dtype=dtype) * 2 + 0.5), groups)


def test_without_silu() -> None:
    check(channels_last(random(2, 24, 7, 5)), 8, silu=False)


def test_parameters_may_be_of_another_dtype_than_the_input() -> None:
    x = channels_last(random(1, 32, 4, 4, dtype=torch.bfloat16))
    weight, bias = parameters(32, torch.float32)
    assert_close(group_norm_silu(x, 8, weight, bias, EPS), expected_of(x, 8, weight, bias))


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_a_mean_far_from_zero_costs_no_precision(offset: float) -> None:
    x = channels_last(random(1, 96, 32, 32) + offset)
    check(x, 32, silu=False)
    # The textbook's one pass over the same values.
    grouped = x.reshape(1, 32, -1)
    mean = grouped.mean(-1)
    one_pass = (grouped * grouped).mean(-1) - mean * mean
    assert (one_pass - grouped.double().var(-1, correction=0)).abs().max() > 0.1


def test_channels_of_a_group_with_means_far_apart() -> None:
    offsets = torch.linspace(-1e4, 1e4, 24, device=DEVICE)[None, :, None, None]
    check(channels_last(random(1, 24, 16, 16) + offsets), 8)


def test_a_first_pixel_unlike_the_others() -> None:
    x = random(1, 64, 16, 16)
    x[:, :, 0, 0] = 1e4
    check(channels_last(x), 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, 3.7, -1e4])
def test_a_constant_image_becomes_the_bias(value: float, dtype: torch.dtype) -> None:
    weight, bias = parameters(24, dtype)
    x = channels_last(torch.full((1, 24, 5, 7), value, dtype=dtype))
    # Not through the reference: its mean of equal float64 values is off by a rounding, and 1 / sqrt(eps) enlarges it.
    expected = torch.nn.functional.silu(bias.double())[None, :, None, None].expand(x.shape)
    assert_close(group_norm_silu(x, 8, weight, bias, EPS), expected)


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float16, 1.5e4), (torch.bfloat16, 1e15), (torch.float32, 1e15)]
)
def test_large_values(dtype: torch.dtype, scale: float) -> None:
    x = (random(1, 64, 9, 9) * scale).clamp(-4 * scale, 4 * scale)
    check(channels_last(x.to(dtype)), 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiny_values(dtype: torch.dtype) -> None:
    check(channels_last((random(1, 64, 9, 9) * 1e-20).to(dtype)), 8)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_group_and_image(value: float) -> None:
    x = channels_last(random(2, 24, 9, 7))
    weight, bias = parameters(24)
    clean = group_norm_silu(x, 8, weight, bias, EPS)
    x[0, 4, 3, 3] = value
    result = group_norm_silu(x, 8, weight, bias, EPS)
    assert bool(result[0, 3:6].isnan().any())
    result[0, 3:6] = clean[0, 3:6]
    assert torch.equal(result, clean)


def test_an_image_does_not_depend_on_its_batch() -> None:
    x = channels_last(random(3, 64, 17, 19))
    weight, bias = parameters(64)
    together = group_norm_silu(x, 4, weight, bias, EPS)
    for image in range(3):
        assert torch.equal(group_norm_silu(x[image : image + 1], 4, weight, bias, EPS)[0], together[image])


@pytest.mark.parametrize("kernel", [group_norm._statistics_kernel, group_norm._normalise_kernel])
def test_tuning_does_not_change_a_byte(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = channels_last(random(2, 96, 67, 61, dtype=torch.float16))
    weight, bias = parameters(96)
    default = group_norm_silu(x, 32, weight, bias, EPS)
    configs = (
        group_norm.STATISTICS_CONFIGS
        if kernel is group_norm._statistics_kernel
        else group_norm.NORMALISE_CONFIGS
    )
    assert len(configs) == 4
    for config in configs:
        monkeypatch.setattr(kernel, "configs", [config])
        assert torch.equal(group_norm_silu(x, 32, weight, bias, EPS), default), config


def test_the_input_is_left_alone() -> None:
    x = channels_last(random(1, 32, 4, 4))
    before = x.clone()
    group_norm_silu(x, 8, *parameters(32), EPS)
    assert torch.equal(x, before)


REFUSED = [
    pytest.param({"x": torch.zeros(1, 32, 4, 4)}, "expected dense torch.channels_last", id="contiguous"),
    pytest.param({"x": channels_last(torch.zeros(1, 64, 4, 4))[:, :32]}, "strides", id="slice"),
    pytest.param({"x": torch.zeros(1, 32, 4)}, "has 3 dimensions: expected 4", id="dimensions"),
    pytest.param(
        {"x": torch.zeros(1, 32, 4, 4, dtype=torch.float64)}, "expected one of torch.float32", id="dtype"
    ),
    pytest.param({"x": torch.zeros(0, 32, 4, 4)}, "x is empty", id="empty"),
    pytest.param({"x": torch.zeros(65536, 1, 1, 1), "num_groups": 1}, "at most 65535", id="batch"),
    pytest.param(
        {"x": torch.zeros(1, 32, 4, 4, device="meta")}, "x is on meta: expected a CUDA tensor", id="device"
    ),
    pytest.param({"num_groups": 5}, "num_groups is 5: expected a divisor of the 32", id="groups"),
    pytest.param({"num_groups": 0}, "num_groups is 0", id="no-groups"),
    pytest.param(
        {"weight": torch.ones(31)}, r"weight has shape \(31,\): expected \(32,\)", id="weight-shape"
    ),
    pytest.param({"bias": torch.ones(32, dtype=torch.int64)}, "bias is torch.int64", id="bias-dtype"),
    pytest.param(
        {"bias": torch.ones(32, device="meta")}, "bias is on meta: expected the device of x", id="bias-device"
    ),
    pytest.param({"weight": torch.ones(64)[::2]}, "weight has strides", id="weight-layout"),
    pytest.param({"weight": torch.ones(32, requires_grad=True)}, "weight requires a gradient", id="gradient"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "x": channels_last(torch.zeros(1, 32, 4, 4)),
        "num_groups": 8,
        "weight": torch.ones(32, device=DEVICE),
        "bias": torch.zeros(32, device=DEVICE),
    }
    for name, value in changes.items():
        on_cpu = isinstance(value, Tensor) and value.device.type == "cpu"
        arguments[name] = value.detach().to(DEVICE).requires_grad_(value.requires_grad) if on_cpu else value
    with pytest.raises(ValueError, match=message):
        group_norm_silu(**arguments)


def test_parameters_of_a_module_pass_without_gradients() -> None:
    norm = torch.nn.GroupNorm(8, 32, device=DEVICE)
    with torch.no_grad():
        group_norm_silu(channels_last(torch.zeros(1, 32, 4, 4)), 8, norm.weight, norm.bias)


def test_bytes_moved() -> None:
    assert bytes_moved((1, 128, 1024, 1024), torch.bfloat16) == 3 * 2 * 128 * 1024 * 1024
