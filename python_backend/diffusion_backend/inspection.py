"""What a diffusers folder holds, without loading it: classes, files, bytes a stage, and what stands in its way."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from diffusion_backend.loading import Component, PipelineFolder, stages_held, stored_dtype, weight_files
from diffusion_backend.stage_names import Stage

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class ComponentFiles:
    """One torch module of a pipeline on disk; ``problems`` are why it could not be loaded."""

    component: Component
    files: list[Path]
    problems: list[str]

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)


def inspect_pipeline(pipeline: PipelineFolder) -> list[ComponentFiles]:
    """Every torch module of the pipeline, in the order of ``model_index.json``."""
    return [_inspect(component, pipeline.folder / component.name) for component in pipeline.modules]


def stage_bytes(components: list[ComponentFiles], *, takes_image: bool) -> dict[Stage, int]:
    """The bytes of weights on disk that each stage loads; ``takes_image`` as in ``load_stage``."""
    return {
        stage: sum(
            found.bytes for found in components if found.component.stage in stages_held(stage, takes_image)
        )
        for stage in Stage
    }


def mixed_dtypes(pipeline: PipelineFolder) -> str | None:
    """What to say of encoders that are stored in another dtype than the denoiser; None where none is."""
    dtypes = {
        component: str(stored_dtype(pipeline.folder / component.name)).removeprefix("torch.")
        for component in pipeline.modules
        if component.stage is Stage.DENOISE or "encoder" in component.name
    }
    denoiser = next(component for component in dtypes if component.stage is Stage.DENOISE)
    others = [
        f"{component.name} in {dtype}"
        for component, dtype in dtypes.items()
        if component.stage is Stage.ENCODE and dtype != dtypes[denoiser]
    ]
    if not others:
        return None
    return (
        f"{denoiser.name} is stored in {dtypes[denoiser]}, but {', '.join(others)}: with the dtype 'auto' a GPU "
        f"computes in both, which pipelines do not expect: add it with --dtype {dtypes[denoiser]}, or another one"
    )


def _inspect(component: Component, folder: Path) -> ComponentFiles:
    if not folder.is_dir():
        return ComponentFiles(component, [], [f"{component.name}: there is no folder {component.name}/"])
    problems = []
    if not (folder / "config.json").is_file():
        problems.append(f"{component.name}: it has no config.json")
    files = weight_files(folder)
    missing = sorted(_indexed(folder) - {path.name for path in files})
    if missing:
        problems.append(f"{component.name}: its index names files that are not there: {', '.join(missing)}")
    if not files:
        problems.append(f"{component.name}: it has {_what_instead(folder)}; allowed: safetensors")
    broken = [path.name for path in files if not _is_whole(path)]
    if broken:
        problems.append(f"{component.name}: cut short or damaged: {', '.join(broken)}")
    return ComponentFiles(component, files, problems)


def _what_instead(folder: Path) -> str:
    """What a component has in place of weights that are loaded."""
    names = sorted(path.name for path in folder.iterdir())
    if pickles := [name for name in names if name.endswith(PICKLE_SUFFIXES)]:
        return f"only pickle weights ({', '.join(pickles)}), which are never loaded"
    if variants := [name for name in names if name.endswith(".safetensors")]:
        return f"only a variant of its weights ({', '.join(variants)})"
    return "no weights"


def _indexed(folder: Path) -> set[str]:
    """The shards that an index file names."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors.index.json"):
        try:
            names.update(json.loads(path.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError):
            names.add(path.name)  # a broken index names itself as what is missing
    return names


def _is_whole(path: Path) -> bool:
    """Whether a safetensors file is as long as its header says (https://huggingface.co/docs/safetensors)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= size - 8:
            return False
        try:
            header = json.loads(file.read(length))
            end = max(
                (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"),
                default=0,
            )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return False
    return bool(size == 8 + length + end)
