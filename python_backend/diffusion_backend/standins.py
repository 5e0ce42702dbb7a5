"""Stand-ins: components of a pipeline without their weights.

A stage loads only its own components, but the pipeline's code reads others too (``vae.config``,
``transformer.dtype``, ``isinstance(vae, ...)``). A stand-in is a real instance of the component's class whose
parameters are on the meta device: it costs no memory, answers every attribute, and what it must not do (a forward)
is replaced.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from diffusion_backend.oddities import transformers_config
from diffusion_backend.values import map_tensors, to_skeleton

Method = Callable[..., Any]


def build_stand_in(
    cls: type[nn.Module],
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    methods: dict[str, Method] | None = None,
) -> nn.Module:
    """An instance of ``cls`` from the configuration in ``folder`` that claims ``device`` and ``dtype``.

    ``methods`` replace the class's own (``forward``, ``decode``, ...); each takes the stand-in as its first argument.
    Buffers are real: some pipelines read them (FLUX.2 normalises with the VAE's batch norm). The device is claimed,
    but the dtype is the parameters' own: some pipelines change a component's dtype and read it back.
    """
    with init_empty_weights(include_buffers=False):
        module = _from_config(cls, folder).to(dtype).eval()
    _load_buffers(module, folder)
    namespace: dict[str, Any] = {
        # Libraries look up what they know of a class by its name.
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "device": property(lambda _: device),
        "to": _change_dtype,
        **(methods or {}),
    }
    module.__class__ = type(cls.__name__, (cls,), namespace)
    return module


def _take_no_adapter(_self: nn.Module, *_args: Any, **_kwargs: Any) -> None:
    """A LoRA's part goes where the weights are."""


# Methods of a stand-in that takes no LoRAs, when its pipeline loads them.
NO_ADAPTERS: dict[str, Method] = {"load_lora_adapter": _take_no_adapter, "load_adapter": _take_no_adapter}


def takes_adapters(module: nn.Module) -> bool:
    """Whether ``module`` is no stand-in with ``NO_ADAPTERS``."""
    return getattr(type(module), "load_adapter", None) is not _take_no_adapter


def _change_dtype(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """``module.to(...)`` without the device."""
    for dtype in (*args, *kwargs.values()):
        if isinstance(dtype, torch.dtype):
            nn.Module.to(module, dtype=dtype)
    return module


def dry_methods(cls: type[nn.Module]) -> dict[str, Method]:
    """``forward`` and, for a VAE, ``encode`` and ``decode`` that compute shapes and dtypes only.

    They take real CPU tensors and return real ones, not zeros: these would end in 0 / 0 where a pipeline normalises.
    The class's own code runs with parameters that have no memory: what depends on them is not calculated, only its
    shape is. What does not (masks, position ids) is, for that code may go by its values.
    """
    return {name: _dry(getattr(cls, name)) for name in ("forward", "encode", "decode") if hasattr(cls, name)}


class _DryMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fakes what any fake tensor goes into; calculates the rest."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(x, FakeTensor) for x in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        # The shape of what a mask selects depends on its values: real ones are looked up here.
        if func in _INDEXING:
            args = (args[0], _without_masks(args[1]), *args[2:])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor on the CPU of the shape and dtype of a meta tensor."""
        return self.fake_tensor_converter.from_meta_and_device(self, tensor, torch.device("cpu"))


_INDEXING = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
)


def _without_masks(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The same indices with each boolean mask as the positions of its true values."""
    positions: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool and not isinstance(index, FakeTensor):
            positions.extend(index.nonzero().unbind(1))
        else:
            positions.append(index)
    return positions


def _dry(method: Method) -> Method:
    """``method`` of one component. What it was given before, to the bit, it answers from memory.

    Runs that try sizes and numbers of frames differ little: the prompt's encoders, for one, are always given the same.
    """
    made: dict[str, Any] = {}

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = _digest(self, args, kwargs)
        outputs = made[given] if given in made else compute(self, args, kwargs)
        if given is not None:
            made[given] = outputs
        return tree_map(lambda leaf: map_tensors(leaf, real), outputs)

    def compute(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mode = _DryMode()
        weights = {
            f"module.{name}": mode.fake(parameter.detach()) for name, parameter in self.named_parameters()
        }
        with mode:
            return functional_call(_Method(self, method), weights, args, kwargs)

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor):
            return tensor.clone()
        if method.__name__ == "decode":  # only looked at, and a clip's would take gigabytes
            return torch.ones((), dtype=tensor.dtype).expand(tensor.shape)
        return torch.ones(tensor.shape, dtype=tensor.dtype)

    return run


def _digest(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Of all that a dry run's outputs depend on; None where an argument is an object that may be anything."""

    def digest(tensor: torch.Tensor) -> list[Any]:
        whole = tensor.detach().clone(memory_format=torch.contiguous_format)
        data = whole.flatten().view(torch.uint8).numpy().tobytes()
        return [*tensor.shape, *tensor.stride(), str(tensor.dtype), hashlib.blake2b(data).hexdigest()]

    try:
        dtypes = [str(parameter.dtype) for parameter in module.parameters()]  # pipelines change them
        return json.dumps([dtypes, to_skeleton((args, kwargs), digest)])
    except TypeError:
        return None


class _Method(nn.Module):
    """Makes any method of ``module`` the forward that ``functional_call`` runs."""

    def __init__(self, module: nn.Module, method: Method) -> None:
        super().__init__()
        self.module = module
        self._method = method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(self.module, *args, **kwargs)


def _from_config(cls: Any, folder: Path) -> nn.Module:
    if hasattr(cls, "load_config"):  # diffusers
        return cls.from_config(cls.load_config(folder))  # type: ignore[no-any-return]
    return cls(transformers_config(cls, folder))  # type: ignore[no-any-return]


def _load_buffers(module: nn.Module, folder: Path) -> None:
    """Fill the buffers that the checkpoint stores; the others were computed by the constructor."""
    buffers = dict(module.named_buffers())
    if not buffers:
        return
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in set(buffers) & set(weights.keys()):
                buffers[name].copy_(weights.get_tensor(name))
