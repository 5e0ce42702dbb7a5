"""Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html

Bytes on the way: ``event: <name>``, ``data: <one line of JSON>``, an empty line. A comment keeps proxies from taking
silence for death. The end of the response is the end of the stream: OpenAI's image streams have no ``[DONE]``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from openai_adapter.disconnects import while_connected
from openai_adapter.errors import explain

KEEP_ALIVE_SECONDS = 15.0
KEEP_ALIVE = b": keep-alive\n\n"
# Proxies would keep events back: nginx heeds the second.
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def encode_event(name: str, data: Mapping[str, Any]) -> bytes:
    """One event. JSON escapes line ends, so ``data`` takes one line."""
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


class EventStream(StreamingResponse):
    """Answers with ``events`` as they come, and closes them where the client leaves first.

    Nothing is sent before the first event, or the first keep-alive. An error until then is raised, to be answered
    as any other request's; a later one is an ``error`` event, with the same envelope, and the end of the stream.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._chunks = with_keep_alives(events, KEEP_ALIVE_SECONDS)
        self._is_started = False
        super().__init__(self._chunks, headers=_HEADERS, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(Request(scope, receive), self.stream_response(send))
        except (Exception, asyncio.CancelledError) as error:
            if not self._is_started:
                raise
            event = encode_event("error", explain(error, scope["state"]["request_id"]).to_envelope())
            await send({"type": "http.response.body", "body": event})

    async def stream_response(self, send: Send) -> None:
        """Send all events, each when it comes."""
        async with aclosing(self._chunks):
            async for chunk in self._chunks:
                if not self._is_started:
                    self._is_started = True
                    await send(
                        {
                            "type": "http.response.start",
                            "status": self.status_code,
                            "headers": self.raw_headers,
                        }
                    )
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body"})


async def with_keep_alives(
    events: AsyncGenerator[bytes, None], seconds: float
) -> AsyncGenerator[bytes, None]:
    """``events``, and a comment whenever none came for so many seconds. Closing this closes ``events``."""
    upcoming = asyncio.create_task(_next(events))
    try:
        while True:
            await asyncio.wait({upcoming}, timeout=seconds)
            if not upcoming.done():
                yield KEEP_ALIVE
            elif (event := upcoming.result()) is not None:
                upcoming = asyncio.create_task(_next(events))
                yield event
            else:
                return
    finally:
        upcoming.cancel()
        await asyncio.gather(upcoming, return_exceptions=True)
        await events.aclose()


async def _next(events: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(events, None)
