"""The repository builder: a model's ensemble and three stages in a Triton model repository.

``add`` loads no weights: limits and defaults are derived in ``defaults.py``, warmup data in ``warmup.py``, both by dry
runs through the same seams that serve requests.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from diffusion_backend import config_text, loading, loras
from diffusion_backend.config_text import Instances
from diffusion_backend.defaults import derive_limits
from diffusion_backend.dry_runs import DryRuns
from diffusion_backend.errors import DiffusionError, show, unusable
from diffusion_backend.file_changes import Change, change_files
from diffusion_backend.inspection import inspect_pipeline
from diffusion_backend.loading import PipelineFolder
from diffusion_backend.model_config import CONFIG_FILE, read_model_config, resolve_source
from diffusion_backend.quality import Tier
from diffusion_backend.settings import ModelLimits, parse_limits, parse_size
from diffusion_backend.stage_names import Stage, stage_model
from diffusion_backend.warmup import Sample, Warmup, build_warmup

logger = logging.getLogger(__name__)

DEVICES = {"auto": "KIND_AUTO", "cpu": "KIND_CPU", "gpu": "KIND_GPU"}
DTYPES = ("auto", "float32", "float16", "bfloat16")
MAX_INSTANCES = 64


@dataclass(frozen=True)
class BuildOptions:
    """What an operator may choose when adding a model.

    ``instances`` are those of encode and denoise; ``warmup_sizes`` ("WxH") and ``warmup_batches`` (requests) are
    warmed besides the defaults; ``unary`` serves plain ``infer`` too, with one response a request. ``loras`` are
    folders by name. ``replace``: the name may be that of a model of another source.
    """

    dtype: str = "auto"
    device: str = "auto"
    instances: int = 1
    unary: bool = False
    warmup: bool = True
    warmup_sizes: tuple[str, ...] = ()
    warmup_batches: tuple[int, ...] = ()
    default_quality: Tier = Tier.LOSSLESS
    loras: Mapping[str, str] = field(default_factory=dict)
    replace: bool = False


def add(source: str, name: str, repository: Path, options: BuildOptions | None = None) -> list[Change]:
    """Write (or bring up to date) the four models of ``name``; return one change a file.

    Raises:
        DiffusionError: the source, the name or an option cannot be used, or not all files can be written, and why.
            Then none is.
    """
    options = options or BuildOptions()
    _check_options(options)
    _check_name(name, repository)
    ensemble = repository / name
    source = _stored_source(source, ensemble)
    if not options.replace:
        _check_source(name, source, ensemble)
    pipeline = loading.open_pipeline(resolve_source(source, ensemble))
    problems = [problem for found in inspect_pipeline(pipeline) for problem in found.problems]
    if problems:
        raise unusable(f"{source!r} cannot be served: {'; '.join(problems)}")
    with _refusals_name(pipeline):
        runs = DryRuns(pipeline)
        limits = derive_limits(
            pipeline,
            runs,
            source=source,
            created=_created(ensemble),
            dtype=options.dtype,
            default_quality=options.default_quality,
        )
    if options.unary and limits.makes_video:
        raise unusable(
            f"'unary' cannot be had of {pipeline.pipeline_class.__name__}: it makes video, which is sent in slices, so "
            "more than one response a request; allowed: without --unary",
            "unary",
        )
    if options.loras:
        loras.check_files(pipeline, options.loras)
        stored = {lora: _stored_source(folder, ensemble) for lora, folder in sorted(options.loras.items())}
        limits = limits.model_copy(update={"loras": stored})
    sizes = [parse_size(size, limits) for size in options.warmup_sizes]
    with _refusals_name(pipeline):
        warmup = build_warmup(limits, runs, sizes, options.warmup_batches)
    return _install(name, repository, _files(name, limits, options, warmup))


def examine(source: str) -> ModelLimits | list[str]:
    """The limits that ``add`` would give a pipeline, or why it would refuse it. Loads no weights.

    Raises:
        DiffusionError: the source is no diffusers pipeline at all.
    """
    pipeline = loading.open_pipeline(source)
    problems = [problem for found in inspect_pipeline(pipeline) for problem in found.problems]
    if problems:
        return problems
    try:
        with _refusals_name(pipeline):
            return derive_limits(
                pipeline,
                DryRuns(pipeline),
                source=source,
                created=0,
                dtype="auto",
                default_quality=Tier.LOSSLESS,
            )
    except DiffusionError as error:
        return [error.message]


@contextlib.contextmanager
def _refusals_name(pipeline: PipelineFolder) -> Iterator[None]:
    """Whatever goes wrong inside is the reason why this class of pipelines cannot be served, and is said so."""
    name = pipeline.pipeline_class.__name__
    try:
        yield
    except Exception as error:
        reason = error.message if isinstance(error, DiffusionError) else f"{type(error).__name__}: {error}"
        logger.debug("%s: refused", name, exc_info=error)
        raise unusable(f"{name} cannot be served: {reason}") from error


def remove(name: str, repository: Path) -> list[Change]:
    """Delete what ``add`` wrote for ``name``. Weights that lie in the ensemble's folder stay.

    Raises:
        DiffusionError: there is no such model.
    """
    if _owner(repository / name) != name or not (repository / name / CONFIG_FILE).exists():
        raise unusable(f"{show(name)} is no model of {repository}", "name")
    return _install(name, repository, {})


def list_models(repository: Path) -> dict[str, ModelLimits | str]:
    """The models that ``add`` wrote, by name; of one that is broken since, what is wrong with it."""
    models: dict[str, ModelLimits | str] = {}
    for path in sorted(repository.glob(f"*/{CONFIG_FILE}")):
        if _owner(path.parent) == path.parent.name:
            try:
                models[path.parent.name] = read_model(path.parent)
            except ValueError as error:
                models[path.parent.name] = f"{path}: {error}"
    return models


def read_model(ensemble: Path) -> ModelLimits:
    """The model whose ensemble is in this folder.

    Raises:
        ValueError: its configuration is not valid.
    """
    return parse_limits(read_model_config(ensemble).parameters)


def _check_options(options: BuildOptions) -> None:
    for option, value, allowed in (
        ("dtype", options.dtype, DTYPES),
        ("device", options.device, tuple(DEVICES)),
    ):
        if value not in allowed:
            raise unusable(f"'{option}' is {show(value)}; allowed: {', '.join(allowed)}", option)
    if not 1 <= options.instances <= MAX_INSTANCES:
        raise unusable(f"'instances' is {options.instances}; allowed: 1 to {MAX_INSTANCES}", "instances")
    for count in options.warmup_batches:
        if not 1 <= count <= config_text.MAX_BATCH_SIZE:
            largest = config_text.MAX_BATCH_SIZE
            raise unusable(f"'warmup-batch' is {count}; allowed: 1 to {largest}", "warmup-batch")


def _check_name(name: str, repository: Path) -> None:
    """Triton takes the name, and none of the four folders belongs to something else."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        raise unusable(
            f"'name' is {show(name)}; allowed: up to 128 letters, digits, '.', '_' and '-', no leading sign",
            "name",
        )
    for folder in (repository / name, *_stage_folders(repository, name)):
        owner = _owner(folder)
        if folder.exists() and owner != name:
            raise unusable(
                f"'name' is {show(name)}, but {folder.name} in {repository} belongs to {owner or 'another model'}",
                "name",
            )


