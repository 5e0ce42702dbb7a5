"""``/v1/videos`` over HTTP, on a real tritonserver with tiny models."""

from __future__ import annotations

import base64
import io
import json
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import NoneType
from typing import Any

import httpx
import numpy as np
import pytest
from adapter_process import AdapterProcess
from diffusion_backend.client import DiffusionClient
from openai_adapter.database import Database
from openai_adapter.job_store import JobStore, NewJob
from openai_adapter.job_table import Job
from openai_adapter.video_files import VideoFiles
from PIL import Image
from sqlalchemy import select
from video_server import (
    ENDLESS,
    IMAGE_TO_VIDEO,
    LONG,
    PROMPT,
    TEXT_TO_VIDEO,
    VIDEOS,
    VideoServer,
    content,
    create,
    poll,
    refusal,
    retrieve,
    wait_completed,
    wait_in_progress,
)

from tests import triton_metrics
from tests.postgres import new_database

StartAdapter = Callable[..., AdapterProcess]
FAST: dict[str, Any] = {"seed": 1, "num_inference_steps": 1}


@pytest.fixture(scope="module")
def http(video_adapter: AdapterProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=video_adapter.url, timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def done(http: httpx.Client) -> dict[str, Any]:
    """A completed video that no test changes."""
    return wait_completed(http, create(http, seed=7, num_frames=9, fps=8)["id"])


def picture(width: int = 70, height: int = 40, file_format: str = "PNG") -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(file, file_format)
    return file.getvalue()


def data_url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def files_of(adapter: AdapterProcess) -> list[Path]:
    folder = adapter.log.parent / "jobs"
    return sorted(folder.iterdir()) if folder.exists() else []


def encode(video_server: VideoServer, model: str = TEXT_TO_VIDEO, **request: Any) -> dict[str, bytes]:
    """The files of what a direct client gets."""
    with DiffusionClient(video_server.grpc_url) as client:
        clip = client.generate(model, PROMPT, **request)
    count, height, width, _ = clip.frames.shape
    with VideoFiles(count, clip.info["fps"], width, height) as files:
        files.add(clip.frames)
        return files.finish()


def test_from_creation_to_the_file(http: httpx.Client) -> None:
    before = int(time.time())
    created = create(http, seed=5, num_inference_steps=LONG, num_frames=9, fps=8, user="someone")
    seen = [created, *poll(http, created["id"])]
    video = seen[-1]
    statuses = [each["status"] for each in seen]
    assert created["status"] == "queued"
    assert sorted(statuses, key=["queued", "in_progress", "completed"].index) == statuses
    assert statuses[-1] == "completed"
    progress = [each["progress"] for each in seen]
    assert progress == sorted(progress)
    assert (progress[0], progress[-1]) == (0, 100)
    assert len({each for each in progress if 0 < each < 100}) >= 2, progress
    times = {name: video.pop(name) for name in ("created_at", "completed_at", "expires_at")}
    assert all(type(each) is int for each in times.values())
    assert before <= times["created_at"] <= times["completed_at"] <= time.time()
    assert 86400 - 1 <= times["expires_at"] - times["completed_at"] <= 86400 + 1
    timings = video.pop("timings")
    assert set(timings) == {"encode_seconds", "denoise_seconds", "decode_seconds"}
    assert video == {
        "id": created["id"],
        "object": "video",
        "model": TEXT_TO_VIDEO,
        "status": "completed",
        "progress": 100,
        "prompt": PROMPT,
        "size": "32x16",
        "seconds": "1.125",
        "remixed_from_video_id": None,
        "error": None,
        "quality": "auto",
        "num_frames": 9,
        "fps": 8,
        "num_inference_steps": LONG,
        "guidance_scale": 5.0,
        "negative_prompt": "",
        "seed": 5,
        "loras": {},
        "decode_path": "lossless",
    }
    assert created["completed_at"] is created["expires_at"] is created["timings"] is None
    assert (created["seed"], created["seconds"], created["size"]) == (5, "1.125", "32x16")
    assert content(http, created["id"])[4:8] == b"ftyp"


def test_who_polls_is_told_when_to_come_again(http: httpx.Client) -> None:
    answer = http.post(VIDEOS, json={"model": TEXT_TO_VIDEO, "prompt": PROMPT, **FAST})
    assert int(answer.headers["openai-poll-after-ms"]) > 0
    video = wait_completed(http, answer.json()["id"])
    assert "openai-poll-after-ms" not in http.get(f"{VIDEOS}/{video['id']}").headers


def test_the_file_is_of_the_frames_that_a_direct_client_gets(
    http: httpx.Client, done: dict[str, Any], video_server: VideoServer
) -> None:
    """Byte for byte: alone, a seed gives the same frames, and these the same files."""
    expected = encode(video_server, seed=7, num_frames=9, fps=8)
    for name, data in expected.items():
        assert content(http, done["id"], name.partition(".")[0]) == data


def test_a_seed_gives_the_same_file_again_and_another_one_does_not(
    http: httpx.Client, done: dict[str, Any]
) -> None:
    again = wait_completed(http, create(http, seed=7, num_frames=9, fps=8)["id"])
    other = wait_completed(http, create(http, seed=8, num_frames=9, fps=8)["id"])
    assert content(http, again["id"]) == content(http, done["id"]) != content(http, other["id"])


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"seconds": "0.5"}, {"num_frames": 9, "fps": 16, "seconds": "0.5"}),
        ({"seconds": 0.5, "fps": 10}, {"num_frames": 5, "fps": 10, "seconds": "0.5"}),
        ({"size": "48x32"}, {"size": "48x32"}),
        ({"size": "auto", "quality": "high"}, {"size": "32x16", "quality": "high", "decode_path": "fast"}),
        (
            {"negative_prompt": "a cat", "guidance_scale": 3},
            {"negative_prompt": "a cat", "guidance_scale": 3},
        ),
        ({"extra_body": {"fps": 10}, "n": None}, {"fps": 10}),
    ],
)
def test_what_is_asked_for_is_made(http: httpx.Client, given: dict[str, Any], made: dict[str, Any]) -> None:
    """From JSON and from a form alike."""
    video = wait_completed(http, create(http, **FAST, **given)["id"])
    assert {name: video[name] for name in made} == made
    fields = {"model": TEXT_TO_VIDEO, "prompt": PROMPT, **FAST, **given}
    form = {
        name: (None, str(value)) for name, value in fields.items() if not isinstance(value, dict | NoneType)
    }
    form |= {f"extra_body[{name}]": (None, str(value)) for name, value in given.get("extra_body", {}).items()}
    answer = http.post(VIDEOS, files=form)
    assert answer.status_code == 200, answer.text
    other = wait_completed(http, answer.json()["id"])
    assert {name: other[name] for name in made} == made
    assert content(http, other["id"]) == content(http, video["id"])


