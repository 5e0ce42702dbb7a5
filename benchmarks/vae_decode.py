"""One VAE decode in every way there is, side by side, on this machine's CPU or, where there is one, its GPU.

lossless       the VAE as diffusers runs it, in the dtype that the stage gives it: float32 on a CPU, bfloat16 on a GPU
fast           the rewritten decoder, as the stage installs it, through the gate
fast float32   the rewritten decoder as a CPU without bfloat16 units has it
compiled       torch.compile (its default mode) of the VAE's own decoder
compiled fast  the same in the fast decoder's dtype, in channels_last

All are measured in one run, in shuffled turns, in a process with a stage's environment. Ratios are of the best times.

Two PSNRs against lossless. ``psnr_db`` is that of the check at load (fast_path.py): of pictures of 0 to 255, white
against black being 0 dB. ``own_range_psnr_db`` is of the unclamped output, against the span of its values.

The floor is what the convolutions and products of matrices of the fast decoder would take at the highest rate that this
machine reaches at all: of large products of matrices and one lone convolution in the same dtype, in the same turns.
"""

from __future__ import annotations

import copy
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from diffusion_backend import tritonserver
from diffusion_backend.stages.common import tune_process

if __name__ == "__main__":
    # glibc reads its MALLOC_ variables, and OpenMP its own, when a process starts: become one that has the stages'.
    _before = dict(os.environ)
    tune_process()
    _served = tritonserver._environment("auto").items()
    os.environ.update({name: value for name, value in _served if name.startswith("MALLOC_")})
    if os.environ != _before:
        os.execv(sys.executable, [sys.executable, *sys.argv])

import measure
import torch
import vae_traffic
from diffusers.image_processor import VaeImageProcessor
from diffusers.video_processor import VideoProcessor
from diffusion_backend import fast_path
from diffusion_backend.config_text import FAST_PATH_MIN_PSNR_DB
from diffusion_backend.fast_decoders import FastDecoder
from diffusion_backend.fast_path_gate import register_vae_fast_path_gate, use_vae_fast_path
from diffusion_backend.loading import quiet_libraries
from torch.nn import functional
from vaes import FACTOR, Case

HEADLINE = "AutoencoderKL"
COMPILED = ("AutoencoderKL", "AutoencoderKLFlux2")
NOT_COMPILED = (
    "not compiled: its decoder keeps frames of the last call in lists, and is compiled anew for each state"
)
IDENTICAL_DB = 200.0


@dataclass(frozen=True)
class Plan:
    """What is measured, and for how long. Lossless CPU decodes take seconds, and a compilation most of a minute."""

    cases: tuple[Case, ...]
    rounds: int  # at least
    most_rounds: int
    seconds: float  # for the rounds of a case beyond ``rounds``
    compile_until: float  # no further compilation is begun later than so many seconds after the start
    compile_both: tuple[str, ...]  # cases that are compiled in the fast dtype, too
    peak_side: int  # of the matrices
    copied_bytes: int

    @classmethod
    def of(cls, device: torch.device, *, is_quick: bool) -> Plan:
        kl, flux2 = HEADLINE, "AutoencoderKLFlux2"
        if device.type == "cuda":
            # What matters most comes first: later ones are not compiled any more.
            first = (
                Case(kl, 1024),
                Case(kl, 512),
                Case(kl, 2048),
                Case(flux2, 1024),
                Case(kl, 1024, batch=4),
            )
            rest = (
                *(Case(kl, side, batch=4) for side in (512, 2048)),
                *(Case(flux2, side) for side in (512, 2048)),
                *(Case(flux2, side, batch=4) for side in (512, 1024, 2048)),
            )
            cases = first[:1] if is_quick else first + rest
            return cls(cases, 5, 20, 3.0, 200.0, ("kl_1024",), 8192, 4 << 30)
        cases = (Case(kl, 256),)
        if not is_quick:
            cases += (
                Case(kl, 512),
                Case(flux2, 256),
                Case("AutoencoderKLWan", 128, frames=2),
                Case("AutoencoderKLQwenImage", 256, frames=1),
            )
        return cls(
            cases,
            3 if is_quick else 5,
            3 if is_quick else 10,
            20.0,
            0.0 if is_quick else 600.0,
            () if is_quick else ("kl_256", "kl_512"),
            2048,
            256 << 20,
        )


