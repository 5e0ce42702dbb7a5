"""Images as streams: through OpenAI's own clients, and byte by byte, against the running server."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import openai
import pytest
from adapter_process import AdapterProcess
from diffusion_backend.client import AsyncDiffusionClient
from openai.types import (
    ImageGenCompletedEvent,
    ImageGenPartialImageEvent,
    ImageGenStreamEvent,
)
from openai_adapter.image_generation import ImageGenerator, Picture
from openai_adapter.image_inputs import Inputs
from openai_adapter.image_request import ImageRequest
from openai_adapter.metrics import Metrics
from openai_adapter.recovery import Recovery
from openai_adapter.registry import Model, Registry
from openai_adapter.triton import Triton
from PIL import Image
from test_registry import LIMITS

from openai_adapter import Settings, image_request
from tests import triton_metrics
from tests.running_server import RunningServer

MODEL = "emoji-flux"
PROMPT = "a fox on a blue background"
LONG = 200  # steps: several seconds
PLACES = 64  # max_queued_requests
GENERATIONS = "/v1/images/generations"


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.adapter_url}/v1", api_key="none", max_retries=0)


def stream(client: openai.OpenAI, extra: dict[str, Any] | None = None, **fields: Any) -> list[Any]:
    return list(client.images.generate(prompt=PROMPT, stream=True, extra_body=extra, **fields))


def image_of(event: Any) -> Image.Image:
    image = Image.open(io.BytesIO(base64.b64decode(event.b64_json)))
    image.load()
    return image


def pixels_of(event: Any) -> npt.NDArray[np.int16]:
    return np.asarray(image_of(event).convert("RGB")).astype(np.int16)


def flags_for(server: RunningServer) -> tuple[str, ...]:
    return (
        f"--triton-url={server.grpc_url}",
        f"--triton-admin-key={server.admin_key}",
    )  # it may begin with "-"


def cancelled(server: RunningServer) -> float:
    return triton_metrics.read(server.metrics_url, "requests_total", outcome="cancelled")


def connect(url: str, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> socket.socket:
    """A raw connection that has sent a request."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    data = json.dumps(body).encode()
    head = f"POST {GENERATIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def read_until(connection: socket.socket, end: bytes) -> bytes:
    data = b""
    while end not in data:
        received = connection.recv(65536)
        assert received, data
        data += received
    return data


def test_previews_then_the_image(client: openai.OpenAI) -> None:
    *partials, completed = stream(client, {"seed": 3}, partial_images=3, size="128x64")
    assert [type(event) for event in partials] == [ImageGenPartialImageEvent] * 3
    assert isinstance(completed, ImageGenCompletedEvent)
    assert [event.partial_image_index for event in partials] == [0, 1, 2]
    for event in (*partials, completed):
        image = image_of(event)
        assert (image.format, image.size) == ("PNG", (128, 64))
        assert (event.size, event.quality, event.output_format) == ("128x64", "auto", "png")
        assert event.background == "opaque"
        assert event.created_at > 1_700_000_000
        extra = event.model_extra
        assert (extra["model"], extra["index"], extra["seed"]) == (MODEL, 0, 3)
        assert extra["decode_path"] == "lossless"
        assert set(extra["timings"]) == {"encode_seconds", "denoise_seconds", "decode_seconds"}
    assert [event.model_extra["step"] for event in partials] == [5, 10, 15]
    assert completed.usage.total_tokens == completed.usage.input_tokens_details.text_tokens == 0
    distances = [np.abs(pixels_of(event) - pixels_of(completed)).mean() for event in partials]
    assert distances == sorted(distances, reverse=True)


def test_previews_do_not_change_the_image(client: openai.OpenAI) -> None:
    alone = client.images.generate(prompt=PROMPT, extra_body={"seed": 3})
    assert alone.data is not None
    assert stream(client, {"seed": 3}, partial_images=2)[-1].b64_json == alone.data[0].b64_json


