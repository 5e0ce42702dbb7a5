"""Where the time of a fast decode on a CPU goes, and what making residual sums inside the convolutions is worth.

Both in processor time, of all threads, since that is nearly the same on a busy machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial

from diffusion_backend.stages.common import tune_process

if __name__ == "__main__":
    tune_process()  # before torch is imported

import measure
import torch
from diffusion_backend import fast_layers
from diffusion_backend.fast_decoders import FastDecoder
from diffusion_backend.fast_path import fast_dtype
from diffusion_backend.loading import quiet_libraries
from torch.profiler import profile
from vaes import Case

ROUNDS = 7
INSIDE, AFTER = "in the convolution", "after it"
OTHERS = "others"
# The operations of the profile by what they are for; whatever is in none is among the others.
KINDS = {
    "convolutions": ("aten::mkldnn_convolution", "mkldnn::_convolution_pointwise_"),
    "transposed convolutions": ("aten::_convolution",),
    "GroupNorm": ("aten::native_group_norm",),
    "SiLU": ("aten::silu_",),
    "sums": ("aten::add_", "aten::add"),
    "attention": ("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::addmm"),
}


def shares(decode: Callable[[], object]) -> dict[str, float]:
    """Of one decode's processor time, by kind."""
    with profile() as profiled:
        decode()
    times = {each.key: each.self_cpu_time_total for each in profiled.key_averages()}
    total = sum(times.values())
    found = {kind: sum(times.get(name, 0.0) for name in names) / total for kind, names in KINDS.items()}
    return {**found, OTHERS: 1 - sum(found.values())}


def seconds_by_way(decode: Callable[[], object]) -> dict[str, float]:
    """The least processor time of a decode by where residual sums are made, in shuffled turns."""
    can_add = fast_layers._adds_in_convolutions
    ways = {INSIDE: can_add, AFTER: lambda: False}
    best = dict.fromkeys(ways, float("inf"))
    order = random.Random(0)
    try:
        for _ in range(ROUNDS):
            for way in order.sample(list(ways), len(ways)):
                fast_layers._adds_in_convolutions = ways[way]  # type: ignore[assignment]
                before = time.process_time()
                decode()
                best[way] = min(best[way], time.process_time() - before)
    finally:
        fast_layers._adds_in_convolutions = can_add
    return best


def main() -> None:
    """Measure and report."""
    options = measure.parse_options("Where the time of a fast decode on a CPU goes.")
    quiet_libraries()
    device = torch.device("cpu")
    cases = [Case("AutoencoderKL", side) for side in ((128,) if options.quick else (256, 512))]
    by_kind, by_way = [], []
    for case in cases:
        decoder = FastDecoder(case.build(device, torch.float32), fast_dtype(device, torch.float32))
        decode = partial(decoder, case.latents(device, torch.float32))
        with torch.inference_mode():
            for _ in range(3):
                decode()
            by_kind.append(shares(decode))
            by_way.append(seconds_by_way(decode))
    ratios = [ways[INSIDE] / ways[AFTER] for ways in by_way]
    names = [case.name for case in cases]
    measure.report(
        "shares of the time of one fast decode",
        ["", *names],
        [[kind, *(found[kind] for found in by_kind)] for kind in (*KINDS, OTHERS)],
    )
    measure.report(
        f"residual sums: ms of processor time, best of {ROUNDS}",
        ["", *by_way[0], "ratio"],
        [
            [name, *(1000 * seconds for seconds in ways.values()), ratio]
            for name, ways, ratio in zip(names, by_way, ratios, strict=True)
        ],
    )
    figures = {f"{case.prefix}_sums_ratio": ratio for case, ratio in zip(cases, ratios, strict=True)}
    for case, found in zip(cases, by_kind, strict=True):
        figures |= {f"{case.prefix}_share_of_{kind}".replace(" ", "_"): of for kind, of in found.items()}
    measure.write_json(options.json, figures)


if __name__ == "__main__":
    main()
