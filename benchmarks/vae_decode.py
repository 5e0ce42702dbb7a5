"""One VAE decode in every way there is, side by side, on this machine's CPU or, where there is one, its GPU.

lossless       the VAE as diffusers runs it, in the dtype that the stage gives it: float32 on a CPU, bfloat16 on a GPU
fast           the rewritten decoder, as the stage installs it, through the gate
fast float32   the rewritten decoder as a CPU without bfloat16 units has it
compiled       torch.compile (its default mode) of the VAE's own decoder
compiled fast  the same in the fast decoder's dtype, in channels_last

All are measured in one run, in shuffled turns, in a process with a stage's settings. Ratios are of the best times.

Two PSNRs against lossless. ``psnr_db`` is that of the check at load (fast_path.py): of pictures of 0 to 255, white
against black being 0 dB. ``own_range_psnr_db`` is of the unclamped output, against the span of its values.

The floor is what the convolutions and products of matrices of the fast decoder would take at the rate of large products
of matrices in the same dtype, in the same turns. A lone convolution may be faster than these, so the share of the time
at the highest rate that this machine reaches at all is there, too: it is the one that cannot exceed 1.
"""

from __future__ import annotations

import copy
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from diffusion_backend.stages.common import tune_process

if __name__ == "__main__":
    tune_process()  # before torch is imported

import measure
import torch
import upsampling
import vae_kernels
import vae_traffic
from ceilings import Ceilings
from diffusers.image_processor import VaeImageProcessor
from diffusers.video_processor import VideoProcessor
from diffusion_backend import fast_path
from diffusion_backend.config_text import FAST_PATH_MIN_PSNR_DB
from diffusion_backend.fast_decoders import FastDecoder
from diffusion_backend.fast_layers import kernels_for
from diffusion_backend.fast_path_gate import register_vae_fast_path_gate, use_vae_fast_path
from diffusion_backend.loading import quiet_libraries
from vaes import FACTOR, Case

HEADLINE = "AutoencoderKL"
SHARES = ("share_of_floor", "share_at_highest_rate")


@dataclass(frozen=True)
class Plan:
    """What is measured, and for how long. On a CPU a lossless decode takes seconds, and a compilation half a minute."""

    cases: tuple[Case, ...]
    rounds: int  # at least
    most_rounds: int
    seconds: float  # for the rounds of a case beyond ``rounds``
    compile_until: float  # no further compilation is begun later than so many seconds after the start
    compile_both: tuple[str, ...]  # cases that are compiled in the fast dtype, too
    peak_side: int  # of the matrices
    peak_repeats: int
    copied_bytes: int

    @classmethod
    def of(cls, device: torch.device, *, is_quick: bool) -> Plan:
        return cls._of_gpu(is_quick=is_quick) if device.type == "cuda" else cls._of_cpu(is_quick=is_quick)

    @classmethod
    def _of_cpu(cls, *, is_quick: bool) -> Plan:
        cases = [Case(HEADLINE, 256)]
        if not is_quick:
            cases += [
                Case(HEADLINE, 512),
                Case("AutoencoderKLFlux2", 256),
                Case("AutoencoderKLWan", 128, frames=2),
                Case("AutoencoderKLQwenImage", 256, frames=1),
            ]
        return cls(
            cases=tuple(cases),
            rounds=3 if is_quick else 5,
            most_rounds=3 if is_quick else 10,
            seconds=20.0,
            compile_until=0.0 if is_quick else 600.0,
            compile_both=() if is_quick else ("kl_256", "kl_512"),
            peak_side=2048,
            peak_repeats=1,
            copied_bytes=256 << 20,
        )

    @classmethod
    def _of_gpu(cls, *, is_quick: bool) -> Plan:
        """In under 8 minutes on an H200. What matters most comes first: the last ones are not compiled any more."""
        flux2 = "AutoencoderKLFlux2"
        cases = [Case(HEADLINE, 1024)]
        if not is_quick:
            cases += [Case(HEADLINE, 512), Case(HEADLINE, 2048), Case(flux2, 1024), Case(HEADLINE, 1024, 4)]
            cases += [Case(HEADLINE, side, 4) for side in (512, 2048)]
            cases += [Case(flux2, side) for side in (512, 2048)]
            cases += [Case(flux2, side, 4) for side in (512, 1024, 2048)]
        return cls(
            cases=tuple(cases),
            rounds=5,
            most_rounds=20,
            seconds=3.0,
            compile_until=0.0 if is_quick else 200.0,
            compile_both=("kl_1024",),
            peak_side=8192,
            peak_repeats=10,
            copied_bytes=4 << 30,
        )


@dataclass
class Contender:
    """A way to decode, and what it took: seconds, and seconds of this process's CPU time."""

    name: str
    decode: Callable[[], torch.Tensor] | None  # none when it is done: its tensors are released
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    quality: dict[str, float] = field(default_factory=dict)

    def take_turn(self, device: torch.device) -> None:
        assert self.decode is not None
        before = time.process_time()
        self.seconds.append(measure.seconds_of(self.decode, device))
        self.cpu_seconds.append(time.process_time() - before)

    @property
    def best(self) -> float:
        return min(self.seconds)


