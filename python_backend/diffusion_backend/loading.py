"""Loading one stage's share of a diffusers pipeline.

Every stage builds the whole, unmodified pipeline object, with real weights for its own components and stand-ins for
the rest. Tokenizers, schedulers and processors have no weights and are loaded everywhere.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from safetensors import safe_open
from torch import nn

from diffusion_backend import oddities, processors
from diffusion_backend.errors import DiffusionError, show, unusable
from diffusion_backend.stage_names import Stage as Stage
from diffusion_backend.standins import Method, build_stand_in, dry_methods

logger = logging.getLogger(__name__)


def quiet_libraries() -> None:
    """No progress bars and no warnings from diffusers and transformers: some would log a user's prompt."""
    for library in (diffusers.utils.logging, transformers.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()


@dataclass(frozen=True)
class Component:
    """A component of ``model_index.json`` that is a torch module."""

    name: str
    cls: type[nn.Module]

    @property
    def stage(self) -> Stage:
        """The stage that owns its weights, by the names that diffusers gives components."""
        if self.name.startswith(("transformer", "unet", "controlnet")):
            return Stage.DENOISE
        if self.name == "vae":
            return Stage.VAE_DECODE
        return Stage.ENCODE


@dataclass(frozen=True)
class PipelineFolder:
    """A diffusers pipeline on disk: its class and its torch modules.

    ``source_revision`` is the commit that was downloaded; None for a local folder. ``processors`` are the classes of
    components that are not loaded by diffusers, which would load another one.
    """

    folder: Path
    pipeline_class: type[DiffusionPipeline]
    modules: list[Component]
    source_revision: str | None = None
    processors: dict[str, Any] = field(default_factory=dict)


def local_folder(source: str, revision: str | None = None) -> Path:
    """The folder of ``source``: a local path, or a hub id (``org/name``) that is downloaded to the hub's cache.

    ``revision`` of a hub id: a commit, branch or tag; None is the newest. Only safetensors are fetched and no remote
    code is run.

    Raises:
        DiffusionError: there is no such folder, and the hub has no such model or cannot be reached.
    """
    path = Path(source)
    if path.is_dir():
        return path
    if path.exists():
        raise _unusable(source, "it is a file, not a folder")
    if path.is_absolute() or source.startswith("."):
        raise _unusable(source, "there is no such folder")
    try:
        return Path(
            DiffusionPipeline.download(
                source, revision=revision, use_safetensors=True, trust_remote_code=False
            )
        )
    except Exception as error:  # the hub's client has dozens of kinds
        logger.debug("%s: the hub refused", source, exc_info=error)
        what = f"the hub has no revision {revision} of it" if revision else "the hub has none"
        raise _unusable(
            source,
            f"it is no folder here, and {what} or cannot be reached ({type(error).__name__}): check the name and the "
            "network, and for a gated model 'hf auth login'",
        ) from error


def open_pipeline(source: str, revision: str | None = None) -> PipelineFolder:
    """Read ``model_index.json`` without loading anything; ``revision`` of a hub id, as in ``local_folder``.

    Raises:
        DiffusionError: the folder is no diffusers pipeline, or names a class that is not installed.
    """
    folder = local_folder(source, revision)
    if not (folder / "model_index.json").is_file():
        raise _unusable(source, "it has no model_index.json, so it is no diffusers pipeline")
    try:
        index = json.loads((folder / "model_index.json").read_text())
    except (ValueError, RecursionError) as error:
        raise _unusable(source, f"its model_index.json is not valid JSON: {error}") from None
    if not isinstance(index, dict):
        raise _unusable(source, "its model_index.json is not a JSON object")
    pipeline_class = _find_class("diffusers", str(index.get("_class_name")), source)
    if not isinstance(pipeline_class, type) or not issubclass(pipeline_class, DiffusionPipeline):
        raise _unusable(source, f"{index['_class_name']} is no diffusers pipeline class")
    left_out = oddities.init_arguments(pipeline_class)
    modules = []
    others: dict[str, Any] = {}
    for name, entry in index.items():
        # Besides components there are options, such as ``"requires_safety_checker": false``.
        if name.startswith("_") or not isinstance(entry, list) or name in left_out or entry == [None, None]:
            continue
        if len(entry) != 2 or not all(isinstance(part, str) for part in entry):
            raise _unusable(
                source, f"its model_index.json has {name!r}: {show(entry)}, not a library and a class"
            )
        cls = _find_class(entry[0], entry[1], source)
        if isinstance(cls, type) and issubclass(cls, nn.Module):
            modules.append(Component(name, cls))
        elif (stand_in := processors.stand_in(cls)) is not None:
            others[name] = stand_in
    for stage, what in ((Stage.DENOISE, "denoiser"), (Stage.VAE_DECODE, "VAE")):
        if not any(component.stage is stage for component in modules):
            raise _unusable(
                source, f"{pipeline_class.__name__} has no {what} of its own, so it cannot be split"
            )
    # The hub's client names the folder of a download by its commit.
    commit = None if Path(source).is_dir() else folder.name
    return PipelineFolder(folder, pipeline_class, modules, commit, others)


def load_stage(
    pipeline: PipelineFolder,
    stage: Stage,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    methods: dict[Stage, dict[str, Method]],
    takes_image: bool = False,
) -> tuple[DiffusionPipeline, int]:
    """The pipeline with ``stage``'s weights on ``device``, and how many bytes they take.

    ``methods[other]`` are what the stand-ins of another stage's components do when called. ``dtype`` None keeps, for
    each component, the dtype that its weights are stored in. With
    ``takes_image`` the encode stage has the VAE too, to encode images.
    """
    held = stages_held(stage, takes_image)
    own = [component for component in pipeline.modules if component.stage in held]
    dtypes = {
        component.name: dtype or stored_dtype(pipeline.folder / component.name)
        for component in pipeline.modules
    }
    stand_ins = {
        component.name: build_stand_in(
            component.cls,
            pipeline.folder / component.name,
            device=device,
            dtype=dtypes[component.name],
            methods=methods[component.stage],
        )
        for component in pipeline.modules
        if component not in own
    }
    pipe = _assemble(pipeline, dtypes, stand_ins)
    if stage is Stage.VAE_DECODE:
        oddities.upcast_vae(pipe)
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


def modules_of(pipe: DiffusionPipeline, stage: Stage) -> dict[str, nn.Module]:
    """The torch modules of a loaded pipeline that belong to ``stage``, by the names of their components."""
    return {
        name: part
        for name, part in pipe.components.items()
        if isinstance(part, nn.Module) and Component(name, type(part)).stage is stage
    }


def denoiser_dtype(pipe: DiffusionPipeline) -> torch.dtype:
    """The dtype in which the pipeline's denoiser computes."""
    dtype: torch.dtype = next(iter(modules_of(pipe, Stage.DENOISE).values())).dtype  # type: ignore[assignment]
    return dtype


def load_dry(
    pipeline: PipelineFolder,
    stage: Stage,
    *,
    methods: dict[Stage, dict[str, Method]],
    takes_image: bool = False,
) -> DiffusionPipeline:
    """``load_stage`` without weights: ``stage``'s components compute shapes only (on the CPU)."""
    own = stages_held(stage, takes_image)
    return _load_weightless(
        pipeline,
        lambda component: dry_methods(component.cls) if component.stage in own else methods[component.stage],
    )


def load_empty(pipeline: PipelineFolder) -> DiffusionPipeline:
    """The pipeline without any weights, to try what depends on shapes only: LoRAs."""
    return _load_weightless(pipeline, lambda _: {})


def _load_weightless(
    pipeline: PipelineFolder, methods: Callable[[Component], dict[str, Method]]
) -> DiffusionPipeline:
    stand_ins = {
        component.name: build_stand_in(
            component.cls,
            pipeline.folder / component.name,
            device=torch.device("cpu"),
            dtype=torch.float32,
            methods=methods(component),
        )
        for component in pipeline.modules
    }
    return _assemble(pipeline, {}, stand_ins)


def stages_held(stage: Stage, takes_image: bool) -> tuple[Stage, ...]:
    """Whose components ``stage`` has: encode needs the VAE to encode images."""
    return (stage, Stage.VAE_DECODE) if takes_image and stage is Stage.ENCODE else (stage,)


def _assemble(
    pipeline: PipelineFolder, dtypes: dict[str, torch.dtype], stand_ins: dict[str, nn.Module]
) -> DiffusionPipeline:
    pipe = pipeline.pipeline_class.from_pretrained(
        pipeline.folder,
        dtype={**dtypes, "default": torch.float32},
        use_safetensors=True,
        local_files_only=True,
        **stand_ins,
        **dict.fromkeys(pipeline.processors),
        **oddities.init_arguments(pipeline.pipeline_class),
    )
    pipe.register_modules(**load_processors(pipeline))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def load_processors(pipeline: PipelineFolder) -> dict[str, Any]:
    """The components of ``pipeline.processors``."""
    return {
        name: cls.from_pretrained(pipeline.folder / name, local_files_only=True)
        for name, cls in pipeline.processors.items()
    }


def weight_files(folder: Path) -> list[Path]:
    """The safetensors that ``from_pretrained`` opens: not those of a variant, such as ``model.fp16.safetensors``."""
    variant = re.compile(r"\.[A-Za-z0-9_]+(-\d+-of-\d+)?\.safetensors")
    return [path for path in sorted(folder.glob("*.safetensors")) if not variant.search(path.name)]


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of the largest tensor in a component's safetensors."""
    largest, dtype = 0, torch.float32
    names = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as weights:
            for key in weights.keys():  # noqa: SIM118 - safe_open is no mapping
                view = weights.get_slice(key)
                size = int(torch.Size(view.get_shape()).numel())
                if size > largest and view.get_dtype() in names:
                    largest, dtype = size, names[view.get_dtype()]
    return dtype


def _find_class(library: str, name: str, source: str) -> Any:
    """``library.name``, where library is diffusers, transformers, or a module of diffusers' pipelines.

    No other is imported: importing runs code, and a model's files are not to choose which.
    """
    if library in ("diffusers", "transformers"):
        found = getattr(importlib.import_module(library), name, None)
    elif library.isidentifier() and hasattr(diffusers.pipelines, library):
        found = getattr(getattr(diffusers.pipelines, library), name, None)
    else:
        found = None
    if found is None:
        raise _unusable(source, f"class {library}.{name} is not in the installed diffusers and transformers")
    return found


def _unusable(source: str, why: str) -> DiffusionError:
    return unusable(f"{source!r} cannot be served: {why}")
