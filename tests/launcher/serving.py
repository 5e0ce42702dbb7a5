"""A ``triton-diffusion serve`` as a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from diffusion_backend.guard import SHARED_MEMORY, group_members
from diffusion_backend.processes import check_port, free_ports
from diffusion_backend.stub_watcher import find_stubs
from waiting import wait_for

SERVE = [str(Path(sys.executable).with_name("triton-diffusion")), "serve"]
START_SECONDS = 200


@dataclass
class Launched:
    """A ``serve`` that was started."""

    process: subprocess.Popen[str]
    ports: list[int]
    folder: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.ports[2]}"

    @property
    def data_dir(self) -> Path:
        return self.folder / "data"

    def wait_ready(self) -> None:
        """Wait until it says so."""
        process = self.process
        wait_for(lambda: "ready after" in self.output() or process.poll() is not None, START_SECONDS)
        assert process.poll() is None, self.output()

    def output(self) -> str:
        """What it has printed."""
        return (self.folder / "output").read_text()

    def triton_log(self) -> str:
        """That of the tritonserver that runs now."""
        return (self.data_dir / "logs" / "tritonserver.log").read_text()

    def groups(self) -> list[int]:
        """Its children, each with a process group: tritonserver, the adapter, and a guard each."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def triton_pid(self) -> int:
        return next(child for child in self.groups() if "tritonserver" in _command(child)[0])

    def stubs(self, model: str) -> list[int]:
        """The processes of a stage."""
        return [pid for pid, stub in find_stubs(self.triton_pid()).items() if stub.model == model]

    def regions(self) -> list[Path]:
        """Its shared memory."""
        return list(SHARED_MEMORY.glob(f"triton_diffusion_*_{self.process.pid}_*"))

    def regions_in_use(self) -> set[str]:
        """The names of those that a living stub has."""
        return {stub.region for stub in find_stubs(self.triton_pid()).values()}

    def assert_nothing_is_left(self, groups: list[int]) -> None:
        """That it has ended, and these groups with it."""
        assert [group_members(group) for group in groups] == [[] for _ in groups]
        assert self.regions() == []
        for port in self.ports:
            check_port("127.0.0.1", port, host_option="", port_option="")


@contextlib.contextmanager
def launch(repository: Path, folder: Path) -> Iterator[Launched]:
    """Start one, wait until it is ready, and end it."""
    with begin(repository, folder) as launched:
        launched.wait_ready()
        yield launched


@contextlib.contextmanager
def begin(repository: Path, folder: Path) -> Iterator[Launched]:
    """Start one, and end it."""
    ports = free_ports(4)
    with (folder / "output").open("w") as file:
        process = subprocess.Popen(
            [*SERVE, *serve_arguments(repository, folder / "data", ports)],
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
        )
    launched = Launched(process, ports, folder)
    try:
        yield launched
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(120)
            process.kill()


def serve_arguments(repository: Path, data_dir: Path, ports: list[int]) -> list[str]:
    """The options of ``serve``; ``ports``: the adapter's, Triton's for HTTP, gRPC and metrics."""
    names = ("--port", "--http-port", "--grpc-port", "--metrics-port")
    options = [f"{name}={port}" for name, port in zip(names, ports, strict=True)]
    return [*options, f"--model-repository={repository}", f"--data-dir={data_dir}", "--device=cpu"]


def _command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