def test_the_variants(http: httpx.Client, done: dict[str, Any]) -> None:
    url = f"{VIDEOS}/{done['id']}/content"
    sizes = {"thumbnail": (32, 16), "spritesheet": (4 * 32, 3 * 16)}
    for variant, size in sizes.items():
        answer = http.get(url, params={"variant": variant})
        assert answer.headers["content-type"] == "image/webp"
        assert f'{done["id"]}.{variant}.webp"' in answer.headers["content-disposition"]
        assert Image.open(io.BytesIO(answer.content)).size == size
    video = http.get(url)
    assert video.headers["content-type"] == "video/mp4"
    assert video.headers["cache-control"] == "private"
    assert video.content == http.get(url, params={"variant": "video"}).content
    assert len({content(http, done["id"], variant) for variant in ("video", *sizes)}) == 3


def test_ranges_and_conditions(http: httpx.Client, done: dict[str, Any]) -> None:
    url = f"{VIDEOS}/{done['id']}/content"
    whole = http.get(url)
    size = len(whole.content)
    etag = whole.headers["etag"]
    assert (whole.headers["accept-ranges"], int(whole.headers["content-length"])) == ("bytes", size)
    part = http.get(url, headers={"range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, whole.content[10:20])
    assert part.headers["content-range"] == f"bytes 10-19/{size}"
    assert http.get(url, headers={"range": "bytes=-5"}).content == whole.content[-5:]
    beyond = http.get(url, headers={"range": f"bytes={size}-"})
    assert refusal(beyond)[0] == 416
    assert beyond.headers["content-range"] == f"bytes */{size}"
    head = http.head(url)
    assert (head.status_code, head.content) == (200, b"")
    assert (int(head.headers["content-length"]), head.headers["etag"]) == (size, etag)
    unchanged = http.get(url, headers={"if-none-match": etag})
    assert (unchanged.status_code, unchanged.content, unchanged.headers["etag"]) == (304, b"", etag)
    thumbnail = http.get(url, params={"variant": "thumbnail"}, headers={"if-none-match": etag})
    assert thumbnail.status_code == 200
    assert thumbnail.headers["etag"] != etag


@pytest.mark.parametrize(
    ("path", "param", "code"),
    [
        ("content?variant=poster", "variant", "invalid_value"),
        ("content?variant=video&variant=video", "variant", "duplicate_field"),
        ("content?download=1", "download", "unknown_parameter"),
    ],
)
def test_queries_of_the_content(
    http: httpx.Client, done: dict[str, Any], path: str, param: str, code: str
) -> None:
    assert refusal(http.get(f"{VIDEOS}/{done['id']}/{path}")) == (400, param, code)


@pytest.mark.parametrize(
    ("query", "param", "code"),
    [
        ("limit=0", "limit", "invalid_value"),
        ("limit=101", "limit", "invalid_value"),
        ("limit=x", "limit", "invalid_value"),
        ("limit=1&limit=1", "limit", "duplicate_field"),
        ("order=up", "order", "invalid_value"),
        ("after=video_none", "after", "invalid_value"),
        ("after=%00", "after", "invalid_value"),
        ("page=2", "page", "unknown_parameter"),
    ],
)
def test_queries_of_the_list(http: httpx.Client, query: str, param: str, code: str) -> None:
    assert refusal(http.get(f"{VIDEOS}?{query}")) == (400, param, code)


def test_other_questions_have_no_queries(http: httpx.Client, done: dict[str, Any]) -> None:
    url = f"{VIDEOS}/{done['id']}"
    answers = [
        http.post(f"{VIDEOS}?seed=1", json={"model": TEXT_TO_VIDEO, "prompt": PROMPT}),
        http.post(f"{url}/remix?seed=1", json={"prompt": "a cat"}),
        http.get(f"{url}?seed=1"),
        http.delete(f"{url}?seed=1"),
    ]
    assert [refusal(answer) for answer in answers] == [(400, "seed", "unknown_parameter")] * 4
    assert "allowed: none in the query" in answers[0].json()["error"]["message"]
    assert retrieve(http, done["id"]) == done


def test_the_list(http: httpx.Client) -> None:
    ids = [create(http, **FAST)["id"] for _ in range(3)]
    newest = http.get(VIDEOS, params={"limit": 2}).json()
    assert (newest["object"], newest["has_more"]) == ("list", True)
    assert [video["id"] for video in newest["data"]] == [ids[2], ids[1]]
    assert (newest["first_id"], newest["last_id"]) == (ids[2], ids[1])
    for video_id in ids:
        wait_completed(http, video_id)
    following = http.get(VIDEOS, params={"order": "asc", "after": ids[0], "limit": 100}).json()
    assert [video["id"] for video in following["data"]] == ids[1:]
    assert following["has_more"] is False
    assert following["data"] == [retrieve(http, video_id) for video_id in ids[1:]]


UNKNOWN = "video_" + "0" * 32


@pytest.mark.parametrize("video_id", [UNKNOWN, "x", "%00", "%F0%9F%A6%8A", "image_" + "0" * 32])
def test_unknown_videos(http: httpx.Client, video_id: str) -> None:
    for answer in (
        http.get(f"{VIDEOS}/{video_id}"),
        http.delete(f"{VIDEOS}/{video_id}"),
        http.get(f"{VIDEOS}/{video_id}/content"),
        http.post(f"{VIDEOS}/{video_id}/remix", json={"prompt": "a cat"}),
    ):
        assert refusal(answer) == (404, "video_id", "not_found")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "edits"),
        ("GET", "edits"),
        ("POST", "extensions"),
        ("POST", "characters"),
        ("GET", "characters/char_1"),
    ],
)
def test_what_no_model_here_can_do(http: httpx.Client, method: str, path: str) -> None:
    answer = http.request(method, f"{VIDEOS}/{path}")
    assert refusal(answer) == (501, None, "not_supported")
    assert answer.headers["x-should-retry"] == "false"


