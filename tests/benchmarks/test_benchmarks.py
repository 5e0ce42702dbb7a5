"""The benchmarks run, and report the figures they promise. How large those are is no matter of a test."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _figures(name: str, path: Path) -> dict[str, float]:
    script = ROOT / "benchmarks" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, str(script), "--quick", "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert " cores, " in done.stdout, "the machine is not named"
    figures = json.loads(path.read_text())
    assert isinstance(figures, dict)
    assert all(isinstance(value, int | float) and math.isfinite(value) for value in figures.values())
    return figures


def _assert_positive(figures: dict[str, float], names: tuple[str, ...]) -> None:
    assert {name: figures.get(name) for name in names if not figures.get(name, 0) > 0} == {}


def test_overhead(tmp_path: Path) -> None:
    """Times of all three ways; what they add may be anything, noise may even make it negative."""
    figures = _figures("overhead", tmp_path / "figures.json")
    _assert_positive(
        figures, ("rounds", "bare_ms", "naive_ms", "ours_ms", "naive_over_bare", "ours_over_bare")
    )
    _assert_positive(
        figures, ("ours_encode_ms", "ours_denoise_ms", "ours_decode_ms", "ours_outside_stages_ms")
    )
    assert {"naive_added_ms", "ours_added_ms"} <= figures.keys()


@pytest.mark.long
def test_first_request(tmp_path: Path) -> None:
    """The first and the tenth request after several starts."""
    figures = _figures("first_request", tmp_path / "figures.json")
    names = ("starts", "startup_seconds", "first_ms", "tenth_ms", "rest_ms")
    _assert_positive(figures, (*names, "first_over_tenth", "first_over_rest"))


@pytest.mark.long
def test_continuous_batching(tmp_path: Path) -> None:
    """Four servers under three loads, and what a step is made of."""
    figures = _figures("continuous_batching", tmp_path / "figures.json")
    _assert_positive(
        figures, ("throughput_vs_cap1", "batch_limit", "share_of_batch_limit", "p99_4step_vs_static")
    )
    _assert_positive(figures, ("p50_light_vs_cap1", "engine_ms_b1", "engine_ms_b8", "engine_ms_b32"))
    _assert_positive(figures, ("pipeline_ms", "request_ms", "forward_ms_1", "forward_ms_16"))


def test_step_costs() -> None:
    """The engine's own part of a step stays far below a forward, whatever the machine."""
    script = ROOT / "benchmarks/step_costs.py"
    command = [sys.executable, str(script), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert 0 < figures["engine_ms_b1"] < figures["engine_ms_b32"] < 10 * figures["forward_ms_1"]


@pytest.mark.long
def test_memory(tmp_path: Path) -> None:
    """Each stage holds its own weights more than the small model's same stage, and not all stages' weights."""
    figures = _figures("memory", tmp_path / "figures.json")
    for stage in ("encode", "denoise"):
        assert figures[f"{stage}_more_over_weights"] > 0.9
        assert figures[f"{stage}_more_private_mib"] < 0.9 * figures["weights_mib"]
