"""Our kernels by themselves: their time, and the bytes a second that they move; vae_decode.py prints it.

Each has the shapes that it meets in a decode, next to the same in PyTorch's own operations: on a GPU in the layout that
the VAE's own decoder has, on a CPU in channels_last. The bytes are those of the kernel's own ``bytes_moved``, and the
ceiling is a copy of a large tensor. What fits into a cache (50 MB of L2 in an H200) may be faster than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import measure
import torch
from diffusion_kernels import cpu, group_norm_silu, rms_norm_silu, to_uint8
from diffusion_kernels.gpu import INTERPRETED

ROUNDS = 5
# By the device. On a GPU one after the other, so that the launches of the next are hidden behind the work of the last.
REPEATS = {"cuda": 20, "cpu": 3}
GROUPS = 32

# On a GPU AutoencoderKL's at 1024x1024, Wan's with 4 frames of 832x480, and pictures of 1024x1024 and 2048x2048; on
# a CPU AutoencoderKL's at 512x512, and Qwen-Image's at 256x256.
SHAPES: dict[str, dict[str, Sequence[tuple[int, ...]]]] = {
    "cuda": {
        "group_norm_silu": (
            (1, 512, 256, 256),
            (1, 512, 512, 512),
            (1, 256, 1024, 1024),
            (1, 128, 1024, 1024),
        ),
        "rms_norm_silu": ((1, 192, 4, 240, 416), (1, 96, 4, 480, 832)),
        "to_uint8": ((4, 3, 1024, 1024), (4, 3, 2048, 2048)),
    },
    "cpu": {
        "group_norm_silu": ((1, 512, 64, 64), (1, 512, 256, 256), (1, 256, 512, 512), (1, 128, 512, 512)),
        "rms_norm_silu": ((1, 384, 1, 64, 64), (1, 192, 1, 128, 128), (1, 96, 1, 256, 256)),
    },
}


@dataclass(frozen=True)
class KernelTime:
    """Of one kernel on a tensor of one shape; ``torch_seconds`` is PyTorch's for the same."""

    kernel: str
    shape: tuple[int, ...]
    seconds: float
    torch_seconds: float
    bytes: int

    @property
    def gb_per_second(self) -> float:
        return self.bytes / self.seconds / 1e9

    def figures(self, copy_gb_per_second: float) -> dict[str, float]:
        prefix = f"kernel_{self.kernel}_{'x'.join(map(str, self.shape))}"
        return {
            f"{prefix}_us": self.seconds * 1e6,
            f"{prefix}_torch_us": self.torch_seconds * 1e6,
            f"{prefix}_gb_per_second": self.gb_per_second,
            f"{prefix}_share_of_copy": self.gb_per_second / copy_gb_per_second,
        }


def _calls(
    kernel: str, x: torch.Tensor
) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor], int]:
    """The kernel on ``x``, PyTorch's operations on it, and the kernel's bytes."""
    if kernel == "to_uint8":
        moved = to_uint8.bytes_moved(x.shape, x.dtype)
        return lambda: to_uint8.to_uint8(x), lambda: to_uint8.to_uint8_reference(x), moved
    last = x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)
    on_cpu = x.device.type == "cpu" and not INTERPRETED
    if on_cpu:
        x = last
    weight, bias = torch.randn(2, x.shape[1], device=x.device).to(x.dtype)
    if kernel == "rms_norm_silu":
        return (
            lambda: (cpu if on_cpu else rms_norm_silu).rms_norm_silu(last, weight),
            lambda: rms_norm_silu.rms_norm_silu_reference(x, weight),
            rms_norm_silu.bytes_moved(x.shape, x.dtype),
        )
    return (
        lambda: (cpu if on_cpu else group_norm_silu).group_norm_silu(last, GROUPS, weight, bias, 1e-6),
        lambda: group_norm_silu.group_norm_silu_reference(x, GROUPS, weight, bias, 1e-6),
        group_norm_silu.bytes_moved(x.shape, x.dtype),
    )


def time_kernels(
    device: torch.device,
    dtype: torch.dtype,
    shapes: dict[str, Sequence[tuple[int, ...]]] | None = None,
    repeats: int | None = None,
) -> Iterator[KernelTime]:
    """The best of some rounds, after a first call that compiles and tunes."""
    repeats = repeats or REPEATS[device.type]
    for kernel, sizes in (shapes or SHAPES[device.type]).items():
        for shape in sizes:
            x = torch.randn(shape, device=device).to(dtype)
            ours, torchs, moved = _calls(kernel, x)
            difference = (ours().float() - torchs().float()).abs().max().item()
            if not difference <= (1 if kernel == "to_uint8" else 0.1):  # of values up to about 5
                raise AssertionError(f"{kernel} of {shape} differs by {difference} from PyTorch's operations")
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(ROUNDS):
                for call, best in zip((ours, torchs), times, strict=True):
                    best.append(measure.seconds_of(call, device, repeats))
            yield KernelTime(kernel, shape, min(times[0]), min(times[1]), moved)


def report(times: Sequence[KernelTime], copy_gb_per_second: float) -> None:
    """Print a table."""
    measure.report(
        f"kernels, best of {ROUNDS} rounds; a copy moves {copy_gb_per_second:.0f} GB/s",
        ["kernel", "µs", "PyTorch µs", "MB", "GB/s", "of a copy"],
        [
            [
                f"{time.kernel} {list(time.shape)}",
                time.seconds * 1e6,
                time.torch_seconds * 1e6,
                time.bytes / 1e6,
                time.gb_per_second,
                time.gb_per_second / copy_gb_per_second,
            ]
            for time in times
        ],
    )