def _owner(folder: Path) -> str | None:
    """The model of ours that a folder of the repository belongs to, or None.

    A folder without a configuration may be an ensemble's, holding its weights: then nothing in it is a version.
    """
    if not (folder / CONFIG_FILE).exists():
        versions = folder.is_dir() and any(child.name.isdecimal() for child in folder.iterdir())
        return None if versions or folder.is_file() else folder.name
    try:
        config = read_model_config(folder)
    except (OSError, ValueError):
        return None
    ours = config.is_ensemble and "pipeline_class" in config.parameters
    return folder.name if ours else config.parameters.get("ensemble")


def _stored_source(source: str, ensemble: Path) -> str:
    """The source as the configuration names it: ``./folder`` when it lies inside the ensemble's own folder."""
    path = Path(source)
    if not path.is_dir():
        return source
    absolute, home = path.resolve(), ensemble.resolve()
    if not str(absolute).isascii():
        raise unusable(f"{source!r} cannot be served: tritonserver's Python opens no path that is not ASCII")
    return f"./{absolute.relative_to(home)}" if absolute.is_relative_to(home) else str(absolute)


def _check_source(name: str, source: str, ensemble: Path) -> None:
    """A model is not replaced by another one unless that is asked for."""
    earlier = _earlier(ensemble, "source")
    if earlier is not None and earlier != source:
        raise unusable(
            f"'name' is {show(name)}, which is a model of {earlier}; allowed: another name, or --replace",
            "name",
        )


