"""Calls of a denoiser, by several requests, as one: which may be joined, how, and how the result is split.

Nothing here knows a pipeline family. What a call's arguments are like decides:

- a tensor whose leading axis is the call's batch size holds rows: it is concatenated;
- a list of that length holds one entry a row: it is joined to a longer one. Entries that are no tensors (Qwen-Image's
  shapes) must be equal, since models read the first one for all. Where the latents are a tensor, lists of tensors are
  no such lists (a ControlNet's residuals: one a layer), and each of their tensors is taken for itself;
- a timestep without an axis becomes one a row;
- anything else (rotary embeddings, scales, flags) serves all rows, so it must be equal.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# A scalar tensor of one of these names is the row's place in its schedule; diffusers' models expand it to their batch.
_TIMESTEPS = ("timestep", "timesteps", "t")
# Positions must be equal, also where they have a row axis: FLUX's transformers read the first row's for all.
_POSITIONS = ("img_ids", "txt_ids", "image_ids", "text_ids")
_REMEMBERED = 32


class UnjoinableError(Exception):
    """The denoiser returned something that has no rows."""


@dataclass(frozen=True)
class Layout:
    """``rows`` is a call's batch size (2 where guidance doubles it); ``lists``: its latents are one tensor a row."""

    rows: int
    lists: bool

    def is_rows(self, value: list[Any]) -> bool:
        """Whether a list has an entry a row."""
        return len(value) == self.rows and (
            self.lists or not any(isinstance(entry, torch.Tensor) for entry in value)
        )


@dataclass(frozen=True)
class DenoiserCall:
    """One call; calls of equal ``key`` may be joined."""

    module: nn.Module
    arguments: dict[str, Any]
    layout: Layout
    key: Hashable

    @property
    def rows(self) -> int:
        return self.layout.rows


class Digests:
    """Digests of tensors that serve all rows. A pipeline passes the same one at every step: it is read once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, int, bytes]] = {}

    def of(self, tensor: torch.Tensor) -> bytes:
        known = self._known.get(id(tensor))
        if known is not None and known[0] is tensor and known[1] == tensor._version:
            return known[2]
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        digest = hashlib.blake2b(data.tobytes(), digest_size=16).digest()
        if len(self._known) >= _REMEMBERED:
            self._known.pop(next(iter(self._known)))
        self._known[id(tensor)] = (tensor, tensor._version, digest)
        return digest


def read_call(
    module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], digests: Digests
) -> DenoiserCall:
    """What ``module(*args, **kwargs)`` was called with, by parameter name, and what it may be joined with."""
    names = _parameter_names(type(module).forward)
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    latents = arguments[names[0]]
    layout = Layout(len(latents), isinstance(latents, list))
    described = tuple(
        (name, _describe(name, value, layout, digests)) for name, value in sorted(arguments.items())
    )
    return DenoiserCall(module, arguments, layout, (id(module), described))


def forward(calls: Sequence[DenoiserCall]) -> list[Any]:
    """What the denoiser returns to each of ``calls``, which have one key: one forward for all.

    Raises:
        UnjoinableError: its result has no rows. Otherwise what the denoiser raises.
    """
    outputs = split(calls[0].module(**join(calls)), [call.rows for call in calls])
    if len(outputs) != len(calls):
        raise UnjoinableError(f"{len(outputs)} results for {len(calls)} calls")
    return outputs


def join(calls: Sequence[DenoiserCall]) -> dict[str, Any]:
    """The arguments of the one call that stands for ``calls``; a single call's are passed on as they are."""
    first = calls[0]
    if len(calls) == 1:
        return first.arguments
    layouts = [call.layout for call in calls]
    return {name: _join(name, [call.arguments[name] for call in calls], layouts) for name in first.arguments}


def split(output: Any, rows: Sequence[int]) -> list[Any]:
    """``output`` for each of the calls that were joined.

    Raises:
        UnjoinableError: a part of it has no leading axis of as many rows.
    """
    if len(rows) == 1:
        return [output]
    if output is None:
        return [None] * len(rows)
    if isinstance(output, torch.Tensor):
        if output.ndim == 0 or output.shape[0] != sum(rows):
            raise UnjoinableError(f"a tensor of shape {list(output.shape)} for {sum(rows)} rows")
        return list(torch.split(output, list(rows)))
    if isinstance(output, dict):  # diffusers' outputs are dictionaries, too
        columns = {name: split(value, rows) for name, value in output.items()}
        return [
            type(output)(**{name: column[i] for name, column in columns.items()}) for i in range(len(rows))
        ]
    if isinstance(output, tuple):
        return list(zip(*(split(part, rows) for part in output), strict=True))
    if isinstance(output, list) and len(output) == sum(rows):
        ends = [sum(rows[: i + 1]) for i in range(len(rows))]
        return [output[end - count : end] for count, end in zip(rows, ends, strict=True)]
    raise UnjoinableError(f"a {type(output).__name__} for {sum(rows)} rows")


def _describe(name: str, value: Any, layout: Layout, digests: Digests) -> Any:
    """What another call's argument must equal to be joined with this one."""
    if isinstance(value, torch.Tensor):
        if _is_timestep(name, value):
            return "timestep", str(value.dtype)
        if name not in _POSITIONS and _has_rows(value, layout):
            return "rows", value.shape[1:], str(value.dtype)
        return "shared", value.shape, str(value.dtype), digests.of(value)
    if isinstance(value, list) and layout.is_rows(value):
        entries = tuple(_describe_entry(entry) for entry in value)
        return "list", *(entries[:1] if len(set(entries)) == 1 else entries)
    if isinstance(value, (list, tuple)):
        return type(value), *(_describe(name, part, layout, digests) for part in value)
    if isinstance(value, dict):
        return "dict", *((key, _describe(key, part, layout, digests)) for key, part in sorted(value.items()))
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return type(value), value
    return "object", id(value)


def _join(name: str, values: list[Any], layouts: list[Layout]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        if _is_timestep(name, first):
            return torch.cat(
                [value.expand(layout.rows) for value, layout in zip(values, layouts, strict=True)]
            )
        # Positions without a row axis, and as many as there are rows, are [N, 3].
        positions = name in _POSITIONS and first.ndim == 2
        return torch.cat(values) if _has_rows(first, layouts[0]) and not positions else first
    if isinstance(first, list) and layouts[0].is_rows(first):
        return [entry for value in values for entry in value]
    if isinstance(first, (list, tuple)):
        return type(first)(_join(name, list(parts), layouts) for parts in zip(*values, strict=True))
    if isinstance(first, dict):
        return {key: _join(key, [value[key] for value in values], layouts) for key in first}
    return first


def _is_timestep(name: str, value: torch.Tensor) -> bool:
    return value.ndim == 0 and name in _TIMESTEPS


def _has_rows(value: torch.Tensor, layout: Layout) -> bool:
    return value.ndim > 0 and value.shape[0] == layout.rows


def _describe_entry(entry: Any) -> Hashable:
    """Tensors may differ in their sizes; anything else must be the same."""
    if isinstance(entry, torch.Tensor):
        return "tensor", str(entry.dtype), entry.ndim
    if isinstance(entry, (list, tuple)):
        return type(entry), *(_describe_entry(part) for part in entry)
    if entry is None or isinstance(entry, (bool, int, float, str)):
        return type(entry), entry
    return "object", id(entry)


@functools.cache
def _parameter_names(method: Callable[..., Any]) -> tuple[str, ...]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return tuple(parameter.name for parameter in parameters if parameter.kind in positional)
