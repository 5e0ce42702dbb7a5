"""Videos with the official Python and Node SDKs."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import av
import clips
import evaluate_wan
import ffprobe
import numpy as np
import openai
import pytest
import torch
from adapter_process import AdapterProcess
from openai.types import Video
from openai_adapter.database import Database
from openai_adapter.job_store import JobStore, NewJob
from openai_adapter.job_table import Job
from PIL import Image
from sqlalchemy import update
from test_videos_api import picture
from video_server import EMBEDDED, IMAGE_TO_VIDEO, PROMPT, TEXT_TO_VIDEO

from tests.node_sdk import run_script

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")  # of all methods of videos

MANY = 250


@pytest.fixture(scope="module")
def client(video_adapter: AdapterProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{video_adapter.url}/v1", api_key="none", max_retries=0)


def assert_video(file: Path, width: int, height: int, frames: int, fps: int) -> None:
    """As a reader sees it that is not ours."""
    found = ffprobe.probe(file)
    assert (found["codec_name"], found["pix_fmt"]) == ("h264", "yuv420p")
    assert (found["width"], found["height"]) == (width, height)
    assert int(found["nb_read_frames"]) == frames
    assert found["avg_frame_rate"] == f"{fps}/1"
    assert float(found["duration"]) == pytest.approx(frames / fps, abs=1e-3)
    assert "mp4" in found["format"]["format_name"]


@pytest.mark.parametrize(
    ("fields", "frames", "fps"),
    [
        ({"seconds": "0.5"}, 9, 16),
        ({"seconds": "1", "extra_body": {"fps": 8}}, 9, 8),
        ({"extra_body": {"num_frames": 5, "fps": 24}}, 5, 24),
    ],
)
def test_the_python_sdk(
    client: openai.OpenAI, tmp_path: Path, fields: dict[str, Any], frames: int, fps: int
) -> None:
    video = client.videos.create_and_poll(
        model=TEXT_TO_VIDEO, prompt=PROMPT, size="48x32", poll_interval_ms=100, **fields
    )
    assert isinstance(video, Video)
    assert (video.status, video.progress, video.error) == ("completed", 100, None)
    assert (video.size, video.prompt, video.model) == ("48x32", PROMPT, TEXT_TO_VIDEO)
    assert video.seconds == fields.get("seconds", "0.208333")
    assert video.completed_at is not None
    assert video.expires_at is not None
    client.videos.download_content(video.id).write_to_file(tmp_path / "video.mp4")
    assert_video(tmp_path / "video.mp4", 48, 32, frames, fps)
    for variant, size in (("thumbnail", (48, 32)), ("spritesheet", (4 * 48, -(-frames // 4) * 32))):
        answer = client.videos.download_content(video.id, variant=variant)  # type: ignore[arg-type]
        image = Image.open(io.BytesIO(answer.read()))
        assert (image.format, image.size) == ("WEBP", size)


def test_the_embedded_model_moves_what_it_is_asked_to(client: openai.OpenAI, tmp_path: Path) -> None:
    """Four names, each in the direction that it was not trained on, by the middle of the drawing in each frame."""
    subjects = evaluate_wan.choose_subjects(seen=False, seeds=1)[:4]
    assert {subject.direction for subject in subjects} == set(clips.DIRECTIONS)

    def make(subject: clips.Subject) -> Path:
        video = client.videos.create_and_poll(
            model=EMBEDDED, prompt=subject.prompt, poll_interval_ms=200, extra_body={"seed": 777_000}
        )
        assert (video.status, video.error) == ("completed", None)
        client.videos.download_content(video.id).write_to_file(file := tmp_path / f"{video.id}.mp4")
        return file

    with ThreadPoolExecutor(len(subjects)) as pool:
        files = list(pool.map(make, subjects))
    for subject, file in zip(subjects, files, strict=True):
        assert_video(file, clips.SIZE, clips.SIZE, clips.FRAMES, 8)
        assert along(subject, file) > 8 * clips.SPEED, subject


def along(subject: clips.Subject, file: Path) -> float:
    """How many pixels the drawing moves in the subject's direction, between the clip's first and last frames.

    Across, it has to move by less than half of that.
    """
    with av.open(str(file)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    clip = torch.from_numpy(frames).permute(0, 3, 1, 2) / 255
    track = evaluate_wan.find_centres(clip, evaluate_wan.measure_background(clip))
    x, y = (track[-4:].mean(0) - track[:4].mean(0)).tolist()
    step_x, step_y = clips.DIRECTIONS[subject.direction]
    way, across = x * step_x + y * step_y, abs(x * step_y) + abs(y * step_x)
    print(f"{subject}: {way:.1f} pixels, {across:.1f} across")
    assert across < way / 2, subject
    return way


def test_an_image_and_a_remix(client: openai.OpenAI, tmp_path: Path) -> None:
    """A file as the SDK sends it: by its path, with its name, or as bytes that have none."""
    path = tmp_path / "fox.png"
    path.write_bytes(picture())
    extra = {"seed": 3, "num_inference_steps": 2}
    files: list[Any] = [path, ("fox.png", path.read_bytes(), "image/png"), path.read_bytes()]
    videos = [
        client.videos.create_and_poll(
            model=IMAGE_TO_VIDEO, prompt=PROMPT, input_reference=file, extra_body=extra
        )
        for file in files
    ]
    assert {video.status for video in videos} == {"completed"}
    assert len({client.videos.download_content(video.id).read() for video in videos}) == 1
    remix = client.videos.poll(client.videos.remix(videos[0].id, prompt="a cat").id)
    assert (remix.status, remix.remixed_from_video_id, remix.prompt) == ("completed", videos[0].id, "a cat")
    deleted = client.videos.delete(remix.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (remix.id, True, "video.deleted")
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(remix.id)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"seconds": "600"}, "seconds", "invalid_value"),
        ({"size": "720x1280"}, "size", "invalid_size"),
        ({"extra_body": {"fps": 0}}, "fps", "invalid_value"),
        ({"extra_body": {"width": 64}}, "width", "unsupported_parameter"),
        ({"extra_body": {"a": {"b": 1}}}, "a", "unknown_parameter"),
        ({"input_reference": b"\0"}, "input_reference", "unsupported_parameter"),
        ({"prompt": ""}, "prompt", "empty_prompt"),
    ],
)
def test_what_the_python_sdk_raises(
    client: openai.OpenAI, fields: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.videos.create(**{"model": TEXT_TO_VIDEO, "prompt": PROMPT, **fields})
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.request_id


def test_what_no_model_can_do_is_not_tried_again(video_adapter: AdapterProcess, tmp_path: Path) -> None:
    client = openai.OpenAI(base_url=f"{video_adapter.url}/v1", api_key="none")
    with pytest.raises(openai.InternalServerError) as caught:
        client.videos.get_character("char_1")
    assert (caught.value.status_code, caught.value.code) == (501, "not_supported")
    (tmp_path / "video.mp4").write_bytes(b"\0")
    with pytest.raises(openai.InternalServerError) as caught:
        client.videos.edit(prompt="a cat", video=tmp_path / "video.mp4")
    assert caught.value.code == "not_supported"
    text = video_adapter.log.read_text()
    assert "Traceback" not in text


@pytest.fixture
def crowded(
    start_adapter: Callable[..., AdapterProcess], tmp_path: Path
) -> Iterator[tuple[openai.OpenAI, JobStore, list[str]]]:
    """An adapter with many jobs of the same second, which nobody works on; the oldest first."""
    adapter = start_adapter("--triton-url", "127.0.0.1:1")
    adapter.wait("/health/live")
    database = Database(f"sqlite:///{tmp_path / 'jobs.sqlite3'}")
    store = JobStore(database)
    ids = [create(store) for _ in range(MANY)]
    with database.writing() as session:
        session.execute(update(Job).values(created_at=time.time()))
    yield openai.OpenAI(base_url=f"{adapter.url}/v1", api_key="none", max_retries=0), store, ids
    database.close()


def create(store: JobStore) -> str:
    settings = {"prompt": PROMPT, "width": 32, "height": 16, "quality": "auto", "num_frames": 5, "fps": 16}
    settings |= {"num_inference_steps": 3, "guidance_scale": 5.0, "negative_prompt": "", "seed": 1}
    content = {"settings": settings, "seconds": "0.3125", "remixed_from_video_id": None}
    return store.create(NewJob("video", "", "not-served", content)).job.id


def listed(client: openai.OpenAI, **query: Any) -> list[str]:
    return [video.id for video in client.videos.list(**query)]


def test_a_list_of_many(crowded: tuple[openai.OpenAI, JobStore, list[str]]) -> None:
    client, _, ids = crowded
    assert len({video.created_at for video in client.videos.list()}) == 1
    for query in ({"limit": 1}, {"limit": 7}, {"limit": 100}, {}):
        assert listed(client, **query, order="asc") == ids
        assert listed(client, **query, order="desc") == listed(client, **query) == ids[::-1]
        assert len(client.videos.list(**query).data) == query.get("limit", 20)


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_a_list_that_changes_between_pages(
    crowded: tuple[openai.OpenAI, JobStore, list[str]], order: Any
) -> None:
    """Jobs are removed before and behind the cursor, it itself as well, and new ones come: the rest comes once."""
    client, store, ids = crowded
    in_order = ids if order == "asc" else ids[::-1]
    seen: list[str] = []
    unseen_and_removed: set[str] = set()
    created: list[str] = []
    for number, video in enumerate(client.videos.list(limit=10, order=order)):
        seen.append(video.id)
        if number % 10 == 9 and number < MANY * 0.6:  # the last of its page
            client.videos.delete(video.id)
            client.videos.delete(seen[-5])
            ahead = in_order[in_order.index(video.id) + 3]
            client.videos.delete(ahead)
            unseen_and_removed.add(ahead)
            created.append(create(store))
    assert len(created) == len(unseen_and_removed) > 10
    expected = [video_id for video_id in in_order if video_id not in unseen_and_removed]
    assert seen == (expected + created if order == "asc" else expected)


def test_the_node_sdk(
    start_video_adapter: Callable[..., AdapterProcess], tmp_path: Path, client: openai.OpenAI
) -> None:
    adapter = start_video_adapter()
    result = run_script(
        tmp_path, "videos.mjs", f"{adapter.url}/v1", base64.b64encode(picture()).decode(), seconds=120
    )
    video = result["video"]
    assert (video["status"], video["progress"], video["seed"]) == ("completed", 100, 11)
    assert result["statuses"][0] == "queued"
    assert {name: file["type"] for name, file in result["files"].items()} == {
        "video": "video/mp4",
        "thumbnail": "image/webp",
        "spritesheet": "image/webp",
    }
    files = {name: base64.b64decode(file["base64"]) for name, file in result["files"].items()}
    (tmp_path / "video.mp4").write_bytes(files["video"])
    assert_video(tmp_path / "video.mp4", 48, 32, 9, 16)
    assert Image.open(io.BytesIO(files["thumbnail"])).size == (48, 32)
    assert result["moved"]["model"] == IMAGE_TO_VIDEO
    assert result["remixed"]["remixed_from_video_id"] == video["id"]
    ids = [result[name]["id"] for name in ("created", "moved", "remixed")]
    assert result["listed"] == {"asc": ids, "desc": ids[::-1]}
    assert result["deleted"] == {"id": video["id"], "object": "video.deleted", "deleted": True}
    assert result["refused"] == {
        "gone": {"name": "NotFoundError", "status": 404, "param": "video_id", "code": "not_found"},
        "size": {"name": "BadRequestError", "status": 400, "param": "size", "code": "invalid_size"},
    }
    same = client.videos.create_and_poll(
        model=TEXT_TO_VIDEO, prompt=PROMPT, seconds="0.5", size="48x32", extra_body={"seed": 11}
    )
    assert client.videos.download_content(same.id).read() == files["video"]
