"""Calls of a denoiser, by several requests, as one: which may be joined, how, and how the result is split.

Nothing here knows a pipeline family. What a call's arguments are like decides:

- a tensor whose leading axis is the call's batch size holds rows: it is concatenated;
- a list of that length (Z-Image's latents) holds one entry a row: it is joined to a longer one. Entries that are no
  tensors (Qwen-Image's shapes) must be equal, since models read the first one for all;
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
class DenoiserCall:
    """One call. ``rows`` is its batch size (2 where guidance doubles it); calls of equal ``key`` may be joined."""

    module: nn.Module
    arguments: dict[str, Any]
    rows: int
    key: Hashable


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
    rows = len(latents)
    described = tuple(
        (name, _describe(name, value, rows, digests)) for name, value in sorted(arguments.items())
    )
    return DenoiserCall(module, arguments, rows, (id(module), described))


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
    rows = [call.rows for call in calls]
    return {name: _join(name, [call.arguments[name] for call in calls], rows) for name in first.arguments}


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


def _describe(name: str, value: Any, rows: int, digests: Digests) -> Any:
    """What another call's argument must equal to be joined with this one."""
    if isinstance(value, torch.Tensor):
        if _is_timestep(name, value):
            return "timestep", str(value.dtype)
        if name not in _POSITIONS and _has_rows(value, rows):
            return "rows", value.shape[1:], str(value.dtype)
        return "shared", value.shape, str(value.dtype), digests.of(value)
    if isinstance(value, list) and len(value) == rows:
        entries = tuple(_describe_entry(entry) for entry in value)
        return "list", *(entries[:1] if len(set(entries)) == 1 else entries)
    if isinstance(value, (list, tuple)):
        return type(value), *(_describe(name, part, rows, digests) for part in value)
    if isinstance(value, dict):
        return "dict", *((key, _describe(key, part, rows, digests)) for key, part in sorted(value.items()))
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return type(value), value
    return "object", id(value)


def _join(name: str, values: list[Any], rows: list[int]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        if _is_timestep(name, first):
            return torch.cat([value.expand(count) for value, count in zip(values, rows, strict=True)])
        # Positions without a row axis, and as many as there are rows, are [N, 3].
        positions = name in _POSITIONS and first.ndim == 2
        return torch.cat(values) if _has_rows(first, rows[0]) and not positions else first
    if isinstance(first, list) and len(first) == rows[0]:
        return [entry for value in values for entry in value]
    if isinstance(first, (list, tuple)):
        return type(first)(_join(name, list(parts), rows) for parts in zip(*values, strict=True))
    if isinstance(first, dict):
        return {key: _join(key, [value[key] for value in values], rows) for key in first}
    return first


def _is_timestep(name: str, value: torch.Tensor) -> bool:
    return value.ndim == 0 and name in _TIMESTEPS


def _has_rows(value: torch.Tensor, rows: int) -> bool:
    return value.ndim > 0 and value.shape[0] == rows


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