@dataclass
class Result:
    """A case's contenders, and why others are missing."""

    case: Case
    fast_dtype: torch.dtype
    contenders: list[Contender]
    notes: list[str]
    compile_seconds: dict[str, float] = field(default_factory=dict)

    def rows(self) -> list[list[str | float]]:
        """Of the table."""
        return [
            [
                f"{self.case.name}, {contender.name}",
                contender.best * 1000,
                statistics.median(contender.seconds) * 1000,
                min(contender.cpu_seconds) * 1000,
                self.contenders[0].best / contender.best,
                *(contender.quality.get(what, "") for what in ("psnr_db", "own_range_psnr_db")),
                f"{contender.quality['max_abs']:.1e}" if contender.quality else "",
            ]
            for contender in self.contenders
        ]

    def figures(self, ceilings: Ceilings, vae_dtype: torch.dtype) -> dict[str, float]:
        lossless, fast = self.contenders[:2]
        traffic = vae_traffic.count(self.case, vae_dtype, self.fast_dtype)
        peak = ceilings.flops_per_second[self.fast_dtype]
        floor = traffic.flops / ceilings.matmul_flops_per_second[self.fast_dtype]
        roofline = traffic.roofline_seconds(peak, ceilings.bytes_per_second)
        figures = {
            "speedup": lossless.best / fast.best,
            "median_speedup": statistics.median(lossless.seconds) / statistics.median(fast.seconds),
            "gflop": traffic.flops / 1e9,
            "lossless_gflop": vae_traffic.count(self.case, vae_dtype).flops / 1e9,
            "floor_ms": floor * 1000,
            "share_of_floor": floor / fast.best,
            "share_at_highest_rate": traffic.flops / peak / fast.best,
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
            if contender.name in self.compile_seconds:
                figures[f"{name}_first_call_seconds"] = self.compile_seconds[contender.name]
                ratio = f"speedup_vs_{name.replace('compiled', 'compile')}"
                figures[ratio] = contender.best / fast.best
        return figures


def compare(output: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """How far a VAE's output is from the lossless one."""
    output, reference = output.float(), reference.float()
    span = (reference.max() - reference.min()).item()
    levels, reference_levels = _levels(output), _levels(reference)
    return {
        "psnr_db": fast_path.psnr_db(levels, reference_levels, 255.0),
        "own_range_psnr_db": fast_path.psnr_db(output, reference, span),
        "max_abs": (output - reference).abs().max().item(),
        "max_levels": (levels - reference_levels).abs().max().item(),
    }


def _levels(output: torch.Tensor) -> torch.Tensor:
    return ((output / 2 + 0.5).clamp(0, 1) * 255).round()


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


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


class LeftOutError(Exception):
    """This case cannot be measured here; the text says why."""


def measure_case(case: Case, device: torch.device, plan: Plan, ceilings: Ceilings, started: float) -> Result:
    """All contenders in shuffled turns.

    Raises:
        LeftOutError: there is no fast path, it does not fit into the GPU's memory, or a kernel failed there.
    """
    try:
        result = _prepare(case, device, plan, started)
        _take_turns(result.contenders, device, plan, ceilings)
    except torch.OutOfMemoryError:
        raise LeftOutError("it does not fit into the GPU's memory") from None
    except RuntimeError as error:
        if device.type == "cpu":
            raise
        raise LeftOutError(
            f"it failed: {_first_line(error)}"
        ) from error  # the others may pass in the time there is
    finally:
        torch._dynamo.reset()
    for contender in result.contenders:
        contender.decode = None
    return result


def _prepare(case: Case, device: torch.device, plan: Plan, started: float) -> Result:
    """The contenders, each after a first decode, which is compared with the lossless one."""
    dtype = vae_dtype(device)
    vae, latents = case.build(device, dtype), case.latents(device, dtype)
    plain = copy.deepcopy(vae)  # without a gate
    path = fast_path.install(
        pipeline(vae, device, case), case.latents_shape, device=device, min_psnr_db=FAST_PATH_MIN_PSNR_DB
    )
    if path.state != "installed":
        raise LeftOutError(f"it has no fast path: {path.reason}")
    contenders = [
        Contender("lossless", decoding(vae, latents)),
        Contender("fast", decoding(vae, latents, is_fast=True)),
    ]
    result = Result(case, getattr(torch, path.dtype or ""), contenders, [])
    if device.type == "cpu" and result.fast_dtype != torch.float32:
        without_units = copy.deepcopy(plain)
        register_vae_fast_path_gate(without_units, FastDecoder(without_units, torch.float32))
        contenders.append(Contender("fast float32", decoding(without_units, latents, is_fast=True)))
    reference, *others = (contender.decode() for contender in contenders if contender.decode)
    for contender, output in zip(contenders[1:], others, strict=True):
        contender.quality = compare(output, reference)
    _add_compiled(result, plain, latents, reference, plan, started)
    return result


def _add_compiled(
    result: Result, vae: Any, latents: torch.Tensor, reference: torch.Tensor, plan: Plan, started: float
) -> None:
    """Compile, within the plan's time; the headline's largest case is compiled in any case."""
    case = result.case
    wanted: list[tuple[str, torch.dtype | None]] = [("compiled", None)]
    if case.prefix in plan.compile_both:
        wanted.append(("compiled fast", result.fast_dtype))
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
        decode = compiled(vae, latents, dtype)
        try:
            contender = Contender(name, decode, quality=compare(decode(), reference))
        except Exception as error:  # whatever a compiler raises
            result.notes.append(f"{name}: it failed: {_first_line(error)}")
            continue
        result.compile_seconds[name] = time.monotonic() - begun
        result.notes.append(f"the first call of {name} took {result.compile_seconds[name]:.0f} s")
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


@dataclass
class Report:
    """All that was measured."""

    device: torch.device
    ceilings: Ceilings
    results: list[Result]
    left_out: dict[str, str]  # why, by case

    def figures(self) -> dict[str, float]:
        figures = self.ceilings.figures()
        for result in self.results:
            own = result.figures(self.ceilings, vae_dtype(self.device))
            figures |= {f"{result.case.prefix}_{name}": value for name, value in own.items()}
        largest = headline(tuple(result.case for result in self.results)).prefix
        names = ("speedup", "psnr_db", "speedup_vs_compile", "share_of_floor")
        first = {name: figures[f"{largest}_{name}"] for name in names if f"{largest}_{name}" in figures}
        return {**first, **figures}

    def show(self, figures: dict[str, float]) -> None:
        """Print tables, and what is missing."""
        gpu = f"; {torch.cuda.get_device_name(self.device)}" if self.device.type == "cuda" else ""
        measure.report(
            f"VAE decode, random weights{gpu}",
            ["", "best ms", "median ms", "CPU ms", "speedup", "PSNR dB", "own range", "max abs"],
            [row for result in self.results for row in result.rows()],
        )
        columns = ("gflop", "lossless_gflop", "floor_ms", "roofline_ms", "fast_ms", *SHARES)
        measure.report(
            "the floor of the fast decoder: its FLOPs at the rate of products of matrices; 'memory': the larger of "
            "each operation's FLOPs at the highest rate and its bytes",
            ["", "dtype", "GFLOP", "lossless", "floor ms", "memory ms", "fast ms", "share", "at highest"],
            [
                [
                    result.case.name,
                    _name(result.fast_dtype),
                    *(figures[f"{result.case.prefix}_{column}"] for column in columns),
                ]
                for result in self.results
            ],
        )
        print()
        for dtype, rate in self.ceilings.flops_per_second.items():
            matmul = self.ceilings.matmul_flops_per_second[dtype]
            print(f"{_name(dtype)}: {rate / 1e9:.0f} GFLOP/s at most, {matmul / 1e9:.0f} of matrices")
        print(f"copy: {self.ceilings.bytes_per_second / 1e9:.1f} GB/s, read and written")
        for result in self.results:
            for note in result.notes:
                print(f"{result.case.name}: {note}")
        for name, reason in self.left_out.items():
            print(f"{name}: left out, {reason}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def measure_all(device: torch.device, plan: Plan) -> Report:
    """Case after case."""
    started = time.monotonic()
    dtypes = {vae_dtype(device), fast_path.fast_dtype(device, vae_dtype(device))}
    ceilings = Ceilings(
        device, dtypes, side=plan.peak_side, copied_bytes=plan.copied_bytes, repeats=plan.peak_repeats
    )
    done = Report(device, ceilings, [], {})
    for case in plan.cases:
        print(case.name, file=sys.stderr)
        try:
            done.results.append(measure_case(case, device, plan, ceilings, started))
        except LeftOutError as error:
            done.left_out[case.name] = str(error)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # of the last case's tensors
    if not any(result.case.vae == HEADLINE for result in done.results):
        sys.exit(f"error: nothing was measured: {done.left_out}")
    return done


def main() -> None:
    """Measure and report."""
    options = measure.parse_options("VAE decode: lossless, fast and compiled.")
    quiet_libraries()
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    done = measure_all(device, Plan.of(device, is_quick=options.quick))
    figures = done.figures()
    done.show(figures)
    dtype = fast_path.fast_dtype(device, vae_dtype(device))
    picture = 1024 if device.type == "cuda" else 512
    rounds = 1 if options.quick else upsampling.ROUNDS
    with torch.no_grad():
        upsamplings = list(upsampling.time_upsampling(device, dtype, picture, rounds))
    upsampling.report(upsamplings, dtype)
    for upsampled in upsamplings:
        figures |= upsampled.figures()
    if kernels_for(device, dtype) is not None:
        copied = done.ceilings.bytes_per_second / 1e9
        times = list(vae_kernels.time_kernels(device, dtype))
        vae_kernels.report(times, copied)
        for each in times:
            figures |= each.figures(copied)
    measure.write_json(options.json, figures)


if __name__ == "__main__":
    main()