@pytest.mark.parametrize("fields", [{}, {"partial_images": 0}])
def test_a_stream_without_previews(client: openai.OpenAI, fields: dict[str, int]) -> None:
    (completed,) = stream(client, {"safety_identifier": "ключ"}, n=1, **fields)
    assert completed.type == "image_generation.completed"
    assert completed.safety_identifier == "ключ"


def test_fewer_steps_than_previews(client: openai.OpenAI) -> None:
    events = stream(client, {"num_inference_steps": 2}, partial_images=3)
    assert [event.type.rpartition(".")[2] for event in events] == ["partial_image", "completed"]


def test_the_async_client(server: RunningServer) -> None:
    async def run() -> list[ImageGenStreamEvent]:
        async with openai.AsyncOpenAI(base_url=f"{server.adapter_url}/v1", api_key="none") as client:
            events = await client.images.generate(prompt=PROMPT, stream=True, partial_images=2)
            return [event async for event in events]

    events = asyncio.run(run())
    assert [event.type.rpartition(".")[2] for event in events] == ["partial_image"] * 2 + ["completed"]


def test_several_images_are_mixed_and_told_apart(client: openai.OpenAI) -> None:
    events = stream(client, {"seed": 40}, partial_images=3, n=3)
    for index in range(3):
        own = [event for event in events if event.model_extra["index"] == index]
        assert {event.model_extra["seed"] for event in own} == {40 + index}
        assert [event.partial_image_index for event in own[:-1]] == [0, 1, 2]
        assert own[-1].type == "image_generation.completed"
    assert {event.model_extra["index"] for event in events[:3]} == {0, 1, 2}, "one image at a time"


@pytest.mark.parametrize("output_format", ["jpeg", "webp"])
def test_previews_have_the_format_of_the_image(client: openai.OpenAI, output_format: Any) -> None:
    events = stream(client, partial_images=2, output_format=output_format, output_compression=70)
    assert [image_of(event).format for event in events] == [output_format.upper()] * 3
    assert {event.output_format for event in events} == {output_format}


def test_the_very_bytes(server: RunningServer) -> None:
    body = {"prompt": PROMPT, "stream": True, "partial_images": 1, "num_inference_steps": 4}
    with connect(server.adapter_url, body) as connection:
        answer = read_until(connection, b"\r\n0\r\n\r\n")
    head, _, chunks = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert status == "http/1.1 200 ok"
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["transfer-encoding"] == "chunked"
    assert headers["x-request-id"]
    events = []
    while chunks != b"0\r\n\r\n":
        size, _, chunks = chunks.partition(b"\r\n")
        events.append(chunks[: int(size, 16)])
        assert chunks[int(size, 16) :].startswith(b"\r\n")
        chunks = chunks[int(size, 16) + 2 :]
    kinds = ["image_generation.partial_image", "image_generation.completed"]
    for event, kind in zip(events, kinds, strict=True):
        name, data, *end = event.split(b"\n")
        assert (name, end) == (f"event: {kind}".encode(), [b"", b""])
        assert json.loads(data.removeprefix(b"data: "))["type"] == kind


def test_who_closes_a_stream_cancels_all_of_its_images(client: openai.OpenAI, server: RunningServer) -> None:
    before = cancelled(server)
    with client.images.generate(
        prompt=PROMPT, stream=True, partial_images=3, n=3, extra_body={"num_inference_steps": LONG}
    ) as events:
        assert next(events).type == "image_generation.partial_image"
        wait_for_rows(server, 3)
    triton_metrics.wait_until_idle(server.metrics_url, 10)
    assert cancelled(server) == before + 3


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_connection_that_closes_cancels(server: RunningServer, is_stream: bool) -> None:
    """Before anything was answered."""
    before = cancelled(server)
    body = {"prompt": PROMPT, "n": 2, "num_inference_steps": LONG, "stream": is_stream}
    connection = connect(server.adapter_url, body)
    wait_for_rows(server, 2)
    connection.close()
    triton_metrics.wait_until_idle(server.metrics_url, 10)
    assert cancelled(server) == before + 2


