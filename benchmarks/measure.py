"""What the benchmarks share: their options, the machine's name, the server, and how they report."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from diffusion_backend.launcher import ServeOptions, Server
from diffusion_backend.processes import LaunchError, ManagedProcess, free_ports
from diffusion_backend.tritonserver import CHECKOUT, LOOPBACK, TritonPorts, http_status

MODEL = "emoji-flux"
PROMPT = "a fox on a blue background"  # not the one of the model's warmup
START_SECONDS = 300


def parse_options(description: str) -> argparse.Namespace:
    """The command line: ``quick`` and ``json``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="under a minute; the figures are less sure")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there, as a flat object")
    return parser.parse_args()


@contextmanager
def unstarted_server(repository: Path = CHECKOUT / "model_repository") -> Iterator[Server]:
    """A server of this checkout's models on free ports, with files of its own; stopped at the end.

    On the CPU, so that every benchmark here measures the same work on every machine.
    """
    http, grpc, metrics, port = free_ports(4)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        server = Server(
            ServeOptions(
                repository=repository,
                data_dir=Path(folder),
                host=LOOPBACK,
                port=port,
                triton_ports=TritonPorts(http=http, grpc=grpc, metrics=metrics),
                device="cpu",
            )
        )
        try:
            server.start()
            yield server
        finally:
            server.stop()


@contextmanager
def plain_server(script: str, *arguments: str, environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """One of the servers to compare with, a script beside this one, once it answers: the URL of its one route."""
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        process = ManagedProcess(
            script,
            [sys.executable, str(Path(__file__).with_name(script)), str(port), *arguments],
            log=Path(folder) / "log",
            environment=environment,
            patience=10,
        )
        try:
            deadline = time.monotonic() + START_SECONDS
            while http_status(LOOPBACK, port, "/docs") != 200:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise LaunchError(process.obituary())
                time.sleep(0.1)
            yield f"http://{LOOPBACK}:{port}/generate"
        finally:
            process.stop()


def request_body(seed: int, **more: object) -> dict[str, object]:
    """The body of the adapter's ``/v1/images/generations``; all but the seed is the same in every request."""
    return {"model": MODEL, "prompt": PROMPT, "seed": seed, "response_format": "b64_json", **more}


def seconds_of(function: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """What one call takes, of ``repeats`` one after the other, with all that they leave a GPU to do."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    started = time.perf_counter()
    for _ in range(repeats):
        function()
    wait()
    return (time.perf_counter() - started) / repeats


def report(title: str, head: Sequence[str], rows: Sequence[Sequence[str | float]]) -> None:
    """Print the machine and a table: a column of names, then columns of figures."""
    cells = [list(head), *([_show(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}\n{machine()}\n")
    for name, *figures in cells:
        padded = [figure.rjust(width) for figure, width in zip(figures, widths[1:], strict=True)]
        print("  ".join([name.ljust(widths[0]), *padded]).rstrip())


def write_json(path: Path | None, figures: Mapping[str, float]) -> None:
    """Write the figures where ``--json`` says, if it does."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n")


def machine() -> str:
    """One line: what the figures were measured on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{_cpu()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB; "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _show(cell: str | float) -> str:
    return cell if isinstance(cell, str) else f"{cell:.2f}"
