from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KERNELS = {
    "_statistics_kernel",
    "_fold_kernel",
    "_normalise_kernel",
    "_rms_norm_silu_kernel",
    "_to_uint8_kernel",
}
ON_CPU = """
import torch
from diffusion_kernels.to_uint8 import to_uint8
to_uint8(torch.zeros(1, 3, 2, 2))
"""


def run_without_interpreter(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_importing_the_package_does_not_import_triton(tmp_path: Path) -> None:
    program = "import sys, diffusion_kernels; sys.exit('triton' in sys.modules or 'torch' in sys.modules)"
    assert run_without_interpreter("-c", program, cache=tmp_path).returncode == 0


def test_tensors_on_the_cpu_are_refused(tmp_path: Path) -> None:
    result = run_without_interpreter("-c", ON_CPU, cache=tmp_path)
    assert "ValueError: x is on cpu: expected a CUDA tensor" in result.stderr


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    script = Path(__file__).with_name("compile_for_hopper.py")
    result = run_without_interpreter(str(script), cache=tmp_path_factory.mktemp("triton"))
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def binaries(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [report for report in reports if "kernel" in report]


@pytest.mark.parametrize("case", ["aligned", "one-pixel", "ragged"])
def test_every_kernel_compiles_for_hopper(case: str, binaries: list[dict[str, Any]]) -> None:
    assert {binary["kernel"] for binary in binaries if binary["case"] == case} == KERNELS


def test_aligned_tensors_are_read_and_written_16_bytes_at_a_time(binaries: list[dict[str, Any]]) -> None:
    for binary in binaries:
        if binary["case"] == "aligned" and binary["kernel"] in {"_normalise_kernel", "_rms_norm_silu_kernel"}:
            assert {"ld.global.v4.b32", "st.global.v4.b32"} <= set(binary["instructions"])
        if binary["case"] == "aligned" and binary["kernel"] == "_statistics_kernel":
            assert {"ld.global.v4.b32", "cp.async.cg.shared.global"} & set(binary["instructions"])


def test_levels_are_rounded_after_the_product_is(binaries: list[dict[str, Any]]) -> None:
    """A multiply-add in between would send halves to the odd level, which the interpreter does not show."""
    counts = [binary["multiply_adds"] for binary in binaries if binary["kernel"] == "_to_uint8_kernel"]
    assert counts
    assert not any(counts)


def test_a_new_size_compiles_and_tunes_nothing(reports: list[dict[str, Any]]) -> None:
    """The first picture of a size would wait for it, and sizes are the clients' to choose."""
    first = [report for report in reports if report["case"] == "size 0"]
    later = [report for report in reports if report["case"].startswith("size ") and report not in first]
    assert any("tuned" in report for report in first)
    assert len({report["case"] for report in later}) == 5
    assert not any("tuned" in report for report in later)
    assert {report["hash"] for report in later} <= {report["hash"] for report in first if "hash" in report}
