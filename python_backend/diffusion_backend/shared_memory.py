"""Whether ``/dev/shm`` has room for the stages: Triton says so late, and in many words."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diffusion_backend.clips import MAX_SLICE_BYTES
from diffusion_backend.guard import SHARED_MEMORY
from diffusion_backend.model_config import read_model_config
from diffusion_backend.processes import LaunchError
from diffusion_backend.settings import parse_limits

# What Triton gives each process of a Python model to begin with; it grows with the messages.
_REGION_BYTES = _MIB = 1 << 20
DEVICES = Path("/dev")


def require_room(repository: Path, ensembles: Iterable[str]) -> None:
    """Raise a LaunchError if there is none for these ensembles' processes and a picture of each one's default size."""
    processes, pictures = 0, 0
    stages: set[str] = set()
    for name in ensembles:
        config = read_model_config(repository / name)
        stages.update(step.model_name for step in config.message.ensemble_scheduling.step)
        if "pipeline_class" in config.parameters:
            limits = parse_limits(config.parameters)
            picture = limits.default_width * limits.default_height * 3
            clip = picture * (limits.default_num_frames or 1)
            pictures += max(picture, min(clip, MAX_SLICE_BYTES))
    for stage in stages:
        processes += _processes(repository / stage)
    need = processes * _REGION_BYTES + pictures
    try:
        state = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        raise LaunchError(f"there is no {SHARED_MEMORY} ({error.strerror}), which the stages need") from None
    free = state.f_bavail * state.f_frsize
    if free < need:
        raise LaunchError(
            f"{SHARED_MEMORY} has {free // _MIB} MiB free, and the {processes} processes of these models need "
            f"{math.ceil(need / _MIB)} MiB or more: make it larger (containers: --shm-size 1g; else as root: "
            f"mount -o remount,size=1g {SHARED_MEMORY}) or remove what fills it"
        )


def _processes(stage: Path) -> int:
    try:
        config = read_model_config(stage).message
    except (OSError, ValueError):
        return 0  # Triton will say what is wrong with it
    if config.backend != "python":
        return 0
    return sum(_instances(group) for group in config.instance_group) or 1


def _instances(group: Any) -> int:
    on_gpus = group.kind in (group.KIND_AUTO, group.KIND_GPU)
    devices = (len(group.gpus) or _count_gpus()) if on_gpus else 1
    return (group.count or 1) * max(devices, 1)


def _count_gpus() -> int:
    """The GPUs that programs can see here."""
    found = sum(path.name.removeprefix("nvidia").isdecimal() for path in DEVICES.glob("nvidia*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return found if visible is None else min(found, len(visible.split(",")))