def _created(ensemble: Path) -> int:
    """The time of the first ``add``, in seconds since 1970: it stays when a model is added again."""
    try:
        return int(_earlier(ensemble, "created") or "")
    except ValueError:
        return int(time.time())


def _earlier(ensemble: Path, parameter: str) -> str | None:
    """A parameter of the model as it is; None where there is none yet, or none that can be read."""
    try:
        return read_model_config(ensemble).parameters.get(parameter)
    except (OSError, ValueError):
        return None


def _files(name: str, limits: ModelLimits, options: BuildOptions, warmup: Warmup) -> dict[str, bytes]:
    """Every file of the four models, by its path in the repository."""
    kind = DEVICES[options.device]
    instances = Instances(options.instances, kind)
    samples = {
        Stage.ENCODE: warmup.encode,
        Stage.DENOISE: warmup.denoise,
        Stage.VAE_DECODE: warmup.vae_decode,
    }
    if not options.warmup:
        samples = {stage: [] for stage in Stage}
    configs = {
        Stage.ENCODE: config_text.encode(name, limits, instances, samples[Stage.ENCODE]),
        Stage.DENOISE: config_text.denoise(
            name,
            limits,
            len(warmup.latents_shape),
            instances,
            samples[Stage.DENOISE],
            unary=options.unary,
            self_check=_sample_file(warmup.denoise[0], "conditioning"),
        ),
        Stage.VAE_DECODE: config_text.vae_decode(
            name,
            limits,
            warmup.latents_shape,
            kind,
            samples[Stage.VAE_DECODE],
        ),
    }
    files = {
        f"{name}/{CONFIG_FILE}": config_text.ensemble(name, limits).encode(),
        f"{name}/1/.gitkeep": b"",
    }
    for stage, config in configs.items():
        folder = stage_model(name, stage)
        files[f"{folder}/{CONFIG_FILE}"] = config.encode()
        files[f"{folder}/1/model.py"] = (
            f"from diffusion_backend.stages.{_module(stage, limits)} import TritonPythonModel  # noqa: F401\n".encode()
        )
        # The first of denoise is what it checks itself with, also where nothing is warmed.
        for sample in samples[stage] or (warmup.denoise[:1] if stage is Stage.DENOISE else []):
            for tensor_name, tensor in sample.inputs.items():
                if tensor.data is not None:
                    files[f"{folder}/{_sample_file(sample, tensor_name)}"] = tensor.data
    return files


def _module(stage: Stage, limits: ModelLimits) -> str:
    """The one that has a stage's model."""
    return "clip_decode" if stage is Stage.VAE_DECODE and limits.makes_video else stage.value


def _sample_file(sample: Sample, tensor: str) -> str:
    return f"warmup/{sample.name}.{tensor}"


def _stage_folders(repository: Path, name: str) -> list[Path]:
    return [repository / stage_model(name, stage) for stage in Stage]


def _install(name: str, repository: Path, files: dict[str, bytes]) -> list[Change]:
    """Write the files, and remove what an earlier ``add`` wrote besides them."""
    try:
        repository.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unusable(f"{repository} cannot be a model repository: {error.strerror}", "repository") from None
    with _locked(repository):
        stale = [path for path in _written_files(name, repository) if path not in files]
        try:
            changes = change_files(repository, files, stale)
        except OSError as error:
            raise unusable(
                f"{repository} stays as it was: not all of {show(name)} could be changed ({error})",
                "repository",
            ) from error
        for folder in (repository / name, *_stage_folders(repository, name)):
            _remove_empty(folder)
    return [change for change in changes if change.path.suffix != ".pyc"]


@contextlib.contextmanager
def _locked(repository: Path) -> Iterator[None]:
    """One at a time: two commands that change a model at once must not leave a mix of both."""
    folder = os.open(repository, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _written_files(name: str, repository: Path) -> list[str]:
    """What an ``add`` wrote for ``name``, and what Python made of it, by its path in the repository."""
    ensemble = repository / name
    ours = [ensemble / CONFIG_FILE, ensemble / "1" / ".gitkeep"]
    for folder in _stage_folders(repository, name):
        ours += [folder / CONFIG_FILE, folder / "1" / "model.py"]
        ours += sorted(folder.glob("warmup/*"))
        ours += sorted(folder.glob("1/__pycache__/model.*"))
    return [str(path.relative_to(repository)) for path in ours if path.is_file()]


def _remove_empty(folder: Path) -> None:
    if folder.is_dir():
        for child in folder.iterdir():
            _remove_empty(child)
        if not any(folder.iterdir()):
            folder.rmdir()
