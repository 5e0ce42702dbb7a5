"""The repository builder: writes a model's ensemble and three stages into a Triton model repository.

``add`` loads no weights: defaults come from the pipeline's signature and its ``generation_config.json``; shapes come
from dry runs through the same seams that serve requests.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import re
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffusion_backend import conditioning, config_text, loading, oddities, seams
from diffusion_backend.errors import DiffusionError, Status, show
from diffusion_backend.loading import PipelineFolder, Stage
from diffusion_backend.model_config import CONFIG_FILE, read_model_config, resolve_source
from diffusion_backend.settings import ModelLimits, Settings, resolve
from diffusion_backend.stages.decode_settings import DecodeSettings

logger = logging.getLogger(__name__)

GENERATION_CONFIG = "generation_config.json"
DEFAULT_PROMPT = "a red apple on a wooden table"
WARMUP_STEPS = 2
MAX_STEPS = 200
WARMUP_QUALITIES = ("lossless", "high")  # one of each tier
SIZE_MULTIPLES = (2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Change:
    """What ``add`` did to one file of the repository: ``created``, ``updated``, ``removed`` or ``unchanged``."""

    path: Path
    what: str


def add(source: str, name: str, repository: Path) -> list[Change]:
    """Write (or bring up to date) the four models of ``name``; return one change a file.

    Nothing is written unless all of it can be.

    Raises:
        DiffusionError: the source or the name cannot be served, and why.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        raise _refuse(
            "name",
            f"'name' is {show(name)}; allowed: up to 128 letters, digits, '.', '_' and '-', no leading sign",
        )
    ensemble = repository / name
    source = _stored_source(source, ensemble)
    pipeline = loading.open_pipeline(resolve_source(source, ensemble))
    with _refusals_name(pipeline):
        runs = _DryRuns(pipeline)
        limits = _limits(source, pipeline, runs, created=_created(ensemble))
        files = _files(name, limits, runs)
    with tempfile.TemporaryDirectory(dir=_existing(repository), prefix=".add-") as staging:
        for path, content in files.items():
            target = Path(staging) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        return [
            *_remove_stale(repository, name, set(files)),
            *_install(Path(staging), repository, set(files)),
        ]


@contextlib.contextmanager
def _refusals_name(pipeline: PipelineFolder) -> Iterator[None]:
    """Whatever goes wrong inside is the reason why this class of pipelines cannot be served, and is said so."""
    name = pipeline.pipeline_class.__name__
    try:
        yield
    except Exception as error:
        reason = error.message if isinstance(error, DiffusionError) else f"{type(error).__name__}: {error}"
        logger.debug("%s: refused", name, exc_info=error)
        raise _refuse("source", f"{name} cannot be served: {reason}") from error


