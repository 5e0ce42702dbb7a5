"""LoRAs: small additions to the weights of a model's components, several of which stay loaded beside each other.

The pipeline's own ``load_lora_weights`` reads them, whatever format they are in, and PEFT's layers hold them. Each
stage has them in its own components only, since stand-ins take none. A request's LoRAs are switched on before its
forward, where they differ from those of the forward before; without any, PEFT's layers do nothing but call the
layers that they stand for, so that the result is the same bits as without LoRAs.

https://huggingface.co/docs/diffusers/api/loaders/lora
"""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from diffusers import DiffusionPipeline
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError, safe_open
from torch import nn

from diffusion_backend import loading
from diffusion_backend.errors import DiffusionError, show, unusable
from diffusion_backend.inspection import PICKLE_SUFFIXES
from diffusion_backend.loading import PipelineFolder
from diffusion_backend.lora_choice import NAME, NAMES_ALLOWED, Loras
from diffusion_backend.rows import Denoiser
from diffusion_backend.stage_names import Stage
from diffusion_backend.standins import takes_adapters

_USUAL_NAME = "pytorch_lora_weights.safetensors"  # what ``save_lora_weights`` writes
_ADDED = ("lora", "lokr")  # in the name of each tensor that is added to a layer
_ADAPTER = re.compile(r"\.adapter_[0-9]{3}\b")  # in the names of what was loaded


def check_files(pipeline: PipelineFolder, folders: Mapping[str, str]) -> None:
    """Whether LoRAs can be loaded into a pipeline: tried without the pipeline's weights.

    Raises:
        DiffusionError: one of them is missing, damaged or not one for this pipeline, and why.
    """
    for name, folder in folders.items():
        if not NAME.fullmatch(name):
            raise unusable(f"'lora' has the name {show(name)}; allowed: {NAMES_ALLOWED}", "lora")
        _check_values(name, Path(folder))
    load(loading.load_empty(pipeline), folders)


def load(pipe: DiffusionPipeline, folders: Mapping[str, str]) -> int:
    """Load the LoRAs in ``folders``, by their names, into those components of ``pipe`` that are no stand-ins.

    Returns how many bytes they take there.

    Raises:
        DiffusionError: one of them is missing, damaged or not one for this pipeline, and why.
    """
    for name, adapter in _adapters(folders).items():
        file = _find_file(name, Path(folders[name]))
        if not hasattr(pipe, "load_lora_weights"):
            raise _refused(name, f"{type(pipe).__name__} takes no LoRAs")
        before = _shapes(pipe)
        try:
            options = {"weight_name": file.name, "use_safetensors": True, "local_files_only": True}
            tensors = _names(type(pipe).lora_state_dict(str(file.parent), **options))
            _check_tensors(name, file, tensors, pipe)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Already found a `peft_config`")  # as is wanted
                pipe.load_lora_weights(str(file.parent), adapter_name=adapter, **options)
        except DiffusionError:
            raise
        except Exception as error:  # of many kinds, and made of whatever the file holds
            raise _refused(
                name, f"{type(pipe).__name__} cannot load {file.name}: {_first_line(error)}"
            ) from error
        if _shapes(pipe) != before:
            raise _refused(name, f"{file.name} replaces layers of the model itself, for all requests")
        _check_places(name, file, tensors, pipe, adapter)
    return _added_bytes(pipe)


class LoraSwitch:
    """The LoRAs in a stage's components, and which of them are switched on; none at first.

    All methods are for the one thread that runs the components.
    """

    def __init__(self, pipe: DiffusionPipeline, stage: Stage, names: Iterable[str]) -> None:
        adapters = _adapters(names)
        self._modules = {
            id(module): _SwitchedModule(module, adapters)
            for module in loading.modules_of(pipe, stage).values()
        }
        self._views: WeakValueDictionary[tuple[int, Loras], nn.Module] = WeakValueDictionary()

    def switch(self, loras: Loras) -> None:
        """Switch ``loras`` on, and all others off."""
        for module in self._modules.values():
            module.switch(module.choose(loras))

    def state(self, module: nn.Module) -> Callable[[], Loras]:
        """A function that tells which are switched on in ``module``: what its results depend on besides arguments."""
        switched = self._modules[id(module)]
        return lambda: switched.current

    def denoiser(self, denoiser: Denoiser, loras: Loras) -> Denoiser:
        """``denoiser`` called for modules that have ``loras`` switched on when they run.

        The same LoRAs are the same module, and others another one: calls of other LoRAs are never joined.
        """
        held: dict[int, nn.Module] = {}  # as long as the request runs

        def call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            view = held.setdefault(id(module), self._view(module, loras))
            return denoiser(view, args, kwargs)

        return call

    def _view(self, module: nn.Module, loras: Loras) -> nn.Module:
        switched = self._modules[id(module)]
        chosen = switched.choose(loras)
        view = self._views.get((id(module), chosen))
        if view is None:
            view = self._views[id(module), chosen] = copy.copy(module)
            vars(view)["forward"] = switched.forward_with(chosen)
        return view


