"""Requests with an ``Idempotency-Key``: sent again, they are worked on once. On real servers."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from adapter_process import AdapterProcess
from PIL import Image
from test_image_streams import GENERATIONS, connect, flags_for, wait_for_rows
from video_server import (
    IMAGE_TO_VIDEO,
    PROMPT,
    TEXT_TO_VIDEO,
    VIDEOS,
    VideoServer,
    content,
    refusal,
    wait_completed,
)

from tests import triton_metrics
from tests.running_server import RunningServer

StartAdapter = Callable[..., AdapterProcess]
AT_ONCE = 8
VIDEO: dict[str, Any] = {"model": TEXT_TO_VIDEO, "prompt": PROMPT, "num_inference_steps": 2}
IMAGE: dict[str, Any] = {"prompt": PROMPT, "num_inference_steps": 3}


@pytest.fixture(scope="module")
def videos(video_adapter: AdapterProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=video_adapter.url, timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def images(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.adapter_url, timeout=60) as http:
        yield http


def key() -> dict[str, str]:
    return {"idempotency-key": str(uuid.uuid4())}


def runs(server: VideoServer | RunningServer) -> float:
    """How many requests the denoise stages have taken."""
    return triton_metrics.read(server.metrics_url, "requests_total")


def at_once(
    http: httpx.Client, url: str, body: dict[str, Any], headers: dict[str, str]
) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=http.base_url, timeout=60) as client:
            return await asyncio.gather(
                *(client.post(url, json=body, headers=headers) for _ in range(AT_ONCE))
            )

    return asyncio.run(run())


def assert_conflict(answer: httpx.Response) -> None:
    assert refusal(answer) == (409, "Idempotency-Key", "idempotency_key_reused")
    assert answer.headers["x-should-retry"] == "false"
    assert "allowed: a new key, or the same body" in answer.json()["error"]["message"]


def test_one_video_of_many_requests(videos: httpx.Client, video_server: VideoServer) -> None:
    headers, before = key(), runs(video_server)
    answers = at_once(videos, VIDEOS, VIDEO, headers)
    assert [answer.status_code for answer in answers] == [200] * AT_ONCE
    (video_id,) = {answer.json()["id"] for answer in answers}
    assert len({answer.json()["seed"] for answer in answers}) == 1
    done = wait_completed(videos, video_id)
    assert videos.post(VIDEOS, json=VIDEO, headers=headers).json() == done
    assert runs(video_server) == before + 1


def test_another_body_with_the_key_of_a_video(videos: httpx.Client) -> None:
    headers = key()
    video = videos.post(VIDEOS, json=VIDEO, headers=headers).json()
    for change in ({"prompt": "a cat"}, {"seed": 1}, {"fps": 8}, {"size": "32x16"}):
        assert_conflict(videos.post(VIDEOS, json={**VIDEO, **change}, headers=headers))
    wait_completed(videos, video["id"])
    assert_conflict(videos.post(VIDEOS, json={**VIDEO, "user": "x"}, headers=headers))
    assert_conflict(
        videos.post(f"{VIDEOS}/{video['id']}/remix", json={"prompt": VIDEO["prompt"]}, headers=headers)
    )
    assert videos.post(VIDEOS, json={**VIDEO, "user": None}, headers=headers).json()["id"] == video["id"]


def test_a_form_and_json_may_be_the_same_request(videos: httpx.Client) -> None:
    headers = key()
    video = videos.post(VIDEOS, json={**VIDEO, "extra_body": {"fps": 8}}, headers=headers).json()
    form = {name: (None, str(value)) for name, value in {**VIDEO, "fps": 8}.items()}
    assert videos.post(VIDEOS, files=form, headers=headers).json()["id"] == video["id"]


def test_the_image_is_part_of_the_request(videos: httpx.Client) -> None:
    def send(colour: str, headers: dict[str, str]) -> httpx.Response:
        file = io.BytesIO()
        Image.new("RGB", (32, 16), colour).save(file, "PNG")
        form = {name: (None, str(value)) for name, value in {**VIDEO, "model": IMAGE_TO_VIDEO}.items()}
        form["input_reference"] = (f"{colour}.png", file.getvalue())  # type: ignore[assignment]
        return videos.post(VIDEOS, files=form, headers=headers)

    headers = key()
    video = send("red", headers).json()
    assert send("red", headers).json()["id"] == video["id"]
    assert_conflict(send("blue", headers))


def test_a_remix_with_a_key(videos: httpx.Client) -> None:
    """Found again also when its source was deleted since."""
    source = wait_completed(videos, videos.post(VIDEOS, json=VIDEO).json()["id"])
    headers, url = key(), f"{VIDEOS}/{source['id']}/remix"
    remix = videos.post(url, json={"prompt": "a cat"}, headers=headers).json()
    assert videos.post(url, json={"prompt": "a cat"}, headers=headers).json()["id"] == remix["id"]
    assert_conflict(videos.post(url, json={"prompt": "a dog"}, headers=headers))
    wait_completed(videos, remix["id"])
    videos.delete(f"{VIDEOS}/{source['id']}")
    assert videos.post(url, json={"prompt": "a cat"}, headers=headers).json()["id"] == remix["id"]


def test_a_key_is_free_again_when_its_video_was_deleted(videos: httpx.Client) -> None:
    headers = key()
    first = videos.post(VIDEOS, json=VIDEO, headers=headers).json()
    videos.delete(f"{VIDEOS}/{first['id']}")
    second = videos.post(VIDEOS, json={**VIDEO, "prompt": "a cat"}, headers=headers).json()
    assert second["id"] != first["id"]


def test_a_refused_request_does_not_use_its_key(videos: httpx.Client) -> None:
    headers = key()
    assert videos.post(VIDEOS, json={**VIDEO, "fps": 0}, headers=headers).status_code == 400
    assert videos.post(VIDEOS, json=VIDEO, headers=headers).status_code == 200


@pytest.mark.parametrize("bad", [[""], ["a b"], ["x" * 256], ["a", "b"]])
def test_bad_keys(videos: httpx.Client, bad: list[str]) -> None:
    headers = [("idempotency-key", each) for each in bad]
    for url, body in ((VIDEOS, VIDEO), (GENERATIONS, {"prompt": PROMPT})):
        answer = videos.post(url, json=body, headers=headers)
        assert refusal(answer) == (400, "Idempotency-Key", "invalid_value")


def test_the_key_of_a_video_outlives_the_adapter(start_video_adapter: StartAdapter) -> None:
    """And is one caller's alone."""
    headers, keys = key(), ("--api-keys", "one,two")
    one, two = ({"authorization": f"Bearer {each}"} for each in ("one", "two"))
    adapter = start_video_adapter(*keys)
    with httpx.Client(base_url=adapter.url, timeout=60) as http:
        first = http.post(VIDEOS, json=VIDEO, headers=headers | one).json()
    adapter.stop()
    adapter = start_video_adapter(*keys)
    with httpx.Client(base_url=adapter.url, timeout=60) as http:
        again = http.post(VIDEOS, json=VIDEO, headers=headers | one).json()
        assert (again["id"], again["seed"]) == (first["id"], first["seed"])
        other = http.post(VIDEOS, json={**VIDEO, "prompt": "a cat"}, headers=headers | two)
        assert other.json()["id"] != first["id"]
        assert_conflict(http.post(VIDEOS, json={**VIDEO, "prompt": "a dog"}, headers=headers | two))


