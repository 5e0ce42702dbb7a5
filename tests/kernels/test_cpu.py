"""The kernels for CPUs, as they were built with the package and, by the compiler here, for each kind of CPU alone."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_kernels import cpu
from diffusion_kernels.group_norm_silu import group_norm_silu_reference
from diffusion_kernels.rms_norm_silu import rms_norm_silu_reference
from torch import Tensor

from tests.kernels.numerics import assert_close, channels_last, random

EPS = 1e-6
ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("g++")
# What a CPU of each level of x86-64 has at least, in the words of torch.cpu.
LEVELS = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512_bw"}
GROUP_SHAPES = [
    pytest.param((1, 32, 32, 32), 32, id="one-channel-a-group"),
    pytest.param((2, 64, 37, 15), 8, id="ragged-chunks"),
    pytest.param((2, 96, 7, 5), 32, id="three-channels-a-group"),
    pytest.param((3, 24, 1, 1), 8, id="one-pixel"),
    pytest.param((1, 384, 6, 5), 32, id="384"),
    pytest.param((1, 301, 5, 4), 7, id="ragged-vectors"),
    pytest.param((2, 3, 3, 3), 1, id="less-than-a-vector"),
    pytest.param((1, 16, 300, 230), 4, id="long-chunks"),
]
RMS_SHAPES = [(1, 32, 2, 32, 32), (1, 96, 3, 7, 5), (3, 24, 1, 1, 1), (2, 30, 2, 3, 3), (2, 129, 90, 70)]


def compile_for(level: str, folder: Path) -> ctypes.CDLL:
    """The extension of pyproject.toml for one kind of CPU alone."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    (extension,) = settings["ext-modules"]
    target = folder / "kernels.so"
    options = [*extension["extra-compile-args"], "-shared", "-fPIC", "-DFOR_EACH_CPU=", f"-march={level}"]
    sources = [ROOT / source for source in extension["sources"]]
    assert COMPILER
    subprocess.run([COMPILER, *options, *sources, "-o", target], check=True, timeout=120)
    return ctypes.CDLL(str(target))


