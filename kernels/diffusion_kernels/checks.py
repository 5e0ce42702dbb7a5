"""What the kernels refuse. Every check raises a ``ValueError`` that names what is allowed."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def require_input(x: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    """Refuses an input that is empty, or of another dtype."""
    if x.dtype not in dtypes:
        raise ValueError(f"x is {x.dtype}: expected one of {', '.join(map(str, dtypes))}")
    if x.numel() == 0:
        raise ValueError(f"x is empty, with shape {tuple(x.shape)}: expected at least one element")


def require_cpu(x: Tensor) -> None:
    """Refuses an input that is not on the CPU."""
    if x.device.type != "cpu":
        raise ValueError(f"x is on {x.device}: expected a CPU tensor")


def require_channels_last(x: Tensor, dimensions: tuple[int, ...]) -> torch.memory_format:
    """Refuses another number of dimensions or another layout than dense channels last; returns that layout."""
    if x.dim() not in dimensions:
        raise ValueError(f"x has {x.dim()} dimensions: expected {' or '.join(map(str, dimensions))}")
    layout = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    if not x.is_contiguous(memory_format=layout):
        raise ValueError(
            f"x has strides {x.stride()} for shape {tuple(x.shape)}: expected dense {layout}; "
            f"x.contiguous(memory_format={layout}) makes it so"
        )
    return layout


def require_groups(num_groups: int, channels: int) -> None:
    """Refuses groups that do not divide the channels."""
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"num_groups is {num_groups}: expected a divisor of the {channels} channels")


def require_parameter(name: str, parameter: Tensor, x: Tensor) -> None:
    """Refuses a parameter that is not one dense floating-point value a channel on the device of ``x``."""
    channels = x.shape[1]
    # [C], or [C, 1, 1] and [C, 1, 1, 1] as the modules keep it that broadcast it over pixels.
    if parameter.dim() == 0 or parameter.shape[0] != channels or parameter.numel() != channels:
        raise ValueError(f"{name} has shape {tuple(parameter.shape)}: expected ({channels},)")
    if parameter.dtype not in DTYPES:
        raise ValueError(f"{name} is {parameter.dtype}: expected one of {', '.join(map(str, DTYPES))}")
    if parameter.device != x.device:
        raise ValueError(f"{name} is on {parameter.device}: expected the device of x, {x.device}")
    if not parameter.is_contiguous():
        raise ValueError(f"{name} has strides {parameter.stride()}: expected a contiguous tensor")


def require_no_grad(**tensors: Tensor | None) -> None:
    """Refuses tensors whose gradient would be lost: the kernels have no backward pass."""
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if tensor is not None and tensor.requires_grad:
                raise ValueError(
                    f"{name} requires a gradient: expected torch.no_grad() or torch.inference_mode()"
                )
