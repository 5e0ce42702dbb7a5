"""A tritonserver with models for video, and what the tests do with adapters on it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from diffusion_backend.repository import add
from diffusion_backend.tritonserver import TritonServer

from tests.families.family import Family
from tests.families.wan import wan21, wan21_image
from tests.running_server import ROOT

VIDEOS = "/v1/videos"
TEXT_TO_VIDEO, IMAGE_TO_VIDEO, EMBEDDED = "wan", "wan-image", "emoji-wan"
PROMPT = "a fox on a blue background"
LONG = 200  # steps: a second or so
ENDLESS = 10_000  # steps: longer than any test
_MODELS: dict[str, Family] = {TEXT_TO_VIDEO: wan21, IMAGE_TO_VIDEO: wan21_image}


@dataclass(frozen=True)
class VideoServer:
    """Where a tritonserver with models for video is."""

    grpc_url: str
    metrics_url: str
    admin_key: str

    @property
    def flags(self) -> tuple[str, ...]:
        """Of an adapter on it."""
        return (
            f"--triton-url={self.grpc_url}",
            f"--triton-admin-key={self.admin_key}",
        )  # it may begin with "-"


@contextmanager
def running_video_server(folder: Path) -> Iterator[VideoServer]:
    """A server of text to video and image to video by tiny random models, and of the embedded one."""
    repository = folder / "repository"
    for stage in (ROOT / "model_repository").glob(f"{EMBEDDED}*"):
        shutil.copytree(stage, repository / stage.name, ignore=shutil.ignore_patterns("training"))
    for name, family in _MODELS.items():
        (folder / name).mkdir()
        family.save(folder / name)
        add(str(folder / name), name, repository)
        # Two frames of the default size a slice: clips come in several.
        _replace(repository / f"{name}_vae_decode/config.pbtxt", "max_slice_bytes", "16777216", "3072")
        _replace(repository / f"{name}/config.pbtxt", "max_num_inference_steps", "200", str(ENDLESS))
    triton = TritonServer(repository, data_dir=folder / "data", exit_timeout=30)
    triton.start()
    try:
        triton.wait_ready(240)
        yield VideoServer(triton.grpc_url, triton.metrics_url, triton.admin_key)
    finally:
        in_order = triton.stop()
    # A request that tritonserver never counted out keeps it from ending.
    assert in_order, triton.process.obituary()


def _replace(config: Path, parameter: str, old: str, new: str) -> None:
    line = f'"{parameter}" value: {{ string_value: "{old}" }}'
    assert line in config.read_text()
    config.write_text(config.read_text().replace(line, line.replace(old, new)))


def create(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    """A job from a JSON body."""
    answer = http.post(VIDEOS, json={"model": TEXT_TO_VIDEO, "prompt": PROMPT, **fields})
    assert answer.status_code == 200, answer.text
    video: dict[str, Any] = answer.json()
    return video


def retrieve(http: httpx.Client, video_id: str) -> dict[str, Any]:
    """A job as it is now."""
    answer = http.get(f"{VIDEOS}/{video_id}")
    assert answer.status_code == 200, answer.text
    video: dict[str, Any] = answer.json()
    return video


def poll(http: httpx.Client, video_id: str, seconds: float = 60) -> list[dict[str, Any]]:
    """What is said of a job, again and again, until it is done."""
    deadline = time.monotonic() + seconds
    seen = [retrieve(http, video_id)]
    while seen[-1]["completed_at"] is None:
        if time.monotonic() > deadline:
            pytest.fail(f"the video was not done within {seconds} s: {seen[-1]}")
        time.sleep(0.05)
        seen.append(retrieve(http, video_id))
    return seen


def wait_completed(http: httpx.Client, video_id: str, seconds: float = 60) -> dict[str, Any]:
    """The job, when its video can be fetched."""
    video = poll(http, video_id, seconds)[-1]
    assert video["status"] == "completed", video
    return video


def wait_in_progress(http: httpx.Client, video_id: str, seconds: float = 30) -> None:
    """Until its work has begun, and said so."""
    deadline = time.monotonic() + seconds
    while not (video := retrieve(http, video_id))["progress"]:
        assert video["completed_at"] is None, f"it is done already: {video}"
        assert time.monotonic() < deadline, video
        time.sleep(0.02)


def content(http: httpx.Client, video_id: str, variant: str = "video") -> bytes:
    """A file of a completed job."""
    answer = http.get(f"{VIDEOS}/{video_id}/content", params={"variant": variant})
    assert answer.status_code == 200, answer.text
    return answer.content


def refusal(answer: httpx.Response) -> tuple[int, str | None, str | None]:
    """The status, param and code of an answer in the envelope of errors."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]
    return answer.status_code, error["param"], error["code"]
