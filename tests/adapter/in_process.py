"""Requests to an app in the test's own process."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from fastapi import FastAPI


def send(
    app: FastAPI, method: str, path: str, client: tuple[str, int] = ("127.0.0.1", 1), **request: Any
) -> httpx.Response:
    """One request to an app in this process, without its lifespan: it has not reached Triton."""

    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=client)
        async with httpx.AsyncClient(transport=transport, base_url="http://adapter.test") as http:
            return await http.request(method, path, **request)

    return asyncio.run(answer())