def test_an_unfinished_video_has_no_content_and_no_remix(http: httpx.Client) -> None:
    video = create(http, num_inference_steps=LONG)
    answers = [http.get(f"{VIDEOS}/{video['id']}/content")]
    wait_in_progress(http, video["id"])
    answers.append(http.get(f"{VIDEOS}/{video['id']}/content"))
    answers.append(http.post(f"{VIDEOS}/{video['id']}/remix", json={"prompt": "a cat"}))
    for answer in answers:
        assert refusal(answer) == (400, None, "video_not_ready")
        assert "allowed: one that is completed" in answer.json()["error"]["message"]
    assert http.delete(f"{VIDEOS}/{video['id']}").status_code == 200


def test_a_failed_video(start_video_adapter: StartAdapter, video_server: VideoServer) -> None:
    """One that takes too long: told as a job, not as an error of the question."""
    adapter = start_video_adapter("--video-timeout-seconds", "0.5")
    with httpx.Client(base_url=adapter.url, timeout=60) as http:
        video_id = create(http, num_inference_steps=ENDLESS)["id"]
        *_, video = poll(http, video_id)
        assert video["status"] == "failed"
        assert video["error"] == {"code": "timeout", "message": "the video was not done within 0.5 seconds"}
        assert video["completed_at"] >= video["created_at"]
        assert video["expires_at"] > video["completed_at"]
        assert video["progress"] < 100
        triton_metrics.wait_until_idle(video_server.metrics_url, 10)
        for answer in (
            http.get(f"{VIDEOS}/{video_id}/content"),
            http.post(f"{VIDEOS}/{video_id}/remix", json={"prompt": "a cat"}),
        ):
            assert refusal(answer) == (400, None, "video_failed")
            assert "was not done within 0.5 seconds" in answer.json()["error"]["message"]
        assert [each["status"] for each in http.get(VIDEOS).json()["data"]] == ["failed"]
        assert http.delete(f"{VIDEOS}/{video_id}").status_code == 200
        assert http.get(f"{VIDEOS}/{video_id}").status_code == 404
        assert not files_of(adapter)
        metrics = http.get("/metrics").text
        assert 'openai_adapter_jobs_total{kind="video",outcome="failed"} 1.0' in metrics


