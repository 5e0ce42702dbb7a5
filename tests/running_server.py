"""The server under test, and where it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from diffusion_backend.launcher import ServeOptions, Server
from diffusion_backend.processes import LaunchError, free_ports
from diffusion_backend.tritonserver import TritonPorts

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = 240


@dataclass(frozen=True)
class RunningServer:
    """Where the server under test is, and what it writes."""

    adapter_url: str
    grpc_url: str
    http_url: str
    metrics_url: str
    data_dir: Path
    log: Path
    admin_key: str


@contextmanager
def running_server(repository: Path, data_dir: Path) -> Iterator[RunningServer]:
    """A server of ``repository``, ready: tritonserver and adapter on free ports."""
    http, grpc, metrics, port = free_ports(4)
    running = Server(
        ServeOptions(
            repository=repository,
            data_dir=data_dir,
            host="127.0.0.1",
            port=port,
            triton_ports=TritonPorts(http=http, grpc=grpc, metrics=metrics),
            exit_timeout=30,
        )
    )
    try:
        try:
            running.start()
            running.wait_ready(START_SECONDS)
        except LaunchError as error:
            pytest.fail(f"the server under test did not start: {error}", pytrace=False)
        triton = running.triton
        yield RunningServer(
            adapter_url=running.adapter.url,
            grpc_url=triton.grpc_url,
            http_url=triton.http_url,
            metrics_url=triton.metrics_url,
            data_dir=triton.data_dir,
            log=triton.log,
            admin_key=triton.admin_key,
        )
    finally:
        in_order = running.stop()
    # A request still running, or a test that left an HTTP connection to Triton open, keeps it from ending.
    assert in_order, f"the server under test did not stop in order: {running.triton.process.obituary()}"
