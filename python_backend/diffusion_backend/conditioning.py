"""``conditioning``: everything the denoise stage needs of one request, as one safetensors blob.

The tensors (any dtype, bfloat16 too) are what the encoders returned, and the pixels of the request's images; the
header's metadata holds the JSON skeleton that puts them back into where they came from, and the request's resolved
settings. No pickle: the blob may
come from a direct client.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, JSON header, data).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load, save

from diffusion_backend.errors import invalid
from diffusion_backend.values import MALFORMED, from_skeleton, to_skeleton

FORMAT = 2
METADATA = "conditioning"
MAX_ROWS = 64
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Call:
    """One recorded call of an encoding method: its name and what it returned."""

    name: str
    result: Any


@dataclass(frozen=True)
class Conditioning:
    """The recorded calls of one request in call order, its settings, and the seconds encoding took.

    ``rows`` is 1 but for warmup: so many copies of the request are run, and answered once. ``dtype`` is set where the
    encoders did not compute in the dtype their weights are stored in (on a CPU, in dry runs): "float32". ``images``
    are the call's arguments that are no settings: denoise runs the pipeline's ``__call__`` with them, too.
    """

    calls: list[Call]
    settings: Mapping[str, object]
    encode_seconds: float
    rows: int = 1
    dtype: str | None = None
    images: Mapping[str, Image.Image | list[Image.Image]] = field(default_factory=dict)


def pack(conditioning: Conditioning) -> bytes:
    """The blob. Tensors come from any device; they are stored contiguous."""
    tensors: dict[str, torch.Tensor] = {}

    def store(tensor: torch.Tensor) -> str:
        name = f"t{len(tensors)}"
        # A copy of its own: safetensors refuses tensors that share memory (views, expanded masks).
        tensors[name] = tensor.detach().cpu().contiguous().clone()
        return name

    calls = [[call.name, to_skeleton(call.result, store)] for call in conditioning.calls]
    header = {
        "format": FORMAT,
        "calls": calls,
        "images": {name: to_skeleton(image, store) for name, image in conditioning.images.items()},
        "settings": dict(conditioning.settings),
        "encode_seconds": conditioning.encode_seconds,
        "rows": conditioning.rows,
        "dtype": conditioning.dtype,
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
        calls = [
            Call(str(name), from_skeleton(skeleton, tensors.__getitem__))
            for name, skeleton in header["calls"]
        ]
        images = {
            str(name): from_skeleton(skeleton, tensors.__getitem__)
            for name, skeleton in header["images"].items()
        }
        given = [
            part for image in images.values() for part in (image if isinstance(image, list) else [image])
        ]
        if not all(isinstance(image, Image.Image) for image in given):
            raise ValueError("its images are none")
        rows = header["rows"]
        if not isinstance(rows, int) or not 1 <= rows <= MAX_ROWS:
            raise ValueError(f"its rows are {rows!r}, not 1 to {MAX_ROWS}")
        dtype = header["dtype"]
        if dtype not in (None, *DTYPES):
            raise ValueError(f"its dtype is {dtype!r}, not one of {', '.join(DTYPES)}")
        seconds = float(header["encode_seconds"])
        if not 0 <= seconds < math.inf:
            raise ValueError(f"its encode_seconds are {seconds}, not a time")
        return Conditioning(calls, dict(header["settings"]), seconds, rows, dtype, images)
    except (SafetensorError, *MALFORMED) as error:
        raise invalid("conditioning", f"'conditioning' is not the encode stage's output: {error}") from None


def _read_header(blob: bytes) -> dict[str, Any]:
    length = int.from_bytes(blob[:8], "little")
    if not 0 < length <= len(blob) - 8:
        raise ValueError("no safetensors header")
    header = json.loads(json.loads(blob[8 : 8 + length])["__metadata__"][METADATA])
    if not isinstance(header, dict):
        raise TypeError("its header is not an object")
    return header