def wait_for_rows(server: RunningServer, rows: int) -> None:
    for _ in range(500):
        if triton_metrics.read(server.metrics_url, "running_rows") == rows:
            return
    pytest.fail(f"there were never {rows} rows")


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_sibling_that_is_refused_cancels_the_others(server: RunningServer, is_stream: bool) -> None:
    """All places but one are taken, so that one image of two is refused: a 503 before the first event."""
    body = {"prompt": PROMPT, "n": 2, "num_inference_steps": LONG, "stream": is_stream}

    async def run() -> httpx.Response:
        async with AsyncDiffusionClient(server.grpc_url) as triton, httpx.AsyncClient() as http:
            others = crowd(triton, PLACES - 1)
            while triton_metrics.read(server.metrics_url, "running_rows") < PLACES - 1:
                await asyncio.sleep(0.02)
            answer = await http.post(server.adapter_url + GENERATIONS, json=body, timeout=60)
            while triton_metrics.read(server.metrics_url, "running_rows") > PLACES - 1:
                await asyncio.sleep(0.02)
            await disperse(others)
            return answer

    before = cancelled(server)
    answer = asyncio.run(run())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_full")
    assert answer.headers["retry-after"]
    assert "x-should-retry" not in answer.headers
    wait_until_cancelled(server, before + PLACES)


def test_too_many_images_are_refused_before_anything_is_made(
    start_adapter: Callable[..., AdapterProcess], server: RunningServer
) -> None:
    """All of a request or none; and the places are free again when others end."""
    adapter = start_adapter(*flags_for(server), "--max-images-in-flight", "10")
    adapter.wait("/health")
    url = adapter.url + GENERATIONS
    long = {"prompt": PROMPT, "n": 8, "num_inference_steps": LONG}

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=60) as http:
            others = asyncio.create_task(http.post(url, json=long))
            while triton_metrics.read(server.metrics_url, "running_rows") < 8:
                await asyncio.sleep(0.02)
            answers = [
                await http.post(url, json={"prompt": PROMPT, "n": n, "num_inference_steps": 2})
                for n in (3, 2)
            ]
            others.cancel()
            await asyncio.wait({others})
            while triton_metrics.read(server.metrics_url, "running_rows"):
                await asyncio.sleep(0.02)
            return [
                *answers,
                await http.post(url, json={"prompt": PROMPT, "n": 10, "num_inference_steps": 2}),
            ]

    refused, fits, later = asyncio.run(run())
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
    assert refused.headers["retry-after"]
    assert "x-should-retry" not in refused.headers
    assert (fits.status_code, later.status_code) == (200, 200)
    assert len(later.json()["data"]) == 10


def test_a_deadline_that_passes_after_the_first_event(
    start_adapter: Callable[..., AdapterProcess], server: RunningServer
) -> None:
    """The SDK raises what an ``error`` event says."""
    adapter = start_adapter(*flags_for(server), "--request-timeout-seconds", "10")
    adapter.wait("/health")

    async def run() -> openai.APIError:
        base_url = f"{adapter.url}/v1"
        async with (
            AsyncDiffusionClient(server.grpc_url) as triton,
            openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client,
        ):
            events = await client.images.generate(
                prompt=PROMPT, stream=True, partial_images=3, n=2, extra_body={"num_inference_steps": LONG}
            )
            assert (await anext(events)).type == "image_generation.partial_image"
            others = crowd(triton, PLACES - 2)
            with pytest.raises(openai.APIError, match="were not done within 10 seconds") as caught:
                async for _ in events:
                    pass
            await asyncio.to_thread(wait_until_cancelled, server, before + 2)
            await disperse(others)
            return caught.value

    before = cancelled(server)
    error = asyncio.run(run())
    assert error.code == "timeout"
    assert isinstance(error.body, dict)
    assert set(error.body) == {"message", "type", "param", "code"}
    # Those of the crowd that were in encode yet are cancelled when they come to denoise.
    wait_until_cancelled(server, before + PLACES, seconds=30)


