"""Loading one stage's share of a diffusers pipeline.

Every stage builds the whole, unmodified pipeline object, with real weights for its own components and stand-ins for
the rest. Tokenizers, schedulers and processors have no weights and are loaded everywhere.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from safetensors import safe_open
from torch import nn

from diffusion_backend.errors import DiffusionError, Status
from diffusion_backend.standins import Method, build_stand_in, dry_methods

logger = logging.getLogger(__name__)


def quiet_libraries() -> None:
    """No progress bars and no warnings from diffusers and transformers: some would log a user's prompt."""
    for library in (diffusers.utils.logging, transformers.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()


class Stage(StrEnum):
    """The three stages, named as their Triton models are."""

    ENCODE = "encode"
    DENOISE = "denoise"
    VAE_DECODE = "vae_decode"


@dataclass(frozen=True)
class Component:
    """A component of ``model_index.json`` that is a torch module."""

    name: str
    cls: type[nn.Module]

    @property
    def stage(self) -> Stage:
        """The stage that owns its weights, by the names that diffusers gives components."""
        if self.name.startswith(("transformer", "unet")):
            return Stage.DENOISE
        if self.name == "vae":
            return Stage.VAE_DECODE
        return Stage.ENCODE


@dataclass(frozen=True)
class PipelineFolder:
    """A diffusers pipeline on disk: its class and its torch modules."""

    folder: Path
    pipeline_class: type[DiffusionPipeline]
    modules: list[Component]


def local_folder(source: str) -> Path:
    """The folder of ``source``: a local path, or a hub id (``org/name``) that is downloaded to the hub's cache.

    Only safetensors are fetched and no remote code is run.
    """
    path = Path(source)
    if path.is_dir():
        return path
    if path.is_absolute() or source.startswith("."):
        raise _unusable(source, "there is no such folder")
    return Path(DiffusionPipeline.download(source, use_safetensors=True, trust_remote_code=False))


def open_pipeline(source: str) -> PipelineFolder:
    """Read ``model_index.json`` without loading anything.

    Raises:
        DiffusionError: the folder is no diffusers pipeline, or names a class that is not installed.
    """
    folder = local_folder(source)
    if not (folder / "model_index.json").is_file():
        raise _unusable(source, "it has no model_index.json, so it is no diffusers pipeline")
    index: dict[str, Any] = dict(DiffusionPipeline.load_config(folder))
    pipeline_class = _find_class("diffusers", str(index.get("_class_name")), source)
    if not issubclass(pipeline_class, DiffusionPipeline):
        raise _unusable(source, f"{pipeline_class.__name__} is no diffusers pipeline class")
    modules = []
    for name, entry in index.items():
        if name.startswith("_") or not isinstance(entry, list | tuple) or entry[0] is None:
            continue
        cls = _find_class(entry[0], entry[1], source)
        if issubclass(cls, nn.Module):
            modules.append(Component(name, cls))
    return PipelineFolder(folder, pipeline_class, modules)


def load_stage(
    pipeline: PipelineFolder,
    stage: Stage,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    methods: dict[Stage, dict[str, Method]],
) -> tuple[DiffusionPipeline, int]:
    """The pipeline with ``stage``'s weights on ``device``, and how many bytes they take.

    ``methods[other]`` are what the stand-ins of another stage's components do when called. ``dtype`` None keeps the
    dtype that the weights are stored in.
    """
    own = [component for component in pipeline.modules if component.stage == stage]
    stored = _stored_dtype(pipeline.folder / own[0].name) if own else torch.float32
    compute = dtype or stored
    stand_ins = {
        component.name: build_stand_in(
            component.cls,
            pipeline.folder / component.name,
            device=device,
            dtype=compute,
            methods=methods[component.stage],
        )
        for component in pipeline.modules
        if component.stage != stage
    }
    pipe = _assemble(pipeline, compute, stand_ins)
    total = 0
    for component in own:
        module = getattr(pipe, component.name).to(device).eval()
        size = module_bytes(module)
        logger.info(
            "loaded %s (%s, %s, %d bytes)", component.name, component.cls.__name__, module.dtype, size
        )
        total += size
    logger.info("stand-ins without weights: %s", ", ".join(sorted(stand_ins)) or "none")
    return pipe, total


def module_bytes(module: nn.Module) -> int:
    """How much memory a module's weights and buffers take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in [*module.parameters(), *module.buffers()])


def load_dry(
    pipeline: PipelineFolder, stage: Stage, *, methods: dict[Stage, dict[str, Method]]
) -> DiffusionPipeline:
    """``load_stage`` without weights: ``stage``'s components compute shapes only and return zeros (on the CPU)."""
    stand_ins = {
        component.name: build_stand_in(
            component.cls,
            pipeline.folder / component.name,
            device=torch.device("cpu"),
            dtype=torch.float32,
            methods=dry_methods(component.cls) if component.stage == stage else methods[component.stage],
        )
        for component in pipeline.modules
    }
    return _assemble(pipeline, torch.float32, stand_ins)


def _assemble(
    pipeline: PipelineFolder, dtype: torch.dtype, stand_ins: dict[str, nn.Module]
) -> DiffusionPipeline:
    pipe = pipeline.pipeline_class.from_pretrained(
        pipeline.folder, dtype=dtype, use_safetensors=True, local_files_only=True, **stand_ins
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of the largest tensor in a component's safetensors."""
    largest, dtype = 0, torch.float32
    names = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for key in weights.keys():  # noqa: SIM118 - safe_open is no mapping
                view = weights.get_slice(key)
                size = int(torch.Size(view.get_shape()).numel())
                if size > largest and view.get_dtype() in names:
                    largest, dtype = size, names[view.get_dtype()]
    return dtype


def _find_class(library: str, name: str, source: str) -> Any:
    """``library.name``, where library is a package or, as in model_index.json, a diffusers pipeline module."""
    for module in (library, f"diffusers.pipelines.{library}"):
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError:
            continue
        if found is not None:
            return found
    raise _unusable(source, f"class {library}.{name} is not in the installed libraries")


def _unusable(source: str, why: str) -> DiffusionError:
    return DiffusionError(
        f"{source!r} cannot be served: {why}",
        param="source",
        code="unusable_source",
        status=Status.INVALID_ARG,
    )