def test_a_job_that_its_model_refuses_fails_at_once(
    http: httpx.Client, video_adapter: AdapterProcess, done: dict[str, Any]
) -> None:
    """As when a model has come back with other limits: another attempt would be refused, too."""
    database = Database(f"sqlite:///{video_adapter.log.parent / 'jobs.sqlite3'}")
    with database.reading() as session:
        content = dict(session.scalars(select(Job).where(Job.id == done["id"])).one().request)
    content["settings"] = {**content["settings"], "num_frames": 6}
    job = JobStore(database).create(NewJob("video", "", TEXT_TO_VIDEO, content)).job
    *_, video = poll(http, job.id)
    assert video["status"] == "failed"
    assert video["error"] == {
        "code": "invalid_value",
        "message": "'num_frames' is 6; allowed: 1, 5, 9",
    }
    with database.reading() as session:
        assert session.scalars(select(Job.attempts).where(Job.id == job.id)).one() == 1
    database.close()


def test_an_image_in_every_form_gives_the_same_video(http: httpx.Client, video_server: VideoServer) -> None:
    file = picture()
    url = data_url(file)
    fields = {"model": IMAGE_TO_VIDEO, "prompt": PROMPT, "seed": 3, "num_inference_steps": 2}
    form = {name: (None, str(value)) for name, value in fields.items()}
    as_json = {"image_url": url}
    bodies: dict[str, dict[str, Any]] = {
        "file": {"files": {**form, "input_reference": ("a.png", file, "text/plain")}},
        "data URL": {"json": {**fields, "input_reference": url}},
        "object": {"json": {**fields, "input_reference": as_json}},
        "text of a form": {"files": {**form, "input_reference": (None, url)}},
        "object of a form": {"files": {**form, "input_reference[image_url]": (None, url)}},
        "JSON in a form": {"files": {**form, "input_reference": (None, json.dumps(as_json))}},
        "extra_body": {"json": {**fields, "extra_body": {"input_reference": url}}},
    }
    videos = {}
    for name, body in bodies.items():  # one after the other: what runs together differs by rounding
        answer = http.post(VIDEOS, **body)
        assert answer.status_code == 200, (name, answer.text)
        video = wait_completed(http, answer.json()["id"])
        videos[name] = content(http, video["id"])
    assert len(set(videos.values())) == 1
    expected = encode(video_server, IMAGE_TO_VIDEO, image=file, seed=3, num_inference_steps=2)
    assert videos["file"] == expected["video.mp4"]


@pytest.mark.parametrize("file_format", ["JPEG", "WEBP"])
def test_formats_of_an_image(http: httpx.Client, file_format: str) -> None:
    fields = {"model": IMAGE_TO_VIDEO, **FAST}
    video = create(http, **fields, input_reference=data_url(picture(file_format=file_format)))
    wait_completed(http, video["id"])


def test_a_model_and_an_image_that_do_not_fit(http: httpx.Client) -> None:
    fields = {"prompt": PROMPT, "input_reference": data_url(picture())}
    answer = http.post(VIDEOS, json={**fields, "model": TEXT_TO_VIDEO})
    assert refusal(answer) == (400, "input_reference", "unsupported_parameter")
    answer = http.post(VIDEOS, json={"prompt": PROMPT, "model": IMAGE_TO_VIDEO})
    assert refusal(answer) == (400, "input_reference", "missing")