def pixels(b64: str) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(b64)))).astype(int)


def assert_pictures(answer: dict[str, Any], http: httpx.Client) -> None:
    """They are what the same request makes without a key, up to rounding."""
    body = {**IMAGE, "seed": answer["seed"], "n": len(answer["data"])}
    expected = http.post(GENERATIONS, json=body).json()
    for one, other in zip(answer["data"], expected["data"], strict=True):
        assert np.abs(pixels(one["b64_json"]) - pixels(other["b64_json"])).max() <= 1


def test_one_generation_of_many_requests(images: httpx.Client, server: RunningServer) -> None:
    """The seed is drawn once; answers are the same to the byte."""
    headers, body, before = key(), {**IMAGE, "n": 2}, runs(server)
    answers = at_once(images, GENERATIONS, body, headers)
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    time.sleep(1.1)  # "created" is that of the first
    assert images.post(GENERATIONS, json=body, headers=headers).content == answers[0].content
    assert runs(server) == before + 2
    assert_pictures(answers[0].json(), images)


def test_another_body_with_the_key_of_images(images: httpx.Client, server: RunningServer) -> None:
    headers = key()
    assert images.post(GENERATIONS, json=IMAGE, headers=headers).status_code == 200
    before = runs(server)
    for change in ({"prompt": "a cat"}, {"n": 2}, {"stream": True}, {"output_format": "webp"}):
        assert_conflict(images.post(GENERATIONS, json={**IMAGE, **change}, headers=headers))
    assert runs(server) == before
    same = {**IMAGE, "extra_body": {"num_inference_steps": 3}, "seed": None}
    assert images.post(GENERATIONS, json=same, headers=headers).status_code == 200


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    lines = answer.text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    for event in events:
        assert event.pop("created_at") > 1_700_000_000  # of the event, not of the picture
    return events


