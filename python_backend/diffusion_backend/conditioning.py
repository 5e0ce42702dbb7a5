"""``conditioning``: everything the denoise stage needs of one request, as one safetensors blob.

The tensors (any dtype, bfloat16 too) are what the encoders returned; the header's metadata holds the JSON skeleton
that puts them back into the calls they came from, and the request's resolved settings. No pickle: the blob may
come from a direct client.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, JSON header, data).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from diffusion_backend.errors import invalid

FORMAT = 1
METADATA = "conditioning"
MAX_ROWS = 64


@dataclass(frozen=True)
class Call:
    """One recorded call of an encoder method: its name and what it returned."""

    name: str
    result: Any


@dataclass(frozen=True)
class Conditioning:
    """The recorded calls of one request in call order, its settings, and the seconds encoding took.

    ``rows`` is 1 but for warmup: so many copies of the request are run, and answered once.
    """

    calls: list[Call]
    settings: Mapping[str, object]
    encode_seconds: float
    rows: int = 1


def pack(conditioning: Conditioning) -> bytes:
    """The blob. Tensors come from any device; they are stored contiguous."""
    tensors: dict[str, torch.Tensor] = {}
    calls = [[call.name, _to_skeleton(call.result, tensors)] for call in conditioning.calls]
    header = {
        "format": FORMAT,
        "calls": calls,
        "settings": dict(conditioning.settings),
        "encode_seconds": conditioning.encode_seconds,
        "rows": conditioning.rows,
    }
    # One metadata entry: safetensors writes several in no fixed order.
    return bytes(save(tensors, {METADATA: json.dumps(header)}))


def unpack(blob: bytes) -> Conditioning:
    """The inverse of ``pack``; tensors are on the CPU.

    Raises:
        DiffusionError: INVALID_ARG when the blob is not one of ours.
    """
    try:
        header = _read_header(blob)
        if header["format"] != FORMAT:
            raise ValueError(f"its format is {header['format']!r}, not {FORMAT}")
        tensors = load(blob)
        calls = [Call(str(name), _from_skeleton(skeleton, tensors)) for name, skeleton in header["calls"]]
        rows = header["rows"]
        if not isinstance(rows, int) or not 1 <= rows <= MAX_ROWS:
            raise ValueError(f"its rows are {rows!r}, not 1 to {MAX_ROWS}")
        return Conditioning(calls, dict(header["settings"]), float(header["encode_seconds"]), rows)
    except (SafetensorError, RecursionError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise invalid("conditioning", f"'conditioning' is not the encode stage's output: {error}") from None


def _read_header(blob: bytes) -> dict[str, Any]:
    length = int.from_bytes(blob[:8], "little")
    if not 0 < length <= len(blob) - 8:
        raise ValueError("no safetensors header")
    header = json.loads(json.loads(blob[8 : 8 + length])["__metadata__"][METADATA])
    if not isinstance(header, dict):
        raise TypeError("its header is not an object")
    return header


def _to_skeleton(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """JSON of nested lists, tuples, dicts, tensors and plain values; the tensors go to ``tensors``."""
    if isinstance(value, torch.Tensor):
        name = f"t{len(tensors)}"
        # A copy of its own: safetensors refuses tensors that share memory (views, expanded masks).
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, tuple | list):
        return {type(value).__name__: [_to_skeleton(item, tensors) for item in value]}
    if isinstance(value, dict):
        return {"dict": {str(key): _to_skeleton(item, tensors) for key, item in value.items()}}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(f"an encoder returned a {type(value).__name__}, which cannot travel between stages")


def _from_skeleton(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    ((kind, content),) = skeleton.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "list":
        return [_from_skeleton(item, tensors) for item in content]
    if kind == "tuple":
        return tuple(_from_skeleton(item, tensors) for item in content)
    if kind == "dict":
        return {key: _from_skeleton(item, tensors) for key, item in content.items()}
    if kind == "value":
        return content
    raise ValueError(f"unknown kind {kind!r}")
