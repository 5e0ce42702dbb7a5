"""What a video costs beyond its making: from the POST of a job to its start, first progress and end.

direct  the direct client's ``generate`` of the same clip on the same server: frames, no files
job     POST /v1/videos, and the job's row read every 2 ms until it is completed: MP4, thumbnail and spritesheet lie
        in the store, on the disk

A tiny Wan with random weights, so that what is around the making is most of it. The two take turns; one at a time.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import httpx
import measure
from diffusion_backend.client import DiffusionClient
from diffusion_backend.repository import add
from diffusion_backend.tritonserver import CHECKOUT
from openai_adapter.database import Database
from openai_adapter.job_table import Job
from sqlalchemy import select

sys.path.insert(0, str(CHECKOUT))  # for the tests' tiny pipelines
from tests.families.wan import wan21

MODEL = "wan"
STEPS = 20
WARMUP_ROUNDS = 2
_LOOK_SECONDS = 0.002


@dataclass(frozen=True)
class Times:
    """Milliseconds from the POST on, by the client's clock."""

    answered: float
    started: float
    progressed: float
    completed: float


def main() -> None:
    """Measure, print and write what was asked for."""
    options = measure.parse_options(__doc__ or "")
    rounds = 5 if options.quick else 40
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        pipeline, repository = Path(folder) / "pipeline", Path(folder) / "repository"
        pipeline.mkdir()
        wan21.save(pipeline)
        add(str(pipeline), MODEL, repository)
        with measure.unstarted_server(repository) as server:
            server.wait_ready(measure.START_SECONDS)
            database = Database(f"sqlite:///{server.triton.data_dir.absolute() / 'jobs.sqlite3'}")
            with DiffusionClient(server.triton.grpc_url) as client, httpx.Client(timeout=600) as http:
                direct, jobs = measure_rounds(
                    client, http, f"{server.adapter.url}/v1/videos", database, rounds
                )
            database.close()
    figures: dict[str, float] = {"rounds": rounds, **_summary("direct", direct)}
    for name in (field.name for field in fields(Times)):
        figures |= _summary(f"job_{name}", [getattr(times, name) for times in jobs])
    figures["job_over_direct"] = figures["job_completed_ms"] / figures["direct_ms"]
    figures["progressed_over_direct"] = figures["job_progressed_ms"] / figures["direct_ms"]
    rows = [
        [name.replace("_", " "), figures[f"{name}_ms"], figures[f"{name}_p95_ms"]]
        for name in ("direct", "job_answered", "job_started", "job_progressed", "job_completed")
    ]
    measure.report(
        f"a clip of 5 frames of 32x16 in {STEPS} steps, {rounds} rounds", ("", "ms p50", "p95"), rows
    )
    print(f"\njob over direct: {figures['job_over_direct']:.2f}")
    measure.write_json(options.json, figures)


def measure_rounds(
    client: DiffusionClient, http: httpx.Client, url: str, database: Database, rounds: int
) -> tuple[list[float], list[Times]]:
    """What the direct client takes, and the job."""
    direct: list[float] = []
    jobs: list[Times] = []
    for seed in range(-WARMUP_ROUNDS, rounds):
        request = {"prompt": measure.PROMPT, "seed": seed + WARMUP_ROUNDS, "num_inference_steps": STEPS}
        took = _time(lambda request=request: client.generate(MODEL, **request))  # type: ignore[misc]
        times = follow(http, url, database, {"model": MODEL, **request})
        if seed >= 0:
            direct.append(took)
            jobs.append(times)
    return direct, jobs


def follow(http: httpx.Client, url: str, database: Database, body: dict[str, Any]) -> Times:
    """Create a job, and look at its row until it is completed."""
    begun = time.perf_counter()
    job_id = http.post(url, json=body).raise_for_status().json()["id"]
    answered = _milliseconds(begun)
    started = progressed = 0.0
    while True:
        with database.reading() as session:
            query = select(Job.status, Job.progress).where(Job.id == job_id)
            status, progress = session.execute(query).one()
        now = _milliseconds(begun)
        if status == "failed":
            raise RuntimeError("the job failed")
        if not started and status != "queued":
            started = now
        if not progressed and progress > 0:
            progressed = now
        if status == "completed":
            return Times(answered, started, progressed, now)
        time.sleep(_LOOK_SECONDS)


def _summary(name: str, times: list[float]) -> dict[str, float]:
    return {
        f"{name}_ms": statistics.median(times),
        f"{name}_p95_ms": statistics.quantiles(times, n=20, method="inclusive")[-1],
    }


def _time(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return _milliseconds(begun)


def _milliseconds(begun: float) -> float:
    return 1000 * (time.perf_counter() - begun)


if __name__ == "__main__":
    main()