def test_a_stream_that_is_asked_for_again(images: httpx.Client, server: RunningServer) -> None:
    headers, before = key(), runs(server)
    body = {**IMAGE, "stream": True, "partial_images": 2, "num_inference_steps": 6}
    *previews, completed = events_of(images.post(GENERATIONS, json=body, headers=headers))
    assert [event["type"] for event in previews] == ["image_generation.partial_image"] * 2
    (again,) = events_of(images.post(GENERATIONS, json=body, headers=headers))
    assert again == completed
    assert again["type"] == "image_generation.completed"
    assert runs(server) == before + 1


def test_a_stream_of_several_that_is_asked_for_at_once(images: httpx.Client, server: RunningServer) -> None:
    headers, before = key(), runs(server)
    body = {**IMAGE, "stream": True, "n": 2}
    streams = [events_of(answer) for answer in at_once(images, GENERATIONS, body, headers)]
    ordered = [sorted(events, key=lambda event: int(event["index"])) for events in streams]
    assert [[event["index"] for event in events] for events in ordered] == [[0, 1]] * AT_ONCE
    assert all(events == ordered[0] for events in ordered)
    assert runs(server) == before + 2


def test_urls_that_are_asked_for_again(images: httpx.Client, server: RunningServer) -> None:
    headers, body, before = key(), {**IMAGE, "response_format": "url"}, runs(server)
    urls = [images.post(GENERATIONS, json=body, headers=headers).json()["data"][0]["url"] for _ in range(2)]
    files = {httpx.get(url).content for url in urls}
    assert len(files) == 1
    assert Image.open(io.BytesIO(files.pop())).format == "PNG"
    assert runs(server) == before + 1


@pytest.mark.parametrize("is_stream", [False, True])
def test_who_leaves_does_not_take_the_others_result(
    images: httpx.Client, server: RunningServer, is_stream: bool
) -> None:
    """One waits for it already, one comes later."""
    headers, body = key(), {**IMAGE, "num_inference_steps": 60, "seed": 9}
    if is_stream:
        body |= {"stream": True, "partial_images": 1}
    leaving = connect(server.adapter_url, body, headers)
    wait_for_rows(server, 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(images.post, GENERATIONS, json=body, headers=headers)
        time.sleep(0.5)
        assert not waiting.done()
        leaving.close()
        answers = [waiting.result(), images.post(GENERATIONS, json=body, headers=headers)]
    assert [answer.status_code for answer in answers] == [200, 200]
    expected = images.post(GENERATIONS, json={**IMAGE, "num_inference_steps": 60, "seed": 9}).json()["data"][
        0
    ]["b64_json"]
    for answer in answers:
        made = events_of(answer)[-1] if is_stream else answer.json()["data"][0]
        assert np.abs(pixels(made["b64_json"]) - pixels(expected)).max() <= 1


def test_a_failure_is_not_kept(start_adapter: StartAdapter, server: RunningServer) -> None:
    """Neither by the same adapter nor by one that is started anew."""
    headers, body = key(), {**IMAGE, "num_inference_steps": 80}
    adapter = start_adapter(*flags_for(server), "--request-timeout-seconds", "0.5")
    adapter.wait("/health")
    before = runs(server)
    for number in (1, 2):
        answer = httpx.post(adapter.url + GENERATIONS, json=body, headers=headers, timeout=60)
        assert refusal(answer) == (504, None, "timeout")
        triton_metrics.wait_until_idle(server.metrics_url, 10)
        assert runs(server) == before + number
    assert adapter.stop() == 0
    adapter = start_adapter(*flags_for(server))
    adapter.wait("/health")
    answer = httpx.post(adapter.url + GENERATIONS, json=body, headers=headers, timeout=60)
    assert answer.status_code == 200
    assert adapter.stop() == 0
    adapter = start_adapter(*flags_for(server))
    adapter.wait("/health")
    made = runs(server)
    again = httpx.post(adapter.url + GENERATIONS, json=body, headers=headers, timeout=60)
    assert again.content == answer.content
    assert runs(server) == made
    assert not httpx.get(f"{adapter.url}{VIDEOS}").json()["data"], "these are no videos"


def test_a_refused_generation_does_not_use_its_key(images: httpx.Client) -> None:
    headers = key()
    assert images.post(GENERATIONS, json={**IMAGE, "size": "1x1"}, headers=headers).status_code == 400
    assert images.post(GENERATIONS, json=IMAGE, headers=headers).status_code == 200


def test_videos_and_images_have_keys_of_their_own(videos: httpx.Client) -> None:
    headers = key()
    video = videos.post(VIDEOS, json=VIDEO, headers=headers).json()
    answer = videos.post(GENERATIONS, json={"prompt": PROMPT, "model": TEXT_TO_VIDEO}, headers=headers)
    assert refusal(answer)[:2] == (400, "model")
    wait_completed(videos, video["id"])
    assert content(videos, video["id"])
