"""Values that cross from one stage to another: JSON, with the tensors apart or in it as numbers.

What a pipeline's methods take and return is made of tensors, lists, tuples, dicts, plain values, RGB images and the
few classes of ``RECORDS``. Nothing else travels, and nothing is pickled: values may come from a direct client.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTinyOutput
from diffusers.models.autoencoders.vae import (
    DiagonalGaussianDistribution,
    EncoderOutput,
    IdentityDistribution,
)
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from PIL import Image

# Classes whose objects are made again from these attributes, by the constructor's arguments of the same names.
RECORDS: dict[type, tuple[str, ...]] = {
    AutoencoderKLOutput: ("latent_dist",),
    AutoencoderTinyOutput: ("latents",),
    DiagonalGaussianDistribution: ("parameters", "deterministic"),
    EncoderOutput: ("latent",),
    IdentityDistribution: ("parameters",),
}
_RECORDS_BY_NAME = {cls.__name__: cls for cls in RECORDS}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)
}

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

# What from_skeleton and from_json raise for what is not theirs.
MALFORMED = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RuntimeError, RecursionError)


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with ``function`` applied to every tensor in it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in RECORDS:  # before dict, which some of them are
        fields = RECORDS[type(value)]
        return type(value)(**{name: map_tensors(getattr(value, name), function) for name in fields})
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, function) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    return value


def to_skeleton(value: Any, store: Callable[[torch.Tensor], Any]) -> Any:
    """JSON that says what ``value`` is; each tensor is what ``store`` makes of it.

    Raises:
        TypeError: something in it cannot travel.
    """
    if isinstance(value, torch.Tensor):
        return {"tensor" if channels_last(value) is None else "channels_last": store(value)}
    if type(value) in RECORDS:
        fields = {name: to_skeleton(getattr(value, name), store) for name in RECORDS[type(value)]}
        return {"record": [type(value).__name__, fields]}
    if type(value) in (list, tuple):  # not those derived from them, such as named tuples
        return {type(value).__name__: [to_skeleton(item, store) for item in value]}
    if isinstance(value, dict):
        return {"dict": {str(key): to_skeleton(item, store) for key, item in value.items()}}
    if isinstance(value, Image.Image):
        if value.mode != "RGB":
            raise TypeError(f"an image of mode {value.mode} cannot travel between stages")
        return {"image": store(torch.from_numpy(np.array(value)))}
    if isinstance(value, torch.Generator):
        # Its state: whoever draws from it next goes on where it stands.
        return {"generator": base64.b64encode(value.get_state().numpy().tobytes()).decode()}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(f"an object of class {type(value).__name__} cannot travel between stages")


def channels_last(tensor: torch.Tensor) -> torch.memory_format | None:
    """How a tensor lies in memory, if not in order: convolutions round by it (a VAE encodes to channels last)."""
    layout = _CHANNELS_LAST.get(tensor.ndim)
    if layout is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=layout):
        return None
    return layout


def from_skeleton(skeleton: Any, fetch: Callable[[Any], torch.Tensor]) -> Any:
    """The inverse of ``to_skeleton``; ``fetch`` is the inverse of ``store``. It raises one of ``MALFORMED``."""
    ((kind, content),) = skeleton.items()
    if kind == "tensor":
        return fetch(content)
    if kind == "channels_last":
        tensor = fetch(content)
        return tensor.contiguous(memory_format=_CHANNELS_LAST[tensor.ndim])
    if kind == "record":
        name, fields = content
        cls = _RECORDS_BY_NAME[name]
        return cls(**{field: from_skeleton(fields[field], fetch) for field in RECORDS[cls]})
    if kind == "list":
        return [from_skeleton(item, fetch) for item in content]
    if kind == "tuple":
        return tuple(from_skeleton(item, fetch) for item in content)
    if kind == "dict":
        return {key: from_skeleton(item, fetch) for key, item in content.items()}
    if kind == "image":
        pixels = fetch(content).numpy()
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[-1] != 3 or not pixels.size:
            raise ValueError(f"an image of {pixels.dtype} {list(pixels.shape)}, not uint8 [H, W, 3]")
        return Image.fromarray(pixels)
    if kind == "generator":
        generator = torch.Generator("cpu")
        state = bytearray(base64.b64decode(content, validate=True))
        generator.set_state(torch.frombuffer(state, dtype=torch.uint8))
        return generator
    if kind == "value":
        return content
    raise ValueError(f"unknown kind {kind!r}")


def to_json(value: Any) -> Any:
    """JSON with tensors as numbers, for small ones. Every bit is kept: JSON's numbers have more digits than these.

    Raises:
        TypeError: something in it cannot travel.
    """

    def numbers(tensor: torch.Tensor) -> dict[str, Any]:
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in _DTYPES:
            raise TypeError(f"a tensor of {tensor.dtype} cannot travel as numbers")
        return {"dtype": name, "values": tensor.detach().cpu().tolist()}

    return to_skeleton(value, numbers)


def from_json(content: Any) -> Any:
    """The inverse of ``to_json``."""
    return from_skeleton(content, lambda c: torch.tensor(c["values"], dtype=_DTYPES[c["dtype"]]))