def bomb() -> bytes:
    """A PNG of 60,000 x 60,000 pixels in a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"\0" * 10_000_000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def animation() -> bytes:
    file = io.BytesIO()
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue")]
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:])
    return file.getvalue()


@pytest.mark.parametrize(
    ("file", "code"),
    [
        (b"", "empty_file"),
        (b"hello", "unsupported_image_format"),
        (picture()[:-1000], "invalid_image"),
        (picture()[:20], "invalid_image"),
        (picture(file_format="GIF"), "unsupported_image_format"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "unsupported_image_format"),
        (bomb(), "image_too_large"),
        (animation(), "animated_image"),
        (b"\0" * (20 * 2**20 + 1), "file_too_large"),
    ],
    ids=["empty", "text", "cut", "header", "gif", "svg", "bomb", "animation", "large"],
)
def test_bad_images_leave_nothing(
    http: httpx.Client, video_adapter: AdapterProcess, file: bytes, code: str
) -> None:
    before = files_of(video_adapter), len(http.get(VIDEOS, params={"limit": 100}).json()["data"])
    form = {"model": (None, IMAGE_TO_VIDEO), "prompt": (None, PROMPT)}
    answer = http.post(VIDEOS, files={**form, "input_reference": ("a.png", file, "image/png")})
    assert refusal(answer) == (400, "input_reference", code)
    after = files_of(video_adapter), len(http.get(VIDEOS, params={"limit": 100}).json()["data"])
    assert after == before


@pytest.mark.parametrize(
    ("reference", "param", "code"),
    [
        ("http://127.0.0.1/a.png", "input_reference", "url_not_allowed"),
        ({"image_url": "https://example.org/a.png"}, "input_reference.image_url", "url_not_allowed"),
        ("file:///etc/passwd", "input_reference", "invalid_value"),
        ("data:image/png;base64,%%%", "input_reference", "invalid_data_url"),
        ("data:image/png,abc", "input_reference", "invalid_data_url"),
        ({"file_id": "file_1"}, "input_reference.file_id", "unsupported_parameter"),
        ({}, "input_reference", "invalid_value"),
        ({"image_url": 1}, "input_reference.image_url", "invalid_value"),
        (1, "input_reference", "invalid_value"),
        (True, "input_reference", "invalid_value"),
        ([data_url(b"a")], "input_reference", "invalid_value"),
    ],
)
def test_references_to_nothing(http: httpx.Client, reference: Any, param: str, code: str) -> None:
    fields = {"model": IMAGE_TO_VIDEO, "prompt": PROMPT, "input_reference": reference}
    assert refusal(http.post(VIDEOS, json=fields)) == (400, param, code)


def test_a_remix_has_the_seed_and_the_image_of_its_source(
    http: httpx.Client, video_server: VideoServer
) -> None:
    file = picture()
    asked = {"seed": 3, "num_inference_steps": 2, "num_frames": 9, "fps": 8}
    source = create(http, model=IMAGE_TO_VIDEO, input_reference=data_url(file), **asked)
    wait_completed(http, source["id"])
    answer = http.post(f"{VIDEOS}/{source['id']}/remix", json={"prompt": "a cat"})
    assert answer.status_code == 200
    video = wait_completed(http, answer.json()["id"])
    assert (video["prompt"], video["remixed_from_video_id"]) == ("a cat", source["id"])
    same = ("model", "size", "seconds", "seed", "num_frames", "fps", "num_inference_steps")
    assert {name: video[name] for name in same} == {name: source[name] for name in same}
    expected = create(http, model=IMAGE_TO_VIDEO, input_reference=data_url(file), prompt="a cat", **asked)
    wait_completed(http, expected["id"])
    assert content(http, video["id"]) == content(http, expected["id"]) != content(http, source["id"])
    assert http.delete(f"{VIDEOS}/{source['id']}").status_code == 200
    assert retrieve(http, video["id"])["remixed_from_video_id"] == source["id"]
    again = http.post(f"{VIDEOS}/{video['id']}/remix", json={"prompt": PROMPT}).json()
    wait_completed(http, again["id"])
    expected_again = encode(video_server, IMAGE_TO_VIDEO, image=file, **asked)
    assert content(http, again["id"]) == expected_again["video.mp4"], "the image is that of the first"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "prompt", "missing"),
        ({"prompt": ""}, "prompt", "empty_prompt"),
        ({"prompt": 1}, "prompt", "invalid_value"),
        ({"prompt": "a cat", "seed": 1}, "seed", "unknown_parameter"),
    ],
)
def test_bad_remixes(
    http: httpx.Client, done: dict[str, Any], body: dict[str, Any], param: str, code: str
) -> None:
    assert refusal(http.post(f"{VIDEOS}/{done['id']}/remix", json=body)) == (400, param, code)


def test_deleting_a_completed_video_removes_its_files(
    http: httpx.Client, video_adapter: AdapterProcess
) -> None:
    before = files_of(video_adapter)
    video = wait_completed(http, create(http, **FAST)["id"])
    assert len(files_of(video_adapter)) == len(before) + 3
    url = f"{VIDEOS}/{video['id']}"
    answer = http.delete(url)
    assert answer.json() == {"id": video["id"], "object": "video.deleted", "deleted": True}
    assert files_of(video_adapter) == before
    for gone in (http.delete(url), http.get(url), http.get(f"{url}/content")):
        assert refusal(gone) == (404, "video_id", "not_found")
    assert video["id"] not in {each["id"] for each in http.get(VIDEOS).json()["data"]}


def running(video_server: VideoServer) -> float:
    return triton_metrics.read(video_server.metrics_url, "running_rows")


def test_deleting_a_running_video_cancels_its_work(http: httpx.Client, video_server: VideoServer) -> None:
    """Within a step; and the next one is made."""
    cancelled = triton_metrics.read(video_server.metrics_url, "requests_total", outcome="cancelled")
    video_id = create(http, num_inference_steps=ENDLESS)["id"]
    wait_in_progress(http, video_id)
    assert running(video_server) == 1
    assert http.delete(f"{VIDEOS}/{video_id}").status_code == 200
    triton_metrics.wait_until_idle(video_server.metrics_url, 5)
    now = triton_metrics.read(video_server.metrics_url, "requests_total", outcome="cancelled")
    assert now == cancelled + 1
    wait_completed(http, create(http, **FAST)["id"])


def test_deleting_a_queued_video(start_video_adapter: StartAdapter, video_server: VideoServer) -> None:
    adapter = start_video_adapter("--max-videos-in-flight", "1")
    with httpx.Client(base_url=adapter.url, timeout=60) as http:
        first = create(http, num_inference_steps=ENDLESS)["id"]
        wait_in_progress(http, first)
        waiting = [create(http, seed=seed, num_inference_steps=2)["id"] for seed in (1, 2)]
        assert [retrieve(http, video_id)["status"] for video_id in waiting] == ["queued"] * 2
        assert running(video_server) == 1, "one at a time"
        started = triton_metrics.read(video_server.metrics_url, "requests_total")
        assert http.delete(f"{VIDEOS}/{waiting[0]}").status_code == 200
        assert http.delete(f"{VIDEOS}/{first}").status_code == 200
        wait_completed(http, waiting[1])
        assert refusal(http.get(f"{VIDEOS}/{waiting[0]}"))[0] == 404
        # The one that was cancelled, and the one that was left.
        assert triton_metrics.read(video_server.metrics_url, "requests_total") == started + 2


def test_a_video_deleted_through_another_adapter_is_cancelled(
    start_video_adapter: StartAdapter, video_server: VideoServer
) -> None:
    """Both have one database and one store of files: here, a folder."""
    worker = start_video_adapter()
    with httpx.Client(base_url=worker.url, timeout=60) as http:
        video_id = create(http, num_inference_steps=ENDLESS)["id"]
        wait_in_progress(http, video_id)
        other = start_video_adapter()
        with httpx.Client(base_url=other.url, timeout=60) as http_of_other:
            assert retrieve(http_of_other, video_id)["status"] == "in_progress"
            assert http_of_other.delete(f"{VIDEOS}/{video_id}").status_code == 200
        triton_metrics.wait_until_idle(video_server.metrics_url, 5)
        assert refusal(http.get(f"{VIDEOS}/{video_id}"))[0] == 404


def test_several_adapters_on_one_postgres_and_one_store(
    start_video_adapter: StartAdapter, video_server: VideoServer, postgres: str, tmp_path: Path
) -> None:
    """One queue and one list: each job is made once, by either, and fetched from either."""
    with new_database(postgres) as url, httpx.Client(timeout=60) as one, httpx.Client(timeout=60) as two:
        shared = ("--database-url", url, "--job-files-url", f"file://{tmp_path / 'shared'}")
        adapters = [start_video_adapter(*shared, "--max-videos-in-flight", "1") for _ in range(2)]
        for http, adapter in zip((one, two), adapters, strict=True):
            http.base_url = adapter.url
        before = triton_metrics.read(video_server.metrics_url, "requests_total")
        ids = [
            create(http, seed=seed, num_inference_steps=50)["id"] for seed in range(4) for http in (one, two)
        ]
        for video_id in ids:
            wait_completed(two, video_id)
            assert content(one, video_id) == content(two, video_id)
        assert triton_metrics.read(video_server.metrics_url, "requests_total") == before + len(ids)
        pages = [http.get(VIDEOS, params={"order": "asc"}).json() for http in (one, two)]
        assert [video["id"] for video in pages[0]["data"]] == ids
        assert pages[0] == pages[1]
        done = 'openai_adapter_jobs_total{kind="video",outcome="completed"} '
        counts = [
            sum(
                float(line.removeprefix(done))
                for line in http.get("/metrics").text.splitlines()
                if done in line
            )
            for http in (one, two)
        ]
        assert sum(counts) == len(ids)
        assert min(counts) > 0, "one adapter has made all of them"
        assert not (tmp_path / "jobs.sqlite3").exists()
        for video_id in ids:
            assert two.delete(f"{VIDEOS}/{video_id}").status_code == 200
            assert one.get(f"{VIDEOS}/{video_id}").status_code == 404
        assert not list((tmp_path / "shared").iterdir())


def test_callers_do_not_see_each_others_videos(start_video_adapter: StartAdapter) -> None:
    adapter = start_video_adapter("--api-keys", "one,two")
    one, two, nobody = (
        httpx.Client(base_url=adapter.url, headers={"authorization": f"Bearer {key}"}, timeout=60)
        for key in ("one", "two", "three")
    )
    with one, two, nobody:
        video = wait_completed(one, create(one, **FAST)["id"])
        url = f"{VIDEOS}/{video['id']}"
        others = [
            two.get(url),
            two.get(f"{url}/content"),
            two.post(f"{url}/remix", json={"prompt": "a cat"}),
            two.delete(url),
        ]
        assert [refusal(answer) for answer in others] == [(404, "video_id", "not_found")] * 4
        assert two.get(VIDEOS).json()["data"] == []
        assert refusal(two.get(VIDEOS, params={"after": video["id"]})) == (400, "after", "invalid_value")
        assert [refusal(answer)[0] for answer in (nobody.get(VIDEOS), nobody.get(url))] == [401, 401]
        assert [each["id"] for each in one.get(VIDEOS).json()["data"]] == [video["id"]]
        assert one.delete(url).status_code == 200


def test_jobs_outlive_the_adapter(start_video_adapter: StartAdapter, video_server: VideoServer) -> None:
    """Completed ones are there, running ones are begun anew at once, and queued ones are made."""
    adapter = start_video_adapter("--max-videos-in-flight", "1")
    with httpx.Client(base_url=adapter.url, timeout=60) as http:
        completed = wait_completed(http, create(http, **FAST)["id"])
        file = content(http, completed["id"])
        interrupted = create(http, seed=2, num_inference_steps=LONG)["id"]
        wait_in_progress(http, interrupted)
        queued = create(http, seed=3, num_inference_steps=2)["id"]
    assert adapter.stop() == 0
    triton_metrics.wait_until_idle(video_server.metrics_url, 10)
    adapter = start_video_adapter("--max-videos-in-flight", "1")
    with httpx.Client(base_url=adapter.url, timeout=60) as http:
        assert retrieve(http, completed["id"]) == completed
        assert content(http, completed["id"]) == file
        for video_id in (interrupted, queued):
            wait_completed(http, video_id)
        expected = encode(video_server, seed=2, num_inference_steps=LONG)
        assert content(http, interrupted) == expected["video.mp4"]
        assert content(http, queued) == encode(video_server, seed=3, num_inference_steps=2)["video.mp4"]
        order = [each["id"] for each in http.get(VIDEOS, params={"order": "asc"}).json()["data"]]
        assert order == [completed["id"], interrupted, queued]


def test_a_database_that_is_taken_away(start_video_adapter: StartAdapter) -> None:
    """Nobody is told of a job that would be lost; what was there is there again with the file."""
    adapter = start_video_adapter()
    file = adapter.log.parent / "jobs.sqlite3"
    with httpx.Client(base_url=adapter.url, timeout=60) as http:
        completed = wait_completed(http, create(http, **FAST)["id"])
        file.rename(file.with_suffix(".away"))
        for answer in (
            http.post(VIDEOS, json={"model": TEXT_TO_VIDEO, "prompt": PROMPT}),
            http.get(VIDEOS),
            http.get(f"{VIDEOS}/{completed['id']}"),
            http.delete(f"{VIDEOS}/{completed['id']}"),
        ):
            assert refusal(answer)[0] == 503
            assert "database of jobs" in answer.json()["error"]["message"]
        assert not file.exists()
        file.with_suffix(".away").rename(file)
        assert [each["id"] for each in http.get(VIDEOS).json()["data"]] == [completed["id"]]
        wait_completed(http, create(http, **FAST)["id"])


def test_too_many_unfinished_videos(start_video_adapter: StartAdapter) -> None:
    adapter = start_video_adapter("--max-videos-in-flight", "1", "--max-unfinished-videos", "2")
    with httpx.Client(base_url=adapter.url, timeout=60) as http:
        videos = [create(http, num_inference_steps=ENDLESS)["id"] for _ in range(2)]
        answer = http.post(VIDEOS, json={"prompt": PROMPT, "model": TEXT_TO_VIDEO})
        assert refusal(answer) == (503, None, "queue_full")
        assert answer.json()["error"]["message"] == "the server is busy: 2 videos are waiting or being made"
        assert answer.headers["retry-after"]
        assert "x-should-retry" not in answer.headers
        assert len(http.get(VIDEOS).json()["data"]) == 2
        assert http.delete(f"{VIDEOS}/{videos[1]}").status_code == 200
        videos[1] = create(http, **FAST)["id"]
        for video_id in videos:
            http.delete(f"{VIDEOS}/{video_id}")


def test_finished_videos_expire(start_video_adapter: StartAdapter) -> None:
    adapter = start_video_adapter("--job-ttl-seconds", "3")
    with httpx.Client(base_url=adapter.url, timeout=60) as http:
        video = wait_completed(http, create(http, **FAST)["id"])
        assert video["expires_at"] - video["completed_at"] in (3, 4)
        assert len(files_of(adapter)) == 3
        deadline = time.monotonic() + 15
        while http.get(f"{VIDEOS}/{video['id']}").status_code != 404:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        while files_of(adapter):
            assert time.monotonic() < deadline
            time.sleep(0.2)


@pytest.mark.parametrize("key", [None, "key"])
def test_models_that_make_no_such_video(http: httpx.Client, key: str | None) -> None:
    headers = {} if key is None else {"idempotency-key": key}
    answer = http.post(VIDEOS, json={"prompt": PROMPT, "model": "none"}, headers=headers)
    assert refusal(answer) == (404, "model", "model_not_found")
    answer = http.post(VIDEOS, json={"prompt": PROMPT}, headers=headers)
    assert refusal(answer) == (400, "model", "model_required")


def test_a_model_of_video_makes_no_pictures(http: httpx.Client) -> None:
    answer = http.post("/v1/images/generations", json={"prompt": PROMPT, "model": TEXT_TO_VIDEO})
    assert refusal(answer)[:2] == (400, "model")


def test_a_prompt_of_any_unicode(http: httpx.Client) -> None:
    for prompt in ("a\u0000fox", "🦊" * 1000, "\u202eאבג", "a\r\nb"):
        video = wait_completed(http, create(http, prompt=prompt, **FAST)["id"])
        assert video["prompt"] == prompt


def test_many_at_once(http: httpx.Client, video_server: VideoServer) -> None:
    """Of two models and several lengths: each gets its own, which is what it is alone up to rounding."""
    requests = [
        {"seed": seed, "num_inference_steps": 2, "num_frames": (5, 9)[seed % 2], "size": size}
        for seed, size in enumerate(("32x16", "48x32") * 3)
    ]

    def make(request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        video = wait_completed(http, create(http, **request)["id"])
        return video, content(http, video["id"], "spritesheet")

    with ThreadPoolExecutor(len(requests)) as pool:
        made = list(pool.map(make, requests))
    for request, (video, sheet) in zip(requests, made, strict=True):
        assert {name: video[name] for name in request} == request
        width, height = map(int, request["size"].split("x"))
        alone = encode(
            video_server,
            width=width,
            height=height,
            **{name: request[name] for name in request if name != "size"},
        )
        pixels = [
            np.asarray(Image.open(io.BytesIO(each)).convert("RGB")).astype(int)
            for each in (sheet, alone["spritesheet.webp"])
        ]
        assert np.abs(pixels[0] - pixels[1]).mean() < 2
    assert len({sheet for _, sheet in made}) == len(requests)
