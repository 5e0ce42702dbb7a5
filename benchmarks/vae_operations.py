"""Where the time of a fast decode on a CPU goes, and what two of its parts are worth.

These are our kernels that normalize, and residual sums that are made inside convolutions: in processor time, of all
threads, since that is nearly the same on a busy machine. Shares are of the profiler's time, that of the calling thread.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from diffusion_backend.stages.common import tune_process

if __name__ == "__main__":
    tune_process()  # before torch is imported

import measure
import torch
from diffusion_backend import fast_layers
from diffusion_backend.fast_decoders import FastDecoder
from diffusion_backend.fast_path import fast_dtype
from diffusion_backend.fast_path_gate import register_vae_fast_path_gate
from diffusion_backend.loading import quiet_libraries
from diffusion_kernels import cpu
from torch.profiler import profile, record_function
from vae_decode import decoding
from vaes import Case

ROUNDS = 7
OTHERS = "others"
# The operations of the profile by what they are for; whatever is in none is among the others.
KERNELS = ("group_norm_silu", "rms_norm_silu")
KINDS = {
    "convolutions": ("aten::mkldnn_convolution", "mkldnn::_convolution_pointwise_"),
    "transposed convolutions": ("aten::_convolution",),
    "normalizations and SiLU": (*KERNELS, "aten::native_group_norm", "aten::_fused_rms_norm", "aten::silu_"),
    "sums": ("aten::add_", "aten::add"),
    "attention": ("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::addmm"),
}
AS_IT_IS = "as it is"
# What a decode does without, by the name of the column: a function of fast_layers, and one in its place.
WITHOUT: dict[str, tuple[str, Callable[..., Any]]] = {
    "PyTorch's normalizations": ("kernels_for", lambda *_: None),
    "sums after convolutions": ("_adds_in_convolutions", lambda: False),
}


@contextmanager
def named_kernels() -> Iterator[None]:
    """Our kernels are no operations of PyTorch: only with a name does its profiler see them."""

    def named(name: str) -> Callable[..., torch.Tensor]:
        kernel: Callable[..., torch.Tensor] = getattr(cpu, name)

        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            with record_function(name):
                return kernel(*args, **kwargs)

        return call

    with patch.multiple(cpu, **{name: named(name) for name in KERNELS}):
        yield


def shares(decode: Callable[[], object]) -> dict[str, float]:
    """Of one decode's processor time, by kind."""
    with named_kernels(), profile() as profiled:
        decode()
    times = {each.key: each.self_cpu_time_total for each in profiled.key_averages()}
    total = sum(times.values())
    found = {kind: sum(times.get(name, 0.0) for name in names) / total for kind, names in KINDS.items()}
    return {**found, OTHERS: 1 - sum(found.values())}


def seconds_by_way(decode: Callable[[], object]) -> dict[str, float]:
    """The least processor time of a decode as it is, and without each part, in shuffled turns."""
    ways = [AS_IT_IS, *WITHOUT]
    best = dict.fromkeys(ways, float("inf"))
    order = random.Random(0)
    for _ in range(ROUNDS):
        for way in order.sample(ways, len(ways)):
            with patch.object(fast_layers, *WITHOUT[way]) if way in WITHOUT else nullcontext():
                before = time.process_time()
                decode()
                best[way] = min(best[way], time.process_time() - before)
    return best


def main() -> None:
    """Measure and report."""
    options = measure.parse_options("Where the time of a fast decode on a CPU goes.")
    quiet_libraries()
    device = torch.device("cpu")
    dtype = fast_dtype(device, torch.float32)
    cases = [Case("AutoencoderKL", side) for side in ((128,) if options.quick else (256, 512))]
    cases.append(Case("AutoencoderKLQwenImage", 64 if options.quick else 256, frames=1))
    by_kind, by_way = [], []
    for case in cases:
        vae = case.build(device, torch.float32)
        register_vae_fast_path_gate(vae, FastDecoder(vae, dtype))
        decode = decoding(vae, case.latents(device, torch.float32), is_fast=True)
        for _ in range(3):
            decode()
        by_kind.append(shares(decode))
        by_way.append(seconds_by_way(decode))
    names = [case.name for case in cases]
    kernels = fast_layers.kernels_for(device, dtype) or "PyTorch's"
    measure.report(
        f"shares of the time of one fast decode, {dtype}, kernels: {kernels}",
        ["", *names],
        [[kind, *(found[kind] for found in by_kind)] for kind in (*KINDS, OTHERS)],
    )
    measure.report(
        f"ms of processor time of a fast decode, best of {ROUNDS}",
        ["", AS_IT_IS, *WITHOUT],
        [
            [name, *(1000 * seconds for seconds in ways.values())]
            for name, ways in zip(names, by_way, strict=True)
        ],
    )
    figures: dict[str, float] = {}
    for case, found, ways in zip(cases, by_kind, by_way, strict=True):
        figures |= {f"{case.prefix}_share_of_{kind}".replace(" ", "_"): of for kind, of in found.items()}
        for what, way in zip(("kernels", "sums"), WITHOUT, strict=True):
            figures[f"{case.prefix}_{what}_ratio"] = ways[AS_IT_IS] / ways[way]
    measure.write_json(options.json, figures)


if __name__ == "__main__":
    main()
