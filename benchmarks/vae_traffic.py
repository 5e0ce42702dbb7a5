"""Bytes and FLOPs of one VAE decode, the VAE's own decoder against the rewritten one: derived, not measured.

AutoencoderKL of FLUX's architecture, one picture of 1024x1024 in bfloat16. Both decoders run on the meta device, where
tensors have shapes and no contents, and every operation that reaches PyTorch's dispatcher is counted by these rules:

- an operation reads each of its input tensors once and writes each of its results once; in place, too
- a view moves nothing, and neither does an empty tensor
- GroupNorm reads its input twice: for the statistics, and to apply them
- attention reads queries, keys and values once and writes its result: its scores stay on the chip
- our kernels (a GroupNorm with its SiLU, the turning to bytes at the end) move what their ``bytes_moved`` says
- caches give nothing, and conversions of layout inside a library cost nothing: cuDNN makes such for the VAE's own
  decoder, whose tensors are not channels_last, so that its count is too low, if anything

FLOPs are those of torch.utils.flop_counter: of convolutions, products of matrices and attention.

The roofline takes the peaks of an H200 from its data sheet: no decode on one takes less time than its FLOPs at the peak
of computing, or its bytes at the peak of memory. One operation runs after the other, so the larger of the two is taken
for each.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import measure
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusion_backend.fast_decoders import FastDecoder
from diffusion_backend.fast_layers import GroupNormSiLU, RmsNormSiLU
from diffusion_backend.fast_path_gate import register_vae_fast_path_gate, use_vae_fast_path
from diffusion_backend.loading import quiet_libraries
from diffusion_kernels import group_norm_silu, rms_norm_silu, to_uint8
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from vaes import Case

# NVIDIA H200 Tensor Core GPU, data sheet (SXM): 4.8 TB/s of HBM3e, and 1,979 TFLOP/s of bfloat16 with sparsity, which
# is 989 without. https://www.nvidia.com/en-us/data-center/h200/
H200_BYTES_PER_SECOND = 4.8e12
H200_FLOPS_PER_SECOND = 989e12

KINDS = {
    "convolution": "convolutions",
    "native_group_norm": "GroupNorm",
    "silu": "SiLU",
    "silu_": "SiLU",
    "upsample_nearest2d": "upsampling",
    "add": "residual additions",
    "add_": "residual additions",
    "div": "divisions",
    "attention": "attention",
    "addmm": "attention",
    "mm": "attention",
    "bmm": "attention",
}
KERNEL = "GroupNorm + SiLU kernel"
PICTURE = "to bytes"
OTHERS = "others"


@dataclass(frozen=True)
class Operation:
    """One that was run."""

    kind: str
    bytes: int
    flops: int


@dataclass
class Traffic:
    """The operations of a decode."""

    operations: list[Operation] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(operation.bytes for operation in self.operations)

    @property
    def flops(self) -> int:
        return sum(operation.flops for operation in self.operations)

    def bytes_by_kind(self) -> dict[str, int]:
        sums: dict[str, int] = defaultdict(int)
        for operation in self.operations:
            sums[operation.kind] += operation.bytes
        return sums

    def roofline_seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """The least time: each operation's FLOPs or its bytes, whichever take longer, one after the other."""
        return sum(
            max(operation.flops / flops_per_second, operation.bytes / bytes_per_second)
            for operation in self.operations
        )


