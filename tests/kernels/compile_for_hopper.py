"""Compiles every kernel, in every configuration that autotuning may choose, for a Hopper GPU: none is needed for that.

It calls the launching functions, so that the kernels are specialised as in production, and stops short of the
launch. Prints a line of JSON for each binary: the case, the kernel, its instructions on global memory and how many
multiply-adds it has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import torch
from diffusion_kernels import gpu
from diffusion_kernels.group_norm_silu import group_norm_silu
from diffusion_kernels.rms_norm_silu import rms_norm_silu
from diffusion_kernels.to_uint8 import to_uint8
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# Aligned as in real decoders; one pixel (integers equal to 1 become constants); nothing that 16 bytes divide.
CASES = {
    "aligned": ((2, 128, 16, 16), 32, torch.bfloat16),
    "one-pixel": ((1, 96, 1, 1), 32, torch.float16),
    "ragged": ((1, 300, 5, 5), 5, torch.float32),
}
# Of one number of channels; the first may compile and tune. Counts of pixels and of splits of all sorts are among them:
# 1, multiples of 16, others.
SIZES = ((1, 64, 64), (1, 1, 1), (2, 5, 7), (1, 75, 53), (3, 256, 256), (1, 1024, 1024))


class Hopper:
    """As much of a driver as compiling asks for; ``case`` is what it compiles for."""

    case = ""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Autotuning's: calls each candidate, which compiles it."""

        def benchmark(call: Callable[[], Any], quantiles: tuple[float, ...]) -> list[float]:
            call()
            print(json.dumps({"case": self.case, "tuned": True}))
            return [0.0 for _ in quantiles]

        return benchmark


def report_instead_of_launching(hopper: Hopper) -> None:
    """From here on a launch compiles, and prints what came out."""

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:  # noqa: ARG001
        binary = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        instructions = sorted(
            set(re.findall(r"(?:ld|st)\.global[\w.:]*|cp\.async\.c[ag][\w.]*", binary.asm["ptx"]))
        )
        assert binary.asm["cubin"]
        fused = len(re.findall(r"\bfma\.", binary.asm["ptx"]))
        print(
            json.dumps(
                {
                    "case": hopper.case,
                    "kernel": kernel.__name__,
                    "hash": binary.hash,
                    "instructions": instructions,
                    "multiply_adds": fused,
                }
            )
        )
        return binary

    JITFunction.run = compile_only


if __name__ == "__main__":
    run = JITFunction.run
    hopper = Hopper()
    driver.set_active(hopper)
    # The launching functions take these CPU tensors for a GPU's.
    gpu.INTERPRETED = True
    report_instead_of_launching(hopper)
    for name, (shape, groups, dtype) in CASES.items():
        hopper.case = name
        features = torch.empty(shape, dtype=dtype).contiguous(memory_format=torch.channels_last)
        parameter = torch.empty(shape[1], dtype=dtype)
        group_norm_silu(features, groups, parameter, parameter)
        rms_norm_silu(features, parameter)
        rms_norm_silu(features, parameter, parameter)
        image = torch.empty(shape[0], 3, *shape[2:], dtype=dtype)
        to_uint8(image)
        to_uint8(image.contiguous(memory_format=torch.channels_last))
    weight = torch.empty(160)
    for number, (batch, height, width) in enumerate(SIZES):
        hopper.case = f"size {number}"
        features = torch.empty(batch, 160, height, width).contiguous(memory_format=torch.channels_last)
        group_norm_silu(features, 32, weight, weight)
        rms_norm_silu(features, weight)