class _SwitchedModule:
    def __init__(self, module: nn.Module, adapters: Mapping[str, str]) -> None:
        held = getattr(module, "peft_config", {})
        self._module = module
        self._adapters = {name: adapter for name, adapter in adapters.items() if adapter in held}
        self._layers = list(_layers(module))
        self.current: Loras = ()
        self._set(())

    def choose(self, loras: Loras) -> Loras:
        """Those that have a part in this module."""
        return tuple((name, weight) for name, weight in loras if name in self._adapters)

    def switch(self, loras: Loras) -> None:
        if loras != self.current:
            self._set(loras)
            self.current = loras

    def forward_with(self, loras: Loras) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.switch(loras)
            return self._module(*args, **kwargs)

        return forward

    def _set(self, loras: Loras) -> None:
        adapters = [self._adapters[name] for name, _ in loras]
        for layer in self._layers:
            layer.set_adapter(adapters, inference_mode=True)
            for adapter, (_, weight) in zip(adapters, loras, strict=True):
                layer.set_scale(adapter, weight)


def _adapters(names: Iterable[str]) -> dict[str, str]:
    """What the LoRAs are called in the modules: PEFT takes no dots, and looks for the names in those of tensors."""
    return {name: f"adapter_{number:03}" for number, name in enumerate(sorted(names))}


def _layers(module: nn.Module) -> Iterator[BaseTunerLayer]:
    return (layer for layer in module.modules() if isinstance(layer, BaseTunerLayer))


def _find_file(name: str, folder: Path) -> Path:
    """The one safetensors file of a LoRA's folder, or the one of several that has the usual name."""
    if not folder.is_dir():
        raise _refused(name, f"there is no folder {folder}")
    files = sorted(folder.glob("*.safetensors"))
    usual = folder / _USUAL_NAME
    if usual in files:
        return usual
    if len(files) > 1:
        raise _refused(name, f"{folder} has {', '.join(file.name for file in files)}; allowed: one of them")
    if not files:
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES)
        what = (
            f"only pickle weights ({', '.join(pickles)}), which are never loaded" if pickles else "no weights"
        )
        raise _refused(name, f"{folder} has {what}; allowed: a safetensors file")
    return files[0]


def _check_values(name: str, folder: Path) -> None:
    """The file is whole, and all of its numbers are finite."""
    file = _find_file(name, folder)
    try:
        with safe_open(file, framework="pt") as tensors:
            keys = list(tensors.keys())
            for key in keys:
                if not torch.isfinite(tensors.get_tensor(key)).all():
                    raise _refused(name, f"{show(key)} in {file.name} is not finite")
    except SafetensorError as error:
        raise _refused(name, f"{file.name} is cut short or damaged: {error}") from None
    if dropped := [key for key in keys if "dora_scale" in key]:
        raise _refused(
            name, f"{file.name} is a DoRA ({show(dropped[0])}), which diffusers does not load whole"
        )


def _names(state_dict: Any) -> set[str]:
    """The tensors of a LoRA by the names that diffusers has for them; others come with their scales, too."""
    return set(state_dict[0] if isinstance(state_dict, tuple) else state_dict)


def _check_tensors(name: str, file: Path, tensors: set[str], pipe: DiffusionPipeline) -> None:
    """All are additions, in pairs, to parts that the pipeline has."""
    takes = [part for part in pipe._lora_loadable_modules if getattr(pipe, part, None) is not None]
    for tensor in sorted(tensors):
        if tensor.partition(".")[0] not in takes:
            raise _refused(
                name,
                f"{show(tensor)} in {file.name} is for no part of {type(pipe).__name__} that takes LoRAs: "
                f"{', '.join(takes)}",
            )
        if not any(added in tensor for added in _ADDED):
            raise _refused(name, f"{file.name} replaces {show(tensor)} of the model itself, for all requests")
        for one, other in ((".lora_A.", ".lora_B."), (".lora_B.", ".lora_A.")):
            if one in tensor and tensor.endswith(".weight") and tensor.replace(one, other) not in tensors:
                raise _refused(name, f"{file.name} has {show(tensor)} without {tensor.replace(one, other)!r}")
    if not tensors:
        raise _refused(name, f"{file.name} has no tensors")


def _check_places(name: str, file: Path, tensors: set[str], pipe: DiffusionPipeline, adapter: str) -> None:
    """Every tensor has found its layer: diffusers only warns of those that have not."""
    for part in {tensor.partition(".")[0] for tensor in tensors}:
        module = getattr(pipe, part)
        if not takes_adapters(module):
            continue
        given = {
            tensor for tensor in tensors if tensor.startswith(f"{part}.") and not tensor.endswith(".alpha")
        }
        placed = {
            f"{part}.{parameter.replace(f'.{adapter}', '')}": value
            for parameter, value in module.named_parameters()
            if f".{adapter}" in parameter
        }
        if len(placed) < len(given):
            example = min(given - placed.keys())
            raise _refused(
                name,
                f"{len(given) - len(placed)} of {len(given)} tensors in {file.name} fit nowhere in {part}, such as "
                f"{show(example)}",
            )


def _shapes(pipe: DiffusionPipeline) -> dict[str, torch.Size]:
    """Those of all weights that the model has by itself."""
    return {
        f"{part}.{parameter.replace('.base_layer', '')}": value.shape
        for part, parameter, value in _parameters(pipe)
        if not _ADAPTER.search(parameter)
    }


def _added_bytes(pipe: DiffusionPipeline) -> int:
    return sum(value.nbytes for _, parameter, value in _parameters(pipe) if _ADAPTER.search(parameter))


def _parameters(pipe: DiffusionPipeline) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Component, name and value of each."""
    for part, module in pipe.components.items():
        if isinstance(module, nn.Module):
            for name, value in module.named_parameters():
                yield part, name, value


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {json.dumps(str(error))[1:-1]}"[:500]


def _refused(name: str, why: str) -> DiffusionError:
    return unusable(f"the LoRA {show(name)} cannot be used: {why}", "lora")
