"""Stand-ins: components of a pipeline without their weights.

A stage loads only its own components, but the pipeline's code reads others too (``vae.config``,
``transformer.dtype``, ``isinstance(vae, ...)``). A stand-in is a real instance of the component's class whose
parameters are on the meta device: it costs no memory, answers every attribute, and what it must not do (a forward)
is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_map

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
    Buffers are real: some pipelines read them (FLUX.2 normalises with the VAE's batch norm).
    """
    with init_empty_weights(include_buffers=False):
        module = _from_config(cls, folder).to(dtype).eval()
    _load_buffers(module, folder)
    namespace: dict[str, Any] = {
        "device": property(lambda _: device),
        "dtype": property(lambda _: dtype),
        "to": lambda self, *_args, **_kwargs: self,
        **(methods or {}),
    }
    module.__class__ = type(cls.__name__, (cls,), namespace)
    return module


def dry_methods(cls: type[nn.Module]) -> dict[str, Method]:
    """``forward`` and, for a VAE, ``decode`` that compute shapes and dtypes only.

    They take real CPU tensors and return real zeros: the class's own code runs under a FakeTensorMode, so no weights
    are needed and nothing is calculated.
    """
    return {name: _dry(getattr(cls, name)) for name in ("forward", "decode") if hasattr(cls, name)}


def _dry(method: Method) -> Method:
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            weights = {
                name: torch.empty(tensor.shape, dtype=tensor.dtype)
                for name, tensor in [*self.named_parameters(), *self.named_buffers()]
            }
            inputs = tree_map(
                lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, (args, kwargs)
            )
            outputs = functional_call(_Method(self, method), _prefixed(weights), inputs[0], inputs[1])
        return tree_map(
            lambda x: torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, FakeTensor) else x, outputs
        )

    return run


class _Method(nn.Module):
    """Makes any method of ``module`` the forward that ``functional_call`` runs."""

    def __init__(self, module: nn.Module, method: Method) -> None:
        super().__init__()
        self.module = module
        self._method = method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(self.module, *args, **kwargs)


def _prefixed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"module.{name}": tensor for name, tensor in weights.items()}


def _from_config(cls: Any, folder: Path) -> nn.Module:
    if hasattr(cls, "load_config"):  # diffusers
        return cls.from_config(cls.load_config(folder))  # type: ignore[no-any-return]
    return cls(cls.config_class.from_pretrained(folder))  # type: ignore[no-any-return]  # transformers


def _load_buffers(module: nn.Module, folder: Path) -> None:
    """Fill the buffers that the checkpoint stores; the others were computed by the constructor."""
    buffers = dict(module.named_buffers())
    if not buffers:
        return
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in set(buffers) & set(weights.keys()):
                buffers[name].copy_(weights.get_tensor(name))