@pytest.fixture(scope="module", params=["installed", *LEVELS])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "installed":
        if not cpu.is_built():
            pytest.skip("the package was installed without a compiler")
        yield request.param
        return
    if COMPILER is None:
        pytest.skip("there is no g++")
    if not torch.cpu.get_capabilities().get(LEVELS[request.param]):
        pytest.skip(f"this CPU is no {request.param}")
    library = cpu.declare(compile_for(request.param, tmp_path_factory.mktemp(request.param)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_library", lambda: library)
        yield request.param


def parameters(channels: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return (1 + random(channels, dtype=dtype, seed=1) / 4).cpu(), random(channels, dtype=dtype, seed=2).cpu()


def image(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return channels_last(random(*shape, dtype=dtype)).cpu()


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_groups(x: Tensor, groups: int, *, silu: bool = True) -> None:
    weight, bias = parameters(x.shape[1], x.dtype)
    actual = cpu.group_norm_silu(x, groups, weight, bias, EPS, silu=silu)
    assert actual.dtype == x.dtype
    assert actual.is_contiguous(memory_format=torch.channels_last)
    expected = group_norm_silu_reference(x.double(), groups, weight.double(), bias.double(), EPS, silu=silu)
    assert_close(actual, expected)


def check_rms(x: Tensor, *, with_bias: bool = True, silu: bool = True) -> None:
    gamma, bias = parameters(x.shape[1], x.dtype)
    actual = cpu.rms_norm_silu(x, gamma, bias if with_bias else None, silu=silu)
    assert actual.dtype == x.dtype
    assert actual.is_contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    expected = rms_norm_silu_reference(
        x.double(), gamma.double(), bias.double() if with_bias else None, silu=silu
    )
    assert_close(actual, expected)


def test_they_are_built_where_there_is_a_compiler() -> None:
    assert cpu.is_built() or COMPILER is None


@pytest.mark.usefixtures("library")
class TestGroupNormSiLU:
    @pytest.mark.parametrize("dtype", cpu.DTYPES)
    @pytest.mark.parametrize(("shape", "groups"), GROUP_SHAPES)
    def test_equals_the_float64_reference(
        self, shape: tuple[int, ...], groups: int, dtype: torch.dtype
    ) -> None:
        check_groups((image(*shape, dtype=dtype) * 2 + 0.5).to(dtype), groups)

    @pytest.mark.parametrize("dtype", cpu.DTYPES)
    def test_without_silu(self, dtype: torch.dtype) -> None:
        check_groups(image(2, 24, 7, 5, dtype=dtype), 8, silu=False)

    @pytest.mark.parametrize("offset", [1e4, -1e4])
    def test_a_mean_far_from_zero_costs_no_precision(self, offset: float) -> None:
        check_groups(image(1, 96, 64, 32) + offset, 32, silu=False)

    def test_channels_of_a_group_with_means_far_apart(self) -> None:
        check_groups(image(1, 24, 16, 16) + torch.linspace(-1e4, 1e4, 24)[None, :, None, None], 8)

    @pytest.mark.parametrize("row", [0, 17])
    def test_a_pixel_unlike_the_others(self, row: int) -> None:
        x = image(1, 64, 32, 32)
        x[:, :, row, 0] = 1e4
        check_groups(x, 32)

    @pytest.mark.parametrize("dtype", cpu.DTYPES)
    @pytest.mark.parametrize("value", [0.0, 3.7, -1e4])
    def test_a_constant_image_becomes_the_bias(self, value: float, dtype: torch.dtype) -> None:
        weight, bias = parameters(24, dtype)
        x = channels_last(torch.full((1, 24, 5, 7), value, dtype=dtype)).cpu()
        expected = torch.nn.functional.silu(bias.double())[None, :, None, None].expand(x.shape)
        assert_close(cpu.group_norm_silu(x, 8, weight, bias, EPS), expected)

    @pytest.mark.parametrize("scale", [1e-20, 1e15, 1e18])
    @pytest.mark.parametrize("dtype", cpu.DTYPES)
    def test_tiny_and_large_values(self, scale: float, dtype: torch.dtype) -> None:
        check_groups((image(1, 64, 9, 9) * scale).to(dtype), 8)

    @pytest.mark.parametrize("dtype", cpu.DTYPES)
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_what_is_not_finite_stays_in_its_group_and_image(self, value: float, dtype: torch.dtype) -> None:
        x = image(2, 24, 9, 7, dtype=dtype)
        weight, bias = parameters(24)
        clean = cpu.group_norm_silu(x, 8, weight, bias, EPS)
        x[0, 4, 3, 3] = value
        result = cpu.group_norm_silu(x, 8, weight, bias, EPS)
        assert bool(result[0, 3:6].isnan().all())
        result[0, 3:6] = clean[0, 3:6]
        assert torch.equal(result, clean)

    def test_neither_threads_nor_a_batch_change_a_byte(self) -> None:
        x = image(3, 64, 61, 67)
        weight, bias = parameters(64)
        with threads(1):
            together = cpu.group_norm_silu(x, 4, weight, bias, EPS)
        with threads(3):
            alone = [cpu.group_norm_silu(each[None], 4, weight, bias, EPS) for each in x]
        assert torch.equal(torch.cat(alone), together)

    def test_parameters_may_be_of_another_dtype_than_the_input(self) -> None:
        x = image(1, 32, 4, 4, dtype=torch.bfloat16)
        weight, bias = parameters(32)
        expected = group_norm_silu_reference(x.double(), 8, weight.double(), bias.double(), EPS)
        assert_close(cpu.group_norm_silu(x, 8, weight, bias, EPS), expected)

    def test_silu_of_values_far_from_zero(self) -> None:
        weight, bias = torch.ones(8), torch.tensor([-1e4, -100.0, -89.0, -42.0, 42.0, 89.0, 100.0, 1e4])
        x = torch.zeros(1, 8, 1, 1)
        actual = cpu.group_norm_silu(x, 8, weight, bias, EPS).flatten().double()
        expected = torch.nn.functional.silu(bias.double())
        assert ((actual - expected).abs() < 1e-13 + 3 * torch.finfo(torch.float32).eps * expected.abs()).all()

    @pytest.mark.parametrize(("low", "high", "ulps"), [(-41.0, 0.0, 40), (0.0, 90.0, 3)])
    def test_silu_is_as_exact_as_promised(self, low: float, high: float, ulps: float) -> None:
        """A GroupNorm of zeros is its biases."""
        bias = torch.linspace(low, high, 100_001)
        x = torch.zeros(1, len(bias), 1, 1).contiguous(memory_format=torch.channels_last)
        actual = cpu.group_norm_silu(x, 1, torch.ones_like(bias), bias, EPS).flatten().double()
        expected = torch.nn.functional.silu(bias.double())
        assert ((actual - expected).abs() <= ulps * torch.finfo(torch.float32).eps * expected.abs()).all()


@pytest.mark.usefixtures("library")
class TestRmsNormSiLU:
    @pytest.mark.parametrize("dtype", cpu.DTYPES)
    @pytest.mark.parametrize("shape", RMS_SHAPES)
    def test_equals_the_float64_reference(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        check_rms((image(*shape, dtype=dtype) * 2 + 0.5).to(dtype))

    @pytest.mark.parametrize("with_bias", [True, False])
    @pytest.mark.parametrize("silu", [True, False])
    @pytest.mark.parametrize("dtype", cpu.DTYPES)
    def test_bias_and_silu_are_optional(self, with_bias: bool, silu: bool, dtype: torch.dtype) -> None:
        check_rms(image(2, 96, 2, 3, 5, dtype=dtype), with_bias=with_bias, silu=silu)

    @pytest.mark.parametrize("scale", [0.0, 1e-20, 1e-13, 1e-10, 1e15])
    def test_values_below_and_above_the_clamp_of_the_norm(self, scale: float) -> None:
        check_rms(image(1, 96, 2, 3, 3) * scale)

    def test_threads_do_not_change_a_byte(self) -> None:
        x = image(2, 129, 3, 61, 67)
        gamma, bias = parameters(129)
        made = []
        for count in (1, 3):
            with threads(count):
                made.append(cpu.rms_norm_silu(x, gamma, bias))
        assert torch.equal(*made)

    def test_what_is_not_a_number_stays_in_its_pixel(self) -> None:
        x = image(1, 96, 2, 5, 5, dtype=torch.bfloat16)
        gamma, bias = parameters(96)
        clean = cpu.rms_norm_silu(x, gamma, bias)
        x[0, 7, 1, 2, 3] = float("nan")
        result = cpu.rms_norm_silu(x, gamma, bias)
        assert bool(result[0, :, 1, 2, 3].isnan().all())
        result[0, :, 1, 2, 3] = clean[0, :, 1, 2, 3]
        assert torch.equal(result, clean)


REFUSED = [
    pytest.param({"x": torch.zeros(1, 32, 4, 4)}, "expected dense torch.channels_last", id="contiguous"),
    pytest.param({"x": torch.zeros(1, 32, 4)}, "has 3 dimensions", id="dimensions"),
    pytest.param(
        {"x": torch.zeros(1, 32, 4, 4, dtype=torch.float16)}, "torch.float32, torch.bfloat16", id="dtype"
    ),
    pytest.param({"x": torch.zeros(0, 32, 4, 4)}, "x is empty", id="empty"),
    pytest.param(
        {"x": torch.zeros(1, 32, 4, 4, device="meta")}, "x is on meta: expected a CPU tensor", id="device"
    ),
    pytest.param({"weight": torch.ones(31)}, r"weight has shape \(31,\)", id="weight-shape"),
    pytest.param({"weight": torch.ones(64)[::2]}, "weight has strides", id="weight-layout"),
    pytest.param({"bias": torch.ones(32, dtype=torch.int64)}, "bias is torch.int64", id="bias-dtype"),
    pytest.param({"bias": torch.ones(32, requires_grad=True)}, "bias requires a gradient", id="gradient"),
]
GROUPS_REFUSED = [
    pytest.param({"num_groups": 5}, "num_groups is 5: expected a divisor of the 32", id="groups"),
    pytest.param({"num_groups": 0}, "num_groups is 0", id="no-groups"),
]


def _arguments(changes: dict[str, Any]) -> dict[str, Any]:
    x = torch.zeros(1, 32, 4, 4).contiguous(memory_format=torch.channels_last)
    return {"x": x, "weight": torch.ones(32), "bias": torch.zeros(32), **changes}


@pytest.mark.parametrize(("changes", "message"), [*REFUSED, *GROUPS_REFUSED])
def test_group_norm_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cpu.group_norm_silu(**{"num_groups": 8, **_arguments(changes)})


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_rms_norm_refuses(changes: dict[str, Any], message: str) -> None:
    arguments = _arguments(changes)
    arguments["gamma"] = arguments.pop("weight")
    with pytest.raises(ValueError, match=message.replace("weight", "gamma")):
        cpu.rms_norm_silu(**arguments)


@pytest.mark.skipif(not cpu.is_built(), reason="the package was installed without a compiler")
def test_what_pytorch_makes_by_default_does_not_matter() -> None:
    """Loading a model sets the default dtype for a moment, for all threads."""
    x, weight, bias = image(2, 32, 33, 31), *parameters(32)
    kernels = (lambda: cpu.group_norm_silu(x, 8, weight, bias), lambda: cpu.rms_norm_silu(x, weight))
    expected = [kernel() for kernel in kernels]
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            made = [kernel() for kernel in kernels]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, made, expected))


def test_without_the_library_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_library", lambda: None)
    assert not cpu.is_built()
    with pytest.raises(
        RuntimeError, match=r"diffusion_kernels\._cpu is not there: install the package again"
    ):
        cpu.rms_norm_silu(_arguments({})["x"], torch.ones(32))
