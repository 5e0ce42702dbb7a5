"""A client that is gone: its work is cancelled, so that its place in the batch is free for others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from openai_adapter.errors import CLIENT_CLOSED_REQUEST, ApiError

T = TypeVar("T")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns or raises. The body of ``request`` must have been read.

    Raises:
        ApiError: 499, the client has closed the connection; ``work`` was cancelled.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(CLIENT_CLOSED_REQUEST, "the client closed the connection", code="cancelled")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
