"""How many processes ``/dev/shm`` must have room for."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from diffusion_backend import shared_memory
from diffusion_backend.processes import LaunchError


def write_repository(folder: Path, instance_group: str) -> Path:
    """One ensemble of one Python model."""
    step = 'step [ { model_name: "stage" model_version: -1 } ]'
    for name, text in (
        ("whole", f'platform: "ensemble" ensemble_scheduling {{ {step} }}'),
        ("stage", f'backend: "python" instance_group [ {{ {instance_group} }} ]'),
    ):
        (folder / name).mkdir()
        (folder / name / "config.pbtxt").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("instance_group", "gpus", "visible", "processes"),
    [
        ("count: 2 kind: KIND_AUTO", 0, None, 2),
        ("count: 2 kind: KIND_AUTO", 1, None, 2),
        ("count: 2 kind: KIND_AUTO", 4, None, 8),
        ("count: 1 kind: KIND_GPU", 4, "1,3", 2),
        ("count: 1 kind: KIND_GPU", 4, "0,1,2,3,4", 4),
        ("kind: KIND_GPU gpus: [ 0, 1 ]", 4, None, 2),
        ("count: 2 kind: KIND_CPU", 4, None, 2),
    ],
)
def test_instances_are_counted_on_every_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    instance_group: str,
    gpus: int,
    visible: str | None,
    processes: int,
) -> None:
    devices = tmp_path / "dev"
    devices.mkdir()
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(gpus))):
        (devices / name).touch()
    monkeypatch.setattr(shared_memory, "DEVICES", devices)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=0, f_frsize=1))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (tmp_path / "repository").mkdir()
    repository = write_repository(tmp_path / "repository", instance_group)
    with pytest.raises(LaunchError, match=f"the {processes} processes .* need {processes} MiB"):
        shared_memory.require_room(repository, ["whole"])