def _existing(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _stored_source(source: str, ensemble: Path) -> str:
    """The source as the configuration names it: ``./folder`` when it lies inside the ensemble's own folder."""
    path = Path(source)
    if not path.is_dir():
        return source
    absolute, home = path.resolve(), ensemble.resolve()
    return f"./{absolute.relative_to(home)}" if absolute.is_relative_to(home) else str(absolute)


def _created(ensemble: Path) -> int:
    """The time of the first ``add``, in seconds since 1970: it stays when a model is added again."""
    try:
        return int(read_model_config(ensemble).parameters["created"])
    except (OSError, KeyError, ValueError):
        return int(time.time())


def _limits(source: str, pipeline: PipelineFolder, runs: _DryRuns, created: int) -> ModelLimits:
    call = inspect.signature(pipeline.pipeline_class.__call__).parameters
    missing = [name for name in ("prompt", "num_inference_steps", "height", "width") if name not in call]
    if missing:
        raise _refuse("source", f"it takes no {' and no '.join(missing)}")
    if seams.makes_video(runs.encode):
        raise _refuse("source", "it makes video, which is not served yet")
    given = _generation_config(pipeline.folder)
    argument = guidance_argument(pipeline, call)
    steps = given.pop("num_inference_steps", call["num_inference_steps"].default)
    scale = given.pop("guidance_scale", call[argument].default if argument else None)
    negative = given.pop("negative_prompt", "") if "negative_prompt" in call else None
    prompt = given.pop("prompt", DEFAULT_PROMPT)
    width, height = given.pop("width", None), given.pop("height", None)
    unknown = sorted(set(given) - set(call))
    if unknown:
        raise _refuse("source", f"{GENERATION_CONFIG} has {unknown}, which the pipeline does not take")
    fields: dict[str, Any] = {
        "source": source,
        "pipeline_class": pipeline.pipeline_class.__name__,
        "task": "text-to-image",
        "created": created,
        "default_prompt": prompt,
        "default_num_inference_steps": steps,
        "max_num_inference_steps": max(MAX_STEPS, steps),
        "guidance_argument": argument,
        "default_guidance_scale": None if argument is None else scale,
        "default_negative_prompt": negative,
        "call_arguments": given,
    }
    sizes = _SizeProbe(runs, fields)
    try:
        width, height = sizes.picture(width, height)
    except Exception as error:
        if "image" in call:  # some pipelines do without one; this one does not
            raise _refuse("source", f"it takes an image, which is not served yet ({error})") from error
        raise
    return ModelLimits(
        **fields,
        default_width=width,
        default_height=height,
        size_multiple=sizes.multiple(width, height),
        max_width=2 * width,
        max_height=2 * height,
    )


def _generation_config(folder: Path) -> dict[str, Any]:
    """A model's own serving defaults: call arguments of its pipeline, and the prompt to warm up with."""
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise _refuse("source", f"{GENERATION_CONFIG} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise _refuse("source", f"{GENERATION_CONFIG} is not a JSON object")
    return config


def guidance_argument(pipeline: PipelineFolder, call: Any) -> str | None:
    """The call argument that a request's ``guidance_scale`` means.

    Pipelines with both arguments (FLUX, Qwen-Image) read ``guidance_scale`` only when the transformer has a guidance
    embedding; without one, guidance is classifier-free and called ``true_cfg_scale``.
    """
    if "true_cfg_scale" in call:
        config = json.loads((pipeline.folder / "transformer" / "config.json").read_text())
        if not config.get("guidance_embeds", False):
            return "true_cfg_scale"
    return "guidance_scale" if "guidance_scale" in call else None


class _SizeProbe:
    """Finds out by dry runs which picture sizes a pipeline really makes."""

    def __init__(self, runs: _DryRuns, fields: dict[str, Any]) -> None:
        self._runs = runs
        self._fields = fields

    def picture(self, width: int | None, height: int | None) -> tuple[int, int]:
        """The (width, height) that comes out when ``width`` and ``height`` are asked for; None is the default."""
        limits = ModelLimits(
            **self._fields,
            default_width=width or 1,
            default_height=height or 1,
            size_multiple=1,
            max_width=width or 1,
            max_height=height or 1,
        )
        settings = resolve(limits, limits.default_prompt, None, {"seed": 0, "num_inference_steps": 1})
        arguments = seams.call_arguments(self._runs.encode, limits, settings)
        if width is None or height is None:
            arguments = oddities.default_size(arguments)
        image = self._runs.decode_shape(self._runs.denoise_all(arguments))
        return image[-1], image[-2]

    def multiple(self, width: int, height: int) -> int:
        """The smallest step by which both sides may grow and still come out as asked."""
        for step in SIZE_MULTIPLES:
            if width % step == 0 and height % step == 0 and self._makes(width + step, height + step):
                return step
        raise _refuse("source", f"it makes no picture of {width}x{height} or a little more")

    def _makes(self, width: int, height: int) -> bool:
        try:
            return self.picture(width, height) == (width, height)
        except Exception:  # its check_inputs refuses this size, or its shapes do not fit together
            return False


class _DryRuns:
    """The three stages of a pipeline without weights."""

    def __init__(self, pipeline: PipelineFolder) -> None:
        self.encode, self._denoise, self._decode = (
            loading.load_dry(pipeline, stage, methods=seams.STAND_IN_METHODS) for stage in Stage
        )

    def record(self, arguments: dict[str, Any]) -> list[conditioning.Call]:
        return seams.record(self.encode, dict(arguments))

    def denoise_all(self, arguments: dict[str, Any]) -> seams.Denoised:
        return seams.replay(self._denoise, self.record(arguments), _fresh_generator(arguments), seed=0)

    def decode_shape(self, denoised: seams.Denoised) -> tuple[int, ...]:
        vae = self._decode.vae
        arguments = seams.read_decode_arguments(denoised.decode_arguments)
        image = vae.decode(denoised.latents, return_dict=False, **arguments)[0]
        return tuple(image.shape)


def _fresh_generator(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, "generator": torch.Generator("cpu").manual_seed(0)}


def _files(name: str, limits: ModelLimits, runs: _DryRuns) -> dict[str, bytes]:
    """Every file of the four models, by its path in the repository."""
    settings = resolve(
        limits,
        limits.default_prompt,
        None,
        {"seed": 0, "num_inference_steps": WARMUP_STEPS, "quality": "auto"},
    )
    arguments = seams.call_arguments(runs.encode, limits, settings)
    calls = runs.record(arguments)
    denoised = runs.denoise_all(_fresh_generator(arguments))
    shape = tuple(denoised.latents.shape[1:])
    blob = conditioning.pack(conditioning.Conditioning(calls, settings.model_dump(), 0.0))

    encode, denoise, vae_decode = (f"{name}_{stage.value}" for stage in Stage)
    files = {
        f"{name}/{CONFIG_FILE}": config_text.ensemble(name, limits).encode(),
        f"{name}/1/.gitkeep": b"",
        f"{encode}/{CONFIG_FILE}": config_text.encode(name, limits).encode(),
        f"{encode}/warmup/prompt": _bytes_element(limits.default_prompt),
        f"{denoise}/{CONFIG_FILE}": config_text.denoise(name, len(blob), len(shape)).encode(),
        f"{denoise}/warmup/conditioning": blob,
        f"{vae_decode}/{CONFIG_FILE}": config_text.vae_decode(name, shape, WARMUP_QUALITIES).encode(),
    }
    if limits.takes_negative_prompt:
        files[f"{encode}/warmup/negative_prompt"] = _bytes_element(limits.default_negative_prompt or "")
    for quality in WARMUP_QUALITIES:
        text = _decode_settings(settings, quality, denoised).model_dump_json()
        files[f"{vae_decode}/warmup/settings_{quality}"] = _bytes_element(text)
    for stage in Stage:
        files[f"{name}_{stage.value}/1/model.py"] = (
            f"from diffusion_backend.stages.{stage.value} import TritonPythonModel  # noqa: F401\n".encode()
        )
    return files


def _decode_settings(settings: Settings, quality: str, denoised: seams.Denoised) -> DecodeSettings:
    return DecodeSettings(
        width=settings.width,
        height=settings.height,
        quality=quality,
        seed=settings.seed,
        guidance_scale=settings.guidance_scale,
        num_inference_steps=settings.num_inference_steps,
        step=settings.num_inference_steps,
        is_final=True,
        decode_arguments=denoised.decode_arguments,
        timings={},
    )


def _bytes_element(text: str) -> bytes:
    """One BYTES element as Triton's input_data_file wants it: little-endian length, then the bytes."""
    data = text.encode()
    return struct.pack("<I", len(data)) + data


def _stage_folders(repository: Path, name: str) -> list[Path]:
    return [repository / f"{name}_{stage.value}" for stage in Stage]


def _remove_stale(repository: Path, name: str, wanted: set[str]) -> list[Change]:
    """Delete files of an earlier ``add`` that this one does not write (warmup files, above all)."""
    changes = []
    for folder in _stage_folders(repository, name):
        for path in sorted(folder.rglob("*")):
            relative = path.relative_to(repository)
            if path.is_file() and "__pycache__" not in relative.parts and str(relative) not in wanted:
                path.unlink()
                changes.append(Change(relative, "removed"))
    return changes


def _install(staging: Path, repository: Path, wanted: set[str]) -> list[Change]:
    changes = []
    for relative in sorted(wanted):
        new, target = staging / relative, repository / relative
        if not target.exists():
            what = "created"
        elif target.read_bytes() == new.read_bytes():
            what = "unchanged"
        else:
            what = "updated"
        if what != "unchanged":
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(new, target)
        changes.append(Change(Path(relative), what))
    return changes


def _refuse(param: str, message: str) -> DiffusionError:
    return DiffusionError(message, param=param, code="unusable_source", status=Status.INVALID_ARG)