def wait_until_cancelled(server: RunningServer, count: float, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while cancelled(server) < count:
        assert time.monotonic() < deadline, f"{cancelled(server)} are cancelled, not {count}"
        time.sleep(0.02)


def crowd(triton: AsyncDiffusionClient, count: int) -> list[asyncio.Task[Any]]:
    """Requests of others, which take long."""
    return [
        asyncio.create_task(triton.generate(MODEL, PROMPT, num_inference_steps=LONG)) for _ in range(count)
    ]


async def disperse(others: list[asyncio.Task[Any]]) -> None:
    assert not any(other.done() for other in others)
    for other in others:
        other.cancel()
    await asyncio.wait(others)


def test_a_stream_that_outlasts_the_shutdown_is_told(
    start_adapter: Callable[..., AdapterProcess], server: RunningServer
) -> None:
    adapter = start_adapter(*flags_for(server), "--shutdown-seconds", "0")
    adapter.wait("/health")
    client = openai.OpenAI(base_url=f"{adapter.url}/v1", api_key="none", max_retries=0)
    events = client.images.generate(
        prompt=PROMPT, stream=True, partial_images=3, n=2, extra_body={"num_inference_steps": LONG}
    )
    next(events)
    adapter.process.terminate()
    with pytest.raises(openai.APIError, match="shutting down"):
        list(events)
    assert adapter.process.wait(60) == 0
    triton_metrics.wait_until_idle(server.metrics_url, 10)


def test_a_second_attempt_repeats_no_preview(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is thought dead after the first preview; what it made goes on, beside what is made once more."""
    registry = Registry()
    registry.models = {MODEL: Model(MODEL, LIMITS, ready=True, stages={f"{MODEL}_denoise": None})}
    metrics = Metrics()
    triton = Triton(Settings(), registry)
    monkeypatch.setattr(triton, "is_proven", lambda _name, _moment: True)
    request = image_request.parse(
        ImageRequest, {"prompt": PROMPT, "stream": True, "partial_images": 3, "num_inference_steps": 80}
    )
    started = triton_metrics.read(server.metrics_url, "requests_total")

    async def run() -> list[Picture]:
        seen = []
        async with AsyncDiffusionClient(server.grpc_url) as triton.client:
            generator = ImageGenerator(triton, Recovery(triton, registry, metrics), metrics, Settings())
            plan = image_request.plan(request, LIMITS)
            async for picture in generator.stream(MODEL, plan, request, Inputs()):
                if not seen:
                    registry.report_loss(f"{MODEL}_denoise")
                seen.append(picture)
        return seen

    pictures = asyncio.run(run())
    assert [picture.preview for picture in pictures] == [0, 1, 2, None]
    assert [picture.info["step"] for picture in pictures] == [20, 40, 60, 80]
    triton_metrics.wait_until_idle(server.metrics_url, 10)
    assert triton_metrics.read(server.metrics_url, "requests_total") == started + 2


def adapter_metric(url: str, series: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.removeprefix(series)) for line in lines if line.startswith(series))


def test_previews_are_counted(client: openai.OpenAI, server: RunningServer) -> None:
    series = f'openai_adapter_previews_total{{model="{MODEL}"}}'
    before = adapter_metric(server.adapter_url, series)
    stream(client, partial_images=2, n=2)
    assert adapter_metric(server.adapter_url, series) == before + 4


def test_the_card_says_that_there_are_previews(client: openai.OpenAI) -> None:
    card = client.models.retrieve(MODEL).model_dump()
    assert card["previews"] == {"max_partial_images": 3, "reason": None}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"partial_images": 4}, "partial_images"),
        ({"response_format": "url"}, "response_format"),
        ({"size": "65x64"}, "size"),
        ({"extra_body": {"seed": -1}}, "seed"),
    ],
)
def test_a_stream_is_refused_as_any_request_is(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(prompt=PROMPT, stream=True, **fields)
    assert caught.value.param == param
