"""The benchmarks run, and report the figures they promise. How large those are is no matter of a test."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


@pytest.mark.long
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


@pytest.mark.long
def test_vae_decode(tmp_path: Path) -> None:
    """Every way to decode, and what this machine reaches at all, on whatever it has."""
    figures = _figures("vae_decode", tmp_path / "figures.json")
    _assert_positive(figures, ("speedup", "psnr_db", "speedup_vs_compile", "share_of_floor"))
    _assert_positive(figures, ("copy_gb_per_second",))
    prefix = next(name for name in figures if name.endswith("_lossless_ms")).removesuffix("lossless_ms")
    for name in ("lossless", "fast", "compiled"):
        _assert_positive(figures, tuple(f"{prefix}{name}{what}_ms" for what in ("", "_median", "_cpu")))
        assert figures[f"{prefix}{name}_ms"] <= figures[f"{prefix}{name}_median_ms"]
    assert figures["speedup"] == pytest.approx(figures[f"{prefix}lossless_ms"] / figures[f"{prefix}fast_ms"])
    if not torch.cuda.is_available():  # what a CPU without bfloat16 units gets
        assert figures[f"{prefix}lossless_ms"] > 1.1 * figures[f"{prefix}fast_float32_ms"]


@pytest.mark.long
def test_vae_operations(tmp_path: Path) -> None:
    """The shares are those of the whole."""
    figures = _figures("vae_operations", tmp_path / "figures.json")
    for case in ("kl_128", "klqwenimage_64"):
        names = ("sums_ratio", "kernels_ratio", "share_of_convolutions", "share_of_normalizations_and_SiLU")
        _assert_positive(figures, tuple(f"{case}_{name}" for name in names))
        shares = [value for name, value in figures.items() if name.startswith(f"{case}_share_of")]
        assert sum(shares) == pytest.approx(1)


def test_vae_traffic(tmp_path: Path) -> None:
    """The fast decoder saves the FLOPs that its algebra saves, exactly, and the bytes of SiLU and doubled pictures."""
    figures = _figures("vae_traffic", tmp_path / "figures.json")
    # A convolution of 9 taps at 4 pixels becomes one of 16 taps at the pixel that they came from.
    upsamplings = sum(
        2 * (4 * 9 - 16) * c * c * side * side for c, side in ((512, 128), (512, 256), (256, 512))
    )
    projection = 2 * 512 * 512 * 128 * 128  # of the attention's output
    assert figures["eager_flops"] - figures["rewritten_flops"] == upsamplings + projection
    assert figures["eager_bytes"] / figures["rewritten_bytes"] == pytest.approx(figures["bytes_ratio"])
    silu_of_the_largest = 2 * 2 * 128 * 1024**2
    assert figures["rewritten_bytes"] < figures["eager_bytes"] - 5 * silu_of_the_largest
    assert figures["rewritten_operations"] < figures["eager_operations"]
    for name in ("eager", "rewritten"):
        memory, compute = (figures[f"{name}_h200_{what}_ms"] for what in ("memory", "compute"))
        assert max(memory, compute) < figures[f"{name}_h200_roofline_ms"] < memory + compute


def test_video_encoding(tmp_path: Path) -> None:
    """A clip's memory is not that of its frames: twice as many need hardly more."""
    figures = _figures("video_encoding", tmp_path / "figures.json")
    for case in ("one", "one_twice_as_long", "all"):
        names = ("before_mib", "peak_mib", "more_a_clip_mib", "seconds", "frames_per_second")
        _assert_positive(figures, tuple(f"{case}_{name}" for name in names))
    assert figures["clips"] == 8
    assert figures["one_twice_as_long_more_a_clip_mib"] < figures["one_more_a_clip_mib"] + 5


def test_the_benchmark_of_kernels() -> None:
    """It runs on a GPU alone: here its code does, on small tensors, in Triton's interpreter."""
    script = """if True:
        import json, torch, vae_kernels
        shapes = {"group_norm_silu": [(1, 32, 4, 4)], "rms_norm_silu": [(1, 16, 1, 4, 4)], "to_uint8": [(2, 3, 4, 4)]}
        times = vae_kernels.time_kernels(torch.device("cpu"), torch.float32, shapes, repeats=1)
        print(json.dumps([[time.kernel, time.bytes, time.figures(1.0)] for time in times]))
    """
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "benchmarks")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    times = {kernel: (moved, figures) for kernel, moved, figures in json.loads(done.stdout)}
    assert {kernel: moved for kernel, (moved, _) in times.items()} == {
        "group_norm_silu": 3 * 4 * 32 * 4 * 4,
        "rms_norm_silu": 2 * 4 * 16 * 4 * 4,
        "to_uint8": (4 + 1) * 2 * 3 * 4 * 4,
    }
    for kernel, (moved, figures) in times.items():
        (rate,) = (value for name, value in figures.items() if name.endswith("gb_per_second"))
        (us,) = (
            value for name, value in figures.items() if name.endswith("_us") and not name.endswith("torch_us")
        )
        assert rate == pytest.approx(moved / us / 1000), kernel


def test_job_list(tmp_path: Path) -> None:
    """A page costs about the same with a hundred jobs and with ten thousand."""
    figures = _figures("job_list", tmp_path / "figures.json")
    names = [
        f"sqlite_{count}_{kind}_p50_ms"
        for count in (100, 10_000)
        for kind in ("first", "behind", "ascending")
    ]
    _assert_positive(figures, (*names, "sqlite_10000_offset_p50_ms"))
    for kind in ("first", "behind", "ascending"):
        assert figures[f"sqlite_10000_{kind}_p50_ms"] < 3 * figures[f"sqlite_100_{kind}_p50_ms"]


def test_job_latency(tmp_path: Path) -> None:
    """A job starts, tells of progress and ends, in this order."""
    figures = _figures("job_latency", tmp_path / "figures.json")
    moments = ("job_answered", "job_started", "job_progressed", "job_completed")
    names = [f"{name}{tail}" for name in ("direct", *moments) for tail in ("_ms", "_p95_ms")]
    _assert_positive(figures, (*names, "rounds", "job_over_direct", "progressed_over_direct"))
    in_order = [figures[f"{name}_ms"] for name in moments]
    assert in_order == sorted(in_order)
