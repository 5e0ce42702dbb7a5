"""Children are stopped whole and never left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from diffusion_backend.guard import SHARED_MEMORY, group_members
from diffusion_backend.processes import LaunchError, ManagedProcess, check_port, free_ports
from waiting import wait_for

# A parent and a child of it that both take no notice of SIGTERM.
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.fork()
print("up", flush=True)
time.sleep(600)
"""
# Ends when told to, and leaves a child behind, as tritonserver may.
LEAVES_A_CHILD = """
import os, signal, sys, time
if os.fork():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("up", flush=True)
time.sleep(600)
"""


def _start(code: str, folder: Path, patience: float = 30, regions: str = "") -> ManagedProcess:
    command = [sys.executable, "-c", code]
    log = folder / "log"
    process = ManagedProcess(
        "it", command, log=log, environment=os.environ, patience=patience, regions=regions
    )
    wait_for(lambda: log.read_text().count("up") == 2)
    return process


def test_stop_leaves_nothing_of_the_group(tmp_path: Path) -> None:
    prefix = f"triton_diffusion_test_{os.getpid()}_"
    region, other = SHARED_MEMORY / f"{prefix}1", SHARED_MEMORY / f"other_{prefix}1"
    process = _start(LEAVES_A_CHILD, tmp_path, regions=prefix)
    try:
        region.touch()
        other.touch()
        assert process.stop()
        assert group_members(process.pid) == []
        assert not region.exists()
        assert other.exists()
        assert process.stop()  # again: nothing to do
    finally:
        other.unlink()


def test_what_does_not_end_is_killed(tmp_path: Path) -> None:
    process = _start(STUBBORN, tmp_path, patience=0.2)
    assert not process.stop()
    assert group_members(process.pid) == []
    assert process.describe_exit() == "killed by SIGKILL"


def test_hurry_does_not_wait_for_patience(tmp_path: Path) -> None:
    process = _start(STUBBORN, tmp_path, patience=600)
    assert not process.stop(hurry=lambda: True)
    assert group_members(process.pid) == []


def test_the_end_by_itself_is_told_with_the_end_of_the_log(tmp_path: Path) -> None:
    process = ManagedProcess(
        "it", ["sh", "-c", "echo why; exit 7"], log=tmp_path / "log", environment=os.environ, patience=1
    )
    wait_for(lambda: process.poll() is not None)
    assert process.obituary().startswith("it ended (exit code 7); the end of ")
    assert process.obituary().endswith("\n  why")
    assert not process.stop()


def test_a_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    region = SHARED_MEMORY / f"triton_diffusion_test_{os.getpid()}_2"
    script = f"""
import os, time
from pathlib import Path
from diffusion_backend.processes import ManagedProcess
process = ManagedProcess(
    "it", [{sys.executable!r}, "-c", {STUBBORN!r}],
    log=Path({str(tmp_path / "log")!r}), environment=os.environ, patience=0.2, regions={region.name!r},
)
print(process.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        group = int(launcher.stdout.readline())
        wait_for(lambda: (tmp_path / "log").read_text().count("up") == 2)
        region.touch()
        assert len(group_members(group)) == 2
        launcher.kill()
    wait_for(lambda: not group_members(group) and not region.exists())


def test_the_log_of_the_run_before_is_kept(tmp_path: Path) -> None:
    for text in ("first", "second"):
        _start(f"print('up', 'up', {text!r})", tmp_path).stop()
    assert (tmp_path / "log").read_text() == "up up second\n"
    assert (tmp_path / "log.1").read_text() == "up up first\n"


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="it could not be started"):
        ManagedProcess("it", ["/nowhere"], log=tmp_path / "log", environment=os.environ, patience=1)


def test_a_terminal_signal_does_not_reach_the_child(tmp_path: Path) -> None:
    process = _start(LEAVES_A_CHILD, tmp_path)
    assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
    assert os.getsid(process.pid) != os.getsid(0)
    process.stop()


def test_a_port_in_use_names_the_option() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"^port {port} is in use on 127.0.0.1: .* --grpc-port$"):
            check_port("127.0.0.1", port, host_option="--host", port_option="--grpc-port")
        with pytest.raises(LaunchError, match="in use"):
            check_port("0.0.0.0", port, host_option="--host", port_option="--port")
    check_port("127.0.0.1", port, host_option="--host", port_option="--grpc-port")


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_an_address_of_another_machine_names_the_option(host: str) -> None:
    with pytest.raises(LaunchError, match="--host"):
        check_port(host, free_ports(1)[0], host_option="--host", port_option="--port")


def test_free_ports_are_different() -> None:
    assert len(set(free_ports(20))) == 20
