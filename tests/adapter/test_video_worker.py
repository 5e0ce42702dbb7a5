"""What the worker does with a model server that sends something else than it was asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusion_backend.client import AsyncDiffusionClient, Generation
from diffusion_backend.settings import resolve
from openai_adapter.async_jobs import AsyncJobs
from openai_adapter.job_files import JobFiles
from openai_adapter.job_store import NewJob
from openai_adapter.job_table import Job, JobStatus
from openai_adapter.metrics import Metrics
from openai_adapter.registry import Model
from openai_adapter.triton import Triton
from openai_adapter.video_worker import KIND, VideoWorker
from test_registry import registry
from test_video_request import VIDEO

from openai_adapter import Settings

MODEL, FRAMES = "wan", 5


def part(start: int, count: int, *, total: int = FRAMES, side: int = 64) -> Generation:
    """A slice of a clip."""
    info = {"frame_index": start, "num_frames": total, "is_final": start + count == total}
    return Generation(np.zeros((0, 0, 3), np.uint8), info, np.zeros((count, side, side, 3), np.uint8))


async def work(jobs: AsyncJobs, files: JobFiles, tmp_path: Path) -> Job:
    """The one job, after a worker has ended it."""
    settings = Settings(data_dir=tmp_path)
    models = registry(Model(MODEL, VIDEO, ready=True))
    resolved = resolve(VIDEO, "a fox", None, {"num_frames": FRAMES, "fps": 8})
    new = NewJob(KIND, "", MODEL, {"settings": resolved.model_dump()})
    job_id = (await jobs.create(new)).job.id
    async with Triton(settings, models) as triton:
        models.models[MODEL] = Model(MODEL, VIDEO, ready=True)
        worker = asyncio.create_task(VideoWorker(settings, models, triton, jobs, files, Metrics()).run())
        try:
            async with asyncio.timeout(60):
                while True:
                    job = await jobs.get(KIND, "", job_id)
                    assert job is not None
                    if job.completed_at is not None:
                        return job
                    await asyncio.sleep(0.02)
        finally:
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([part(0, 5, side=32)], "wrong_frames"),
        ([part(0, 9, total=9)], "wrong_frames"),
        ([part(0, 1, total=1)], "wrong_frames"),
        ([part(0, 2), part(3, 2)], "slices_out_of_order"),
        ([part(0, 2), part(2, 3), part(5, 1)], "slices_out_of_order"),
        ([part(0, 2), part(2, 3)], None),
    ],
    ids=["size", "more", "fewer", "gap", "beyond", "right"],
)
def test_wrong_frames_fail_the_job_once(
    jobs: AsyncJobs,
    files: JobFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parts: list[Generation],
    code: str | None,
) -> None:
    """Another attempt would bring the same ones. No server of ours sends such: the client's stream is replaced."""

    async def stream(_client: object, model: str, **_request: Any) -> AsyncIterator[Generation]:
        assert model == MODEL
        for each in parts:
            yield each

    monkeypatch.setattr(AsyncDiffusionClient, "stream", stream)
    job = asyncio.run(work(jobs, files, tmp_path))
    assert (job.status, job.error_code) == (JobStatus.COMPLETED if code is None else JobStatus.FAILED, code)
    assert job.attempts == 1
    assert len(files.find_all()) == (3 if code is None else 0)
    if code is not None:
        assert job.error_message == "the server failed to answer; its log has the details"
