"""``triton-diffusion serve``: the real thing, started, stopped, and killed at its parts."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from diffusion_backend import tritonserver
from diffusion_backend.guard import SHARED_MEMORY, group_members
from diffusion_backend.processes import LaunchError, free_ports
from diffusion_backend.tritonserver import TritonServer, http_status, remove_stale_regions
from serving import SERVE, START_SECONDS, Launched, begin, launch, serve_arguments
from waiting import wait_for


@pytest.fixture
def launched(model_repository: Path, tmp_path: Path) -> Iterator[Launched]:
    """A ``serve`` of its own for one test, which may end it as it likes."""
    with launch(model_repository, tmp_path) as started:
        yield started


def test_it_serves_what_it_prints_and_stops_in_order(launched: Launched, tmp_path: Path) -> None:
    # Three stages, at least, have a region each; the admin key is for its owner alone.
    assert len(launched.regions()) >= 3
    assert (launched.data_dir / "admin-key").stat().st_mode & 0o777 == 0o600
    groups = launched.groups()
    assert len(groups) == 4

    output = launched.output()
    command = output[output.index("curl ") :]
    subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=tmp_path, check=True, timeout=120)
    assert (tmp_path / "fox.png").read_bytes().startswith(b"\x89PNG")

    launched.process.send_signal(signal.SIGINT)
    assert launched.process.wait(100) == 0
    launched.assert_nothing_is_left(groups)


def test_a_killed_launcher_leaves_nothing(launched: Launched) -> None:
    groups = launched.groups()
    launched.process.kill()
    wait_for(lambda: not any(group_members(group) for group in groups), 100)
    launched.assert_nothing_is_left(groups)


def test_a_stage_that_dies_before_the_adapter_is_ready(model_repository: Path, tmp_path: Path) -> None:
    with begin(model_repository, tmp_path) as launched:
        ready = "/v2/health/ready"
        wait_for(lambda: http_status("127.0.0.1", launched.ports[1], ready) == 200, START_SECONDS)
        os.kill(launched.stubs("emoji-flux_encode")[0], signal.SIGKILL)
        launched.wait_ready()
        wait_for(lambda: "emoji-flux_encode serves again" in launched.output(), START_SECONDS)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SERVE, *arguments], capture_output=True, text=True, check=False, timeout=60)


def _run_with_little_shared_memory(mebibytes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    mount = f'mount -t tmpfs -o size={mebibytes}m tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this needs the right to mount")
    return subprocess.run(
        [*command, *SERVE, *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def test_too_little_shared_memory_is_said_before_anything_starts(
    model_repository: Path, tmp_path: Path
) -> None:
    arguments = serve_arguments(model_repository, tmp_path / "data", free_ports(4))
    result = _run_with_little_shared_memory(2, *arguments)
    assert result.returncode == 1
    assert result.stdout == ""
    need = "error: /dev/shm has 2 MiB free, and the 3 processes of these models need 4 MiB or more: "
    assert result.stderr.startswith(f"{need}make it larger (containers: --shm-size 1g; ")
    assert result.stderr.count("\n") == 1
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize("index", range(4))
def test_a_port_in_use_is_said_before_anything_starts(
    model_repository: Path, tmp_path: Path, index: int
) -> None:
    ports = free_ports(4)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[index]))
        taken.listen()
        result = _run(*serve_arguments(model_repository, tmp_path / "data", ports))
    option = ("--port", "--http-port", "--grpc-port", "--metrics-port")[index]
    assert result.returncode == 1
    assert result.stdout == ""
    port_in_use = f"error: port {ports[index]} is in use on 127.0.0.1: stop what listens there"
    assert result.stderr == f"{port_in_use}, or choose another with {option}\n"
    assert not (tmp_path / "data").exists()


def test_one_port_for_two_is_refused(model_repository: Path, tmp_path: Path) -> None:
    one, two, three = free_ports(3)
    result = _run(*serve_arguments(model_repository, tmp_path / "data", [one, two, two, three]))
    assert result.returncode == 1
    assert (
        result.stderr == f"error: --http-port and --grpc-port are both {two}: give each a port of its own\n"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model-repository=/nowhere"], "/nowhere"),
        (["--port=0"], "'0' is not a port"),
        (["--port=http"], "'http' is not a port"),
        (["--device=tpu"], "tpu"),
        (["--colour=red"], "--colour=red"),
        (["--", "more"], "more"),
    ],
)
def test_wrong_serve_arguments(arguments: list[str], words: str, tmp_path: Path) -> None:
    result = _run(*serve_arguments(tmp_path, tmp_path / "data", free_ports(4)), *arguments)
    assert result.returncode != 0
    assert words in result.stderr


def test_a_data_folder_belongs_to_one_server(model_repository: Path, tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        result = _run(*serve_arguments(model_repository, tmp_path, free_ports(4)))
    finally:
        os.close(folder)
    assert result.returncode == 1
    assert result.stderr == f"error: {tmp_path} is in use by another server: see --data-dir\n"


@pytest.fixture
def broken_repository(tmp_path: Path) -> Path:
    """An ensemble whose one stage can't be loaded."""
    tensor = "data_type: TYPE_FP32 dims: [1]"
    tensors = f'input [{{ name: "x" {tensor} }}] output [{{ name: "y" {tensor} }}]'
    maps = 'input_map { key: "x" value: "x" } output_map { key: "y" value: "y" }'
    step = f'step [{{ model_name: "stage" model_version: -1 {maps} }}]'
    files = {
        "whole/config.pbtxt": f'platform: "ensemble" {tensors} ensemble_scheduling {{ {step} }}',
        "stage/config.pbtxt": f'backend: "python" {tensors} instance_group [{{ kind: KIND_CPU }}]',
        "stage/1/model.py": (
            "class TritonPythonModel:\n"
            "    def initialize(self, args):\n"
            "        raise RuntimeError('the weights are gone')\n"
        ),
    }
    for name, text in files.items():
        path = tmp_path / "repository" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "repository" / "whole" / "1").mkdir()
    return tmp_path / "repository"


