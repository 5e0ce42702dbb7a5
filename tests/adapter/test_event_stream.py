"""How events are sent, in this process: silence, errors early and late, and who closes what."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

import httpx
import pytest
from diffusion_backend.errors import DiffusionError, Status, invalid
from fastapi import FastAPI
from in_process import send
from openai_adapter.errors import ApiError
from openai_adapter.event_stream import KEEP_ALIVE, EventStream, encode_event, with_keep_alives
from starlette.types import Message, Scope

from openai_adapter import event_stream

SCOPE: Scope = {"type": "http", "state": {"request_id": "mine"}}
Step = float | bytes | BaseException


class Events:
    """Events that come, fail or keep silent for so many seconds, as told."""

    def __init__(self, *steps: Step) -> None:
        self.steps = steps
        self.is_closed = False

    async def __call__(self) -> AsyncGenerator[bytes, None]:
        try:
            for step in self.steps:
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif isinstance(step, bytes):
                    yield step
                else:
                    raise step
        finally:
            self.is_closed = True


def answer(app: FastAPI, events: Events) -> httpx.Response:
    @app.post("/events")
    async def stream() -> EventStream:
        return EventStream(events())

    return send(app, "POST", "/events")


def test_an_event_takes_one_line() -> None:
    event = encode_event("name", {"text": "a\r\nb\u2028ключ"})
    name, data, *end = event.decode().split("\n")
    assert (name, end) == ("event: name", ["", ""])
    assert json.loads(data.removeprefix("data: ")) == {"text": "a\r\nb\u2028ключ"}


def test_events_come_as_they_are(app: FastAPI) -> None:
    events = Events(b"one", b"two")
    response = answer(app, events)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"]
    assert "content-length" not in response.headers
    assert response.content == b"onetwo"
    assert events.is_closed


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ApiError(504, "late", code="timeout"), 504, "timeout"),
        (invalid("seed", "'seed' is -1"), 400, "invalid_value"),
        (DiffusionError("gone", status=Status.UNAVAILABLE), 503, "service_unavailable"),
        (RuntimeError("/secret"), 500, "server_error"),
    ],
)
def test_an_error_is_an_answer_before_the_first_event_and_an_event_after_it(
    app: FastAPI, error: Exception, status: int, code: str
) -> None:
    early = answer(app, Events(error))
    assert (early.status_code, early.json()["error"]["code"]) == (status, code)
    app.router.routes.pop()
    late = answer(app, Events(b"one", error))
    assert late.status_code == 200
    first, name, data, *end = late.text.replace("one", "one\n", 1).split("\n")
    assert (first, name, end) == ("one", "event: error", ["", ""])
    assert json.loads(data.removeprefix("data: ")) == early.json()
    assert "secret" not in late.text


def test_silence_is_filled_and_starts_the_answer(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_SECONDS", 0.05)
    response = answer(app, Events(0.5, ApiError(503, "busy", code="queue_full")))
    assert response.status_code == 200
    assert response.content.startswith(KEEP_ALIVE + KEEP_ALIVE)
    assert response.content.replace(KEEP_ALIVE, b"").startswith(b"event: error\n")


def test_keep_alives_fall_only_in_silence() -> None:
    async def run() -> list[bytes]:
        events = Events(b"one", 0.01, b"two", 1.0, b"three")
        return [chunk async for chunk in with_keep_alives(events(), 0.4)]

    one, two, *silence, three = asyncio.run(run())
    assert (one, two, three) == (b"one", b"two", b"three")
    assert set(silence) == {KEEP_ALIVE}


@pytest.mark.parametrize("is_slow", [False, True], ids=["reading", "not reading"])
def test_who_leaves_closes_the_events(is_slow: bool) -> None:
    """At once, also while the server waits for the next event, or for the client to read."""
    events = Events(b"one", 100.0, b"two")
    sent: list[Message] = []

    async def run() -> None:
        first = asyncio.Event()

        async def receive() -> Message:
            await first.wait()
            return {"type": "http.disconnect"}

        async def note(message: Message) -> None:
            sent.append(message)
            if message.get("body") == b"one":
                first.set()
                if is_slow:
                    await asyncio.sleep(100)

        async with asyncio.timeout(2):
            await EventStream(events())(SCOPE, receive, note)
            while not events.is_closed:
                await asyncio.sleep(0.01)

    asyncio.run(run())
    assert [message.get("body") for message in sent[:2]] == [None, b"one"]


def test_a_shutdown_is_told() -> None:
    events = Events(b"one", 100.0)
    sent: list[Message] = []

    async def run() -> None:
        async def receive() -> Message:
            await asyncio.sleep(100)
            raise AssertionError

        async def note(message: Message) -> None:
            sent.append(message)

        serving = asyncio.create_task(EventStream(events())(SCOPE, receive, note))
        await asyncio.sleep(0.05)
        serving.cancel()
        await serving
        while not events.is_closed:
            await asyncio.sleep(0.01)

    asyncio.run(run())
    assert sent[-1]["body"].startswith(
        b'event: error\ndata: {"error":{"message":"the server is shutting down"'
    )
    assert not sent[-1].get("more_body", False)
