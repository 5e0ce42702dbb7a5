"""The adapter as a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from diffusion_backend.processes import free_ports

PROGRAM = ("-m", "openai_adapter")


class AdapterProcess:
    """``python -m openai_adapter``, or another ``program`` that takes the same flags, on a free port."""

    def __init__(
        self, folder: Path, *flags: str, program: Sequence[str] = PROGRAM, **environment: str
    ) -> None:
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "adapter.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    *program,
                    "--port",
                    str(self.port),
                    "--data-dir",
                    folder,
                    *flags,
                ],
                env={**os.environ, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait(self, path: str, seconds: float = 30) -> None:
        """Until ``path`` answers 200."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if httpx.get(self.url + path).status_code == 200:
                    return
            except httpx.TransportError:
                assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        pytest.fail(f"{path} was not 200 within {seconds} s:\n{self.log.read_text()}")

    def stop(self, seconds: float = 60) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        return self.process.wait(seconds)

    def end(self) -> None:
        """In order if it can, whatever state it is in.

        tritonserver 2.51 keeps a model for ever whose answer nobody was there to take: an adapter that is killed while
        it asks the stages how they are would keep a server that others share from ending in order.
        """
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        self.process.kill()
        self.process.wait()