def test_a_model_that_does_not_load_is_told_with_its_reason(broken_repository: Path, tmp_path: Path) -> None:
    triton = TritonServer(broken_repository, data_dir=tmp_path / "data")
    with pytest.raises(LaunchError, match=r"failed to load 'stage'(.|\n)*the weights are gone"), triton:
        pass
    assert group_members(triton.process.pid) == []
    assert list(SHARED_MEMORY.glob(f"{triton.regions}*")) == []


STUBBORN = "trap '' TERM; echo up; while :; do sleep 0.1; done"
IN_ORDER = "trap 'exit 0' TERM; echo up; while :; do sleep 0.1; done"


@pytest.mark.parametrize(("script", "in_order"), [(STUBBORN, False), (IN_ORDER, True)])
def test_how_it_ended_is_told_after_lost_requests(
    broken_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, in_order: bool
) -> None:
    """A program in the place of tritonserver that waits for ever, as that does for requests of a dead stub."""
    program = tmp_path / "home/bin/tritonserver"
    for folder in (program.parent, tmp_path / "home/backends"):
        folder.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("TRITONSERVER_DIR", str(tmp_path / "home"))
    monkeypatch.setattr(tritonserver, "LOST_REQUESTS_PATIENCE_SECONDS", 0.5)
    triton = TritonServer(broken_repository, data_dir=tmp_path / "data")
    triton.start()
    wait_for(lambda: "up" in triton.log.read_text())
    triton.note_lost_requests()
    assert triton.stop() == in_order
    assert triton.was_cut_short != in_order
    assert group_members(triton.process.pid) == []


def test_a_repository_without_an_ensemble_or_with_a_broken_configuration(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="has no ensemble"):
        TritonServer(tmp_path, data_dir=tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.pbtxt").write_text("platform: ???")
    with pytest.raises(LaunchError, match=r"model/config\.pbtxt: 1:11"):
        TritonServer(tmp_path, data_dir=tmp_path)


def test_regions_of_a_killed_server_are_removed_at_the_next_start(
    broken_repository: Path, tmp_path: Path
) -> None:
    ours = TritonServer(broken_repository, data_dir=tmp_path).regions
    with subprocess.Popen(["true"]) as gone:
        pass
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    live = SHARED_MEMORY / f"{ours}live"
    stale = SHARED_MEMORY / f"triton_diffusion_{namespace}_{gone.pid}_1_x_stale"
    reused_id = SHARED_MEMORY / f"triton_diffusion_{namespace}_{os.getpid()}_1_x_stale"
    elsewhere = SHARED_MEMORY / f"triton_diffusion_1_{gone.pid}_1_x_of_another_container"
    regions = (live, stale, reused_id, elsewhere)
    try:
        for region in regions:
            region.touch()
        remove_stale_regions()
        assert [region.exists() for region in regions] == [True, False, False, True]
    finally:
        for region in regions:
            region.unlink(missing_ok=True)
