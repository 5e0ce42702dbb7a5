"""Video jobs on a real server, whose parts are killed while they work."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import numpy.typing as npt
from adapter_process import AdapterProcess
from diffusion_backend.processes import free_ports
from diffusion_backend.repository import add
from openai_adapter.database import Database
from openai_adapter.job_files import JobFiles
from openai_adapter.job_retention import Limits, Removed, enforce_retention
from openai_adapter.job_table import Job
from sqlalchemy import select

from tests.families.stable_diffusion import sd3
from tests.families.wan import wan21

MODEL, PICTURES = "wan", "pictures"
START_SECONDS = 200
Frames = npt.NDArray[np.uint8]


def wait_for(condition: Callable[[], bool], seconds: float, what: str = "") -> None:
    """Until ``condition()`` holds; fails if that takes longer."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain {what}"
        time.sleep(0.05)


@dataclass
class Serving:
    """A ``triton-diffusion serve`` with a tiny Wan, and a tiny model of pictures.

    Its own adapter has no jobs; the tests start others.
    """

    process: subprocess.Popen[bytes]
    grpc: str
    data_dir: Path

    @property
    def flags(self) -> list[str]:
        """What an adapter needs to use its tritonserver."""
        key = (self.data_dir / "admin-key").read_text().strip()
        report = self.data_dir / "healing.json"
        return ["--triton-url", self.grpc, "--triton-admin-key", key, "--healing-report", str(report)]

    def kill_tritonserver(self) -> None:
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for child in children:
            if "tritonserver" in Path(f"/proc/{child}/cmdline").read_text().split("\0")[0]:
                os.kill(int(child), signal.SIGKILL)
                return
        raise AssertionError("there is no tritonserver")


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[Serving]:
    """Start one, and end it."""
    for name, family in ((MODEL, wan21), (PICTURES, sd3)):
        (folder / name).mkdir()
        family.save(folder / name)
        add(str(folder / name), name, folder / "repository")
    port, http, grpc, metrics = free_ports(4)
    ports = {"port": port, "http-port": http, "grpc-port": grpc, "metrics-port": metrics}
    options = [f"--{name}={value}" for name, value in ports.items()]
    options += [
        f"--model-repository={folder / 'repository'}",
        f"--data-dir={folder / 'data'}",
        "--device=cpu",
    ]
    command = [str(Path(sys.executable).with_name("triton-diffusion")), "serve", *options]
    output = folder / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: b"ready after" in output.read_bytes() or process.poll() is not None, START_SECONDS)
        assert process.poll() is None, output.read_text()
        yield Serving(process, f"127.0.0.1:{grpc}", folder / "data")
    finally:
        # Asked again it hurries: where adapters were killed, tritonserver waits for answers that nobody took.
        for seconds in (15, 60):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
                break
        process.kill()


@dataclass
class World:
    """Adapters on one database and one store of files."""

    serving: Serving
    folder: Path
    database_url: str
    flags: Sequence[str] = ()
    adapters: list[AdapterProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.files_folder = self.folder / "files"
        self.files = JobFiles(f"file://{self.files_folder}")
        self.database = Database(self.database_url)
        self.database.upgrade()

    def start(self, *flags: str, database_url: str | None = None, **environment: str) -> AdapterProcess:
        """One adapter more."""
        folder = self.folder / f"adapter-{len(self.adapters)}"
        url = database_url or self.database_url
        self.adapters.append(self._launch(folder, url, flags, **environment))
        return self.adapters[-1]

    def kill(self, number: int) -> None:
        """Kill an adapter, and start it again."""
        self.adapters[number].process.kill()
        self.adapters[number].process.wait()
        folder = self.folder / f"adapter-{number}"
        (folder / "adapter.log").rename(folder / f"{time.monotonic_ns()}.log")
        self.adapters[number] = self._launch(folder, self.database_url, ())

    def close(self) -> None:
        for adapter in self.adapters:
            adapter.end()
        self.database.close()

    def post(self, adapter: AdapterProcess, **fields: Any) -> str:
        """The id of a new job."""
        answer = httpx.post(f"{adapter.url}/v1/videos", json=body(**fields), timeout=60)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def insist(self, key: str, **fields: Any) -> str:
        """The id of the job of this key, from whichever adapter answers first.

        An adapter that starts while there is no tritonserver knows no model until there is one again.
        """
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            for adapter in list(self.adapters):
                with contextlib.suppress(httpx.TransportError):
                    headers = {"Idempotency-Key": key}
                    answer = httpx.post(
                        f"{adapter.url}/v1/videos", json=body(**fields), headers=headers, timeout=10
                    )
                    if answer.status_code == 200:
                        return str(answer.json()["id"])
                    assert answer.status_code == 503, answer.text
            time.sleep(0.1)
        raise AssertionError("no adapter took the job")

    def rows(self) -> list[Job]:
        """All jobs that were not deleted."""
        with self.database.reading() as session:
            query = select(Job).where(Job.deleted_at.is_(None)).order_by(Job.sequence)
            return list(session.scalars(query))

    def row(self, job_id: str) -> Job:
        return next(job for job in self.rows() if job.id == job_id)

    def wait(self, job_id: str, status: str, seconds: float = 60) -> Job:
        wait_for(lambda: self.row(job_id).status == status, seconds, f"for {job_id} to be {status}")
        return self.row(job_id)

    def names(self) -> set[str]:
        """All that lies in the store."""
        return {path.name for path in self.files_folder.glob("*")}

    def sweep(self) -> Removed:
        return enforce_retention(self.database, self.files, Limits(None, 1000))

    def frames(self, job: Job) -> Frames:
        """The frames of what was published, in YUV 4:2:0 as they were encoded: [F, H * 3/2, W]."""
        video = self.files.read(job.files["video"]["name"])
        assert video is not None
        with av.open(io.BytesIO(video)) as container:
            return np.stack([frame.to_ndarray(format="yuv420p") for frame in container.decode(video=0)])

    def _launch(
        self, folder: Path, database_url: str, flags: Sequence[str], **environment: str
    ) -> AdapterProcess:
        folder.mkdir(exist_ok=True)
        store = f"file://{self.files_folder}"
        common = [*self.serving.flags, "--database-url", database_url, "--job-files-url", store]
        program = (str(Path(__file__).with_name("altered_adapter.py")),)
        return AdapterProcess(folder, *common, *self.flags, *flags, program=program, **environment)


def body(seed: int = 0, steps: int = 3, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "a fox", "seed": seed, "num_inference_steps": steps, **more}