@dataclass
class Contender:
    """A way to decode, and what it took: seconds, and seconds of this process's CPU time."""

    name: str
    decode: Callable[[], torch.Tensor]
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    quality: dict[str, float] = field(default_factory=dict)

    def take_turn(self, device: torch.device) -> None:
        before = time.process_time()
        self.seconds.append(measure.seconds_of(self.decode, device))
        self.cpu_seconds.append(time.process_time() - before)

    @property
    def best(self) -> float:
        return min(self.seconds)


class Ceilings:
    """What this machine reaches at all: FLOPs a second by dtype, and bytes a second of a copy."""

    def __init__(self, device: torch.device, plan: Plan, dtypes: set[torch.dtype]) -> None:
        self.flops_per_second = dict.fromkeys(dtypes, 0.0)
        self.matmul_flops_per_second = dict.fromkeys(dtypes, 0.0)
        self.bytes_per_second = 0.0
        self._device = device
        self._repeats = 10 if device.type == "cuda" else 1
        self._work = {dtype: list(self._products(plan.peak_side, dtype)) for dtype in dtypes}
        self._source = torch.ones(plan.copied_bytes, dtype=torch.uint8, device=device)
        self._target = torch.empty_like(self._source)

    def _products(
        self, side: int, dtype: torch.dtype
    ) -> list[tuple[bool, float, Callable[[], torch.Tensor]]]:
        """Whether it is of matrices, the FLOPs, and the call: two sizes of matrices, and a decoder's convolution."""
        products = []
        for size in (side // 2, side):
            a, b = (torch.randn(size, size, device=self._device).to(dtype) for _ in range(2))
            products.append((True, 2.0 * size**3, lambda a=a, b=b: a @ b))
        channels, pixels = 256, side // 16
        form = {"device": self._device, "dtype": dtype, "memory_format": torch.channels_last}
        x = torch.randn(1, channels, pixels, pixels).to(**form)
        weight = torch.randn(channels, channels, 3, 3).to(**form)
        flops = 2.0 * 9 * channels**2 * pixels**2
        products.append((False, flops, lambda: functional.conv2d(x, weight, padding=1)))
        return products  # type: ignore[return-value]

    def take_turn(self) -> None:
        for dtype, products in self._work.items():
            for is_matmul, flops, call in products:
                rate = flops / measure.seconds_of(call, self._device, self._repeats)
                self.flops_per_second[dtype] = max(self.flops_per_second[dtype], rate)
                if is_matmul:
                    self.matmul_flops_per_second[dtype] = max(self.matmul_flops_per_second[dtype], rate)
        seconds = measure.seconds_of(lambda: self._target.copy_(self._source), self._device, self._repeats)
        self.bytes_per_second = max(self.bytes_per_second, 2 * self._source.numel() / seconds)

    def figures(self) -> dict[str, float]:
        rates = {
            f"{what}_{_name(dtype)}_gflops": rate / 1e9
            for what, by_dtype in (("peak", self.flops_per_second), ("matmul", self.matmul_flops_per_second))
            for dtype, rate in by_dtype.items()
        }
        return {**rates, "copy_gb_per_second": self.bytes_per_second / 1e9}


@dataclass
class Result:
    """A case's contenders, and why others are missing."""

    case: Case
    fast_dtype: torch.dtype
    contenders: list[Contender]
    notes: list[str]
    compile_seconds: dict[str, float] = field(default_factory=dict)

    def of(self, name: str) -> Contender | None:
        return next((contender for contender in self.contenders if contender.name == name), None)

    def figures(self, ceilings: Ceilings, vae_dtype: torch.dtype) -> dict[str, float]:
        lossless, fast = self.of("lossless"), self.of("fast")
        assert lossless is not None
        assert fast is not None
        traffic = vae_traffic.count(self.case, vae_dtype, self.fast_dtype)
        peak = ceilings.flops_per_second[self.fast_dtype]
        floor = traffic.flops / peak
        roofline = traffic.roofline_seconds(peak, ceilings.bytes_per_second)
        figures = {
            "speedup": lossless.best / fast.best,
            "median_speedup": statistics.median(lossless.seconds) / statistics.median(fast.seconds),
            "gflop": traffic.flops / 1e9,
            "lossless_gflop": vae_traffic.count(self.case, vae_dtype).flops / 1e9,
            "floor_ms": floor * 1000,
            "share_of_floor": floor / fast.best,
            "roofline_ms": roofline * 1000,
            "rounds": len(fast.seconds),
            **fast.quality,
        }
        for contender in self.contenders:
            name = contender.name.replace(" ", "_")
            figures |= {
                f"{name}_ms": contender.best * 1000,
                f"{name}_median_ms": statistics.median(contender.seconds) * 1000,
                f"{name}_cpu_ms": min(contender.cpu_seconds) * 1000,
                **{f"{name}_{what}": value for what, value in contender.quality.items()},
            }
        for name, seconds in self.compile_seconds.items():
            figures[f"{name.replace(' ', '_')}_first_call_seconds"] = seconds
            compiled = self.of(name)
            if compiled is not None:
                figures[f"speedup_vs_{name.replace('compiled', 'compile').replace(' ', '_')}"] = (
                    compiled.best / fast.best
                )
        return figures


def compare(output: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """How far a VAE's output is from the lossless one."""
    output, reference = output.float(), reference.float()
    difference = output - reference
    span = (reference.max() - reference.min()).item()
    levels = (_levels(output) - _levels(reference)).abs()
    return {
        "psnr_db": _psnr(levels, 255.0),
        "own_range_psnr_db": _psnr(difference, span),
        "max_abs": difference.abs().max().item(),
        "max_levels": levels.max().item(),
    }


def _levels(output: torch.Tensor) -> torch.Tensor:
    return ((output / 2 + 0.5).clamp(0, 1) * 255).round()


def _psnr(difference: torch.Tensor, peak: float) -> float:
    mse = difference.double().pow(2).mean().item()
    return 10 * math.log10(peak**2 / mse) if mse else IDENTICAL_DB


def pipeline(vae: Any, device: torch.device, case: Case) -> Any:
    """As much of a pipeline as decoding needs."""
    if (case.frames or 1) > 1:
        return SimpleNamespace(
            vae=vae, device=device, video_processor=VideoProcessor(vae_scale_factor=FACTOR)
        )
    return SimpleNamespace(vae=vae, device=device, image_processor=VaeImageProcessor(vae_scale_factor=FACTOR))


def decoding(vae: Any, latents: torch.Tensor, *, is_fast: bool = False) -> Callable[[], torch.Tensor]:
    """A decode with the VAE's own decoder, or through the gate with the fast one."""

    def decode() -> torch.Tensor:
        with torch.no_grad(), use_vae_fast_path(vae, is_fast):
            decoded: torch.Tensor = vae.decode(latents, return_dict=False)[0]
        return decoded

    return decode


def compiled(vae: Any, latents: torch.Tensor, dtype: torch.dtype | None) -> Callable[[], torch.Tensor]:
    """A decode with the VAE's own decoder compiled: as it is, or in ``dtype`` and channels_last."""
    vae = copy.deepcopy(vae)
    if dtype is not None:
        vae.to(dtype=dtype, memory_format=torch.channels_last)
        latents = latents.to(dtype).contiguous(memory_format=torch.channels_last)
    vae.decoder = torch.compile(vae.decoder, dynamic=False)
    return decoding(vae, latents)


def measure_case(
    case: Case, device: torch.device, plan: Plan, ceilings: Ceilings, started: float
) -> Result | None:
    """All contenders in shuffled turns; None if it does not fit into the GPU's memory."""
    try:
        return _measure_case(case, device, plan, ceilings, started)
    except torch.OutOfMemoryError:
        print(f"{case.name}: left out, it does not fit into memory", file=sys.stderr)
        return None
    finally:
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure_case(case: Case, device: torch.device, plan: Plan, ceilings: Ceilings, started: float) -> Result:
    dtype = vae_dtype(device)
    vae, latents = case.build(device, dtype), case.latents(device, dtype)
    plain = copy.deepcopy(vae)  # without a gate
    path = fast_path.install(
        pipeline(vae, device, case), case.latents_shape, device=device, min_psnr_db=FAST_PATH_MIN_PSNR_DB
    )
    if path.state != "installed":
        sys.exit(f"error: {case.vae} has no fast path: {path.reason}")
    fast_dtype: torch.dtype = getattr(torch, path.dtype or "")
    result = Result(
        case,
        fast_dtype,
        [
            Contender("lossless", decoding(vae, latents)),
            Contender("fast", decoding(vae, latents, is_fast=True)),
        ],
        [],
    )
    if device.type == "cpu" and fast_dtype != torch.float32:
        without_units = copy.deepcopy(plain)
        register_vae_fast_path_gate(without_units, FastDecoder(without_units, torch.float32))
        result.contenders.append(Contender("fast float32", decoding(without_units, latents, is_fast=True)))
    reference = result.contenders[0].decode()
    for contender in result.contenders[1:]:
        contender.quality = compare(contender.decode(), reference)
    _add_compiled(result, plain, latents, reference, plan, started)
    del reference
    _take_turns(result.contenders, device, plan, ceilings)
    return result


def _add_compiled(
    result: Result, vae: Any, latents: torch.Tensor, reference: torch.Tensor, plan: Plan, started: float
) -> None:
    """Compile, within the plan's time; the headline's largest case is compiled in any case."""
    case = result.case
    if case.vae not in COMPILED:
        result.notes.append(NOT_COMPILED)
        return
    wanted = [("compiled", None)]
    if case.prefix in plan.compile_both and result.fast_dtype != latents.dtype:
        wanted.append(("compiled fast", result.fast_dtype))
    elif case.prefix in plan.compile_both:
        wanted.append(("compiled fast", latents.dtype))  # for its channels_last
    must = case.prefix == headline(plan.cases).prefix
    for name, dtype in wanted:
        elapsed = time.monotonic() - started
        if elapsed > plan.compile_until and not (must and name == "compiled"):
            result.notes.append(
                f"not compiled: {elapsed:.0f} s had passed, and each compilation takes most of a minute"
            )
            return
        print(f"{case.name}: compiling", file=sys.stderr)
        begun = time.monotonic()
        contender = Contender(name, compiled(vae, latents, dtype))
        contender.quality = compare(contender.decode(), reference)
        result.compile_seconds[name] = time.monotonic() - begun
        result.contenders.append(contender)


def _take_turns(contenders: list[Contender], device: torch.device, plan: Plan, ceilings: Ceilings) -> None:
    order = random.Random(0)
    started = time.monotonic()
    turns = [ceilings.take_turn, *(lambda each=each: each.take_turn(device) for each in contenders)]
    done = 0
    while done < plan.rounds or (done < plan.most_rounds and time.monotonic() - started < plan.seconds):
        for turn in order.sample(turns, len(turns)):
            turn()
        done += 1


def vae_dtype(device: torch.device) -> torch.dtype:
    """What most of today's checkpoints are served in."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def headline(cases: tuple[Case, ...]) -> Case:
    """The one whose figures have no prefix: one picture, the largest."""
    return max(
        (case for case in cases if case.vae == HEADLINE and case.batch == 1), key=lambda case: case.side
    )


def report(
    results: list[Result], figures: dict[str, float], ceilings: Ceilings, device: torch.device
) -> None:
    """Print tables."""
    gpu = f"; {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    rows: list[list[str | float]] = []
    for result in results:
        lossless = result.contenders[0]
        for contender in result.contenders:
            quality = contender.quality
            rows.append(
                [
                    f"{result.case.name}, {contender.name}",
                    contender.best * 1000,
                    statistics.median(contender.seconds) * 1000,
                    min(contender.cpu_seconds) * 1000,
                    lossless.best / contender.best,
                    *(
                        (quality["psnr_db"], quality["own_range_psnr_db"], f"{quality['max_abs']:.1e}")
                        if quality
                        else ("", "", "")
                    ),
                ]
            )
    measure.report(
        f"VAE decode, random weights{gpu}",
        ["", "best ms", "median ms", "CPU ms", "speedup", "PSNR dB", "own range", "max abs"],
        rows,
    )
    measure.report(
        "the fast decoder's floor: its FLOPs at the highest rate measured",
        ["", "GFLOP", "lossless GFLOP", "dtype", "floor ms", "fast ms", "share"],
        [
            [
                result.case.name,
                figures[f"{result.case.prefix}_gflop"],
                figures[f"{result.case.prefix}_lossless_gflop"],
                _name(result.fast_dtype),
                figures[f"{result.case.prefix}_floor_ms"],
                figures[f"{result.case.prefix}_fast_ms"],
                figures[f"{result.case.prefix}_share_of_floor"],
            ]
            for result in results
        ],
    )
    print()
    for dtype, rate in ceilings.flops_per_second.items():
        matmul = ceilings.matmul_flops_per_second[dtype]
        print(f"{_name(dtype)}: {rate / 1e9:.0f} GFLOP/s at most, {matmul / 1e9:.0f} of matrices")
    print(f"copy: {ceilings.bytes_per_second / 1e9:.1f} GB/s, read and written")
    for result in results:
        compilations = [f"{name} {seconds:.0f} s" for name, seconds in result.compile_seconds.items()]
        notes = [*result.notes, *([f"first calls: {', '.join(compilations)}"] if compilations else [])]
        if notes:
            print(f"{result.case.name}: {'; '.join(notes)}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def measure_all(device: torch.device, plan: Plan) -> tuple[list[Result], Ceilings, dict[str, float]]:
    started = time.monotonic()
    dtypes = {vae_dtype(device), fast_path._fast_dtype(device, vae_dtype(device))}
    ceilings = Ceilings(device, plan, dtypes)
    results = []
    for case in plan.cases:
        print(case.name, file=sys.stderr)
        result = measure_case(case, device, plan, ceilings, started)
        if result is not None:
            results.append(result)
    figures = ceilings.figures()
    for result in results:
        own = result.figures(ceilings, vae_dtype(device))
        figures |= {f"{result.case.prefix}_{name}": value for name, value in own.items()}
    largest = headline(tuple(result.case for result in results)).prefix
    names = ("speedup", "psnr_db", "speedup_vs_compile", "share_of_floor")
    first = {name: figures[f"{largest}_{name}"] for name in names if f"{largest}_{name}" in figures}
    return results, ceilings, {**first, **figures}


def main() -> None:
    """Measure and report."""
    options = measure.parse_options("VAE decode: lossless, fast and compiled.")
    quiet_libraries()
    torch._logging.set_logs(inductor=40, dynamo=40)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    plan = Plan.of(device, is_quick=options.quick)
    results, ceilings, figures = measure_all(device, plan)
    report(results, figures, ceilings, device)
    if device.type == "cuda":
        import vae_kernels

        times = list(vae_kernels.time_kernels(device, torch.bfloat16))
        copied = ceilings.bytes_per_second / 1e9
        vae_kernels.report(times, copied)
        for each in times:
            figures |= each.figures(copied)
    measure.write_json(options.json, figures)


if __name__ == "__main__":
    main()