class _Operations(TorchDispatchMode):
    """Counts what reaches the dispatcher, while not ``is_paused``; ``kind`` names it all, where set."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic
        self.is_paused = False
        self.kind: str | None = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.is_paused and not _is_free(func):
            name = func.overloadpacket.__name__
            inputs, outputs = _tensor_bytes((args, kwargs)), _tensor_bytes(result)
            if name == "native_group_norm":
                inputs += _tensor_bytes(args[0])
            flops = 0
            if func.overloadpacket in flop_registry:
                flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
            kind = self.kind or KINDS.get(name, OTHERS)
            self.traffic.operations.append(Operation(kind, inputs + outputs, flops))
        return result


class _Attention(TorchFunctionMode):
    """Counts attention as one operation: on the meta device it reaches the dispatcher as several."""

    def __init__(self, operations: _Operations) -> None:
        super().__init__()
        self._operations = operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operations = self._operations
        if func is not torch.nn.functional.scaled_dot_product_attention or operations.is_paused:
            return func(*args, **kwargs)
        with operations.paused():
            result = func(*args, **kwargs)
        query, key, value = args[:3]
        # Of the two products, as torch.utils.flop_counter has it.
        pairs = math.prod(query.shape[:-1]) * key.shape[-2]
        flops = 2 * pairs * (query.shape[-1] + value.shape[-1])
        moved = _tensor_bytes((query, key, value, result))
        operations.traffic.operations.append(Operation(KINDS["attention"], moved, flops))
        return result


def _is_free(func: Any) -> bool:
    """Whether it moves no data: a view, or a new tensor without contents."""
    is_view = any(result.alias_info and not result.alias_info.is_write for result in func._schema.returns)
    return is_view or func.overloadpacket.__name__.startswith(("empty", "new_empty"))


def _tensor_bytes(values: Any) -> int:
    return sum(
        value.numel() * value.element_size()
        for value in tree_leaves(values)
        if isinstance(value, torch.Tensor)
    )


def _count_kernels(decoder: FastDecoder, operations: _Operations) -> None:
    """Have each layer that is a kernel of ours on a GPU counted as that, in place of what it runs elsewhere."""
    kernels: dict[type, Callable[..., int]] = {
        GroupNormSiLU: group_norm_silu.bytes_moved,
        RmsNormSiLU: rms_norm_silu.bytes_moved,
    }
    for module in decoder.modules():
        if type(module) in kernels:
            _count_kernel(module, kernels[type(module)], operations)


def _count_kernel(module: Any, bytes_moved: Callable[..., int], operations: _Operations) -> None:
    plain = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        with operations.paused():
            result: torch.Tensor = plain(x)
        operations.traffic.operations.append(Operation(KERNEL, bytes_moved(x.shape, x.dtype), 0))
        return result

    module.forward = forward


def count(case: Case, dtype: torch.dtype, fast_dtype: torch.dtype | None = None) -> Traffic:
    """The traffic of a decode from latents to a VAE's output, of its own decoder or, in ``fast_dtype``, the fast one.

    ``dtype`` is that of the VAE.
    """
    vae = case.build("meta", dtype)
    traffic = Traffic()
    operations = _Operations(traffic)
    if fast_dtype is not None:
        decoder = FastDecoder(vae, fast_dtype)
        _count_kernels(decoder, operations)
        register_vae_fast_path_gate(vae, decoder)
    latents = case.latents("meta", dtype)
    is_fast = fast_dtype is not None
    with torch.no_grad(), use_vae_fast_path(vae, is_fast), _Attention(operations), operations:
        vae.decode(latents, return_dict=False)
    return traffic


def count_picture(case: Case, dtype: torch.dtype, *, is_fast: bool) -> Traffic:
    """What makes bytes of a VAE's output: our kernel, or diffusers' ``VaeImageProcessor`` and the rounding."""
    decoded = torch.empty(case.batch, 3, case.side, case.side, dtype=dtype, device="meta")
    if is_fast:
        return Traffic([Operation(PICTURE, to_uint8.bytes_moved(decoded.shape, dtype), 0)])
    traffic = Traffic()
    operations = _Operations(traffic)
    operations.kind = PICTURE
    with operations:
        floats = VaeImageProcessor().postprocess(decoded, output_type="pt")
        (floats.float() * 255).round().to(torch.uint8).movedim(-3, -1).contiguous()
    return traffic


def derive() -> tuple[Traffic, Traffic]:
    """The VAE's own decoder, and the rewritten one: from latents to bytes."""
    case, dtype = Case("AutoencoderKL", 1024), torch.bfloat16
    eager, rewritten = count(case, dtype), count(case, dtype, dtype)
    eager.operations += count_picture(case, dtype, is_fast=False).operations
    rewritten.operations += count_picture(case, dtype, is_fast=True).operations
    return eager, rewritten


def figures_of(name: str, traffic: Traffic) -> dict[str, float]:
    return {
        f"{name}_bytes": traffic.bytes,
        f"{name}_flops": traffic.flops,
        f"{name}_operations": len(traffic.operations),
        f"{name}_h200_memory_ms": traffic.bytes / H200_BYTES_PER_SECOND * 1000,
        f"{name}_h200_compute_ms": traffic.flops / H200_FLOPS_PER_SECOND * 1000,
        f"{name}_h200_roofline_ms": 1000
        * traffic.roofline_seconds(H200_FLOPS_PER_SECOND, H200_BYTES_PER_SECOND),
    }


def main() -> None:
    """Derive and report."""
    options = measure.parse_options(
        "Bytes and FLOPs of a VAE decode, derived from shapes; --quick changes nothing."
    )
    quiet_libraries()
    eager, rewritten = derive()
    figures = {**figures_of("eager", eager), **figures_of("rewritten", rewritten)}
    figures["bytes_ratio"] = eager.bytes / rewritten.bytes
    figures["flops_ratio"] = eager.flops / rewritten.flops
    figures["roofline_ratio"] = figures["eager_h200_roofline_ms"] / figures["rewritten_h200_roofline_ms"]
    by_kind = eager.bytes_by_kind(), rewritten.bytes_by_kind()
    kinds = sorted({*by_kind[0], *by_kind[1]}, key=lambda kind: -by_kind[0].get(kind, 0))
    both = ("eager", "rewritten")
    measure.report(
        "AutoencoderKL, 1024x1024, bfloat16, one decode to bytes: derived from shapes, not measured",
        ["", "eager", "rewritten"],
        [
            *([f"GB, {kind}", *(sums.get(kind, 0) / 1e9 for sums in by_kind)] for kind in kinds),
            ["GB", eager.bytes / 1e9, rewritten.bytes / 1e9],
            ["TFLOP", eager.flops / 1e12, rewritten.flops / 1e12],
            ["operations", str(len(eager.operations)), str(len(rewritten.operations))],
            ["ms of GB at 4.8 TB/s", *(figures[f"{name}_h200_memory_ms"] for name in both)],
            ["ms of TFLOP at 989 TFLOP/s", *(figures[f"{name}_h200_compute_ms"] for name in both)],
            ["ms, the larger of each operation", *(figures[f"{name}_h200_roofline_ms"] for name in both)],
        ],
    )
    print("\npeaks: NVIDIA's data sheet of the H200; no decode was timed for this")
    measure.write_json(options.json, figures)


if __name__ == "__main__":
    main()
