"""What a machine reaches at all, measured between the turns of what is compared with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import measure
import torch
from torch.nn import functional

TRIES = 3  # in a turn, of which the best counts: each is short beside a decode


class Ceilings:
    """The best of all turns: FLOPs a second by dtype, and bytes a second of a copy, read and written.

    FLOPs of large products of matrices, and of one lone 3x3 convolution: on some CPUs libraries are faster at that.
    """

    def __init__(
        self, device: torch.device, dtypes: set[torch.dtype], *, side: int, copied_bytes: int, repeats: int
    ) -> None:
        """``side`` is that of the matrices, ``repeats`` how often each is done in a turn."""
        self.flops_per_second = dict.fromkeys(dtypes, 0.0)
        self.matmul_flops_per_second = dict.fromkeys(dtypes, 0.0)
        self.bytes_per_second = 0.0
        self._device = device
        self._repeats = repeats
        self._matmuls = {dtype: list(self._make_matmuls(side, dtype)) for dtype in dtypes}
        self._convolutions = {dtype: self._make_convolution(side // 16, dtype) for dtype in dtypes}
        self._source = torch.ones(copied_bytes, dtype=torch.uint8, device=device)
        self._target = torch.empty_like(self._source)

    def take_turn(self) -> None:
        for dtype, matmuls in self._matmuls.items():
            matmul = max(flops / self._seconds(call) for flops, call in matmuls)
            flops, call = self._convolutions[dtype]
            rates = self.matmul_flops_per_second[dtype], matmul, flops / self._seconds(call)
            self.matmul_flops_per_second[dtype] = max(rates[:2])
            self.flops_per_second[dtype] = max(self.flops_per_second[dtype], *rates)
        copied = 2 * self._source.numel() / self._seconds(lambda: self._target.copy_(self._source))
        self.bytes_per_second = max(self.bytes_per_second, copied)

    def figures(self) -> dict[str, float]:
        rates = {
            f"{what}_{str(dtype).removeprefix('torch.')}_gflops": rate / 1e9
            for what, by_dtype in (("peak", self.flops_per_second), ("matmul", self.matmul_flops_per_second))
            for dtype, rate in by_dtype.items()
        }
        return {**rates, "copy_gb_per_second": self.bytes_per_second / 1e9}

    def _seconds(self, call: Callable[[], object]) -> float:
        return min(measure.seconds_of(call, self._device, self._repeats) for _ in range(TRIES))

    def _make_matmuls(
        self, side: int, dtype: torch.dtype
    ) -> Iterator[tuple[float, Callable[[], torch.Tensor]]]:
        """Of two sizes: FLOPs, and what does them."""
        for size in (side // 2, side):
            a, b = (torch.randn(size, size, device=self._device).to(dtype) for _ in range(2))
            yield 2.0 * size**3, lambda a=a, b=b: a @ b  # type: ignore[misc]

    def _make_convolution(self, side: int, dtype: torch.dtype) -> tuple[float, Callable[[], torch.Tensor]]:
        """One of those that decoders are made of."""
        channels = 256
        x, weight = (
            torch.randn(shape, device=self._device).to(dtype).contiguous(memory_format=torch.channels_last)
            for shape in ((1, channels, side, side), (channels, channels, 3, 3))
        )
        return 2.0 * 9 * channels**2 * side**2, lambda: functional.conv2d(x, weight, padding=1)
