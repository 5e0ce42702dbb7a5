"""Generated files: a store on any fsspec file system, and the route that serves it.

A file's name cannot be guessed, and knowing it is the permission to fetch it. Its age is judged by the
store's own modification time, so every adapter that shares the store agrees on it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from dataclasses import dataclass

import fsspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from openai_adapter.errors import ApiError
from openai_adapter.image_files import CONTENT_TYPES
from openai_adapter.metrics import Metrics
from openai_adapter.whole_files import UNFINISHED, StoreError, put_whole

logger = logging.getLogger(__name__)

_NAME = re.compile(rf"[A-Za-z0-9_-]{{32}}\.({'|'.join(CONTENT_TYPES)})")


@dataclass(frozen=True)
class MediaFile:
    """A file as it is served. ``remaining`` are the seconds until it expires."""

    data: bytes
    content_type: str
    remaining: float


class MediaStore:
    """Files under ``url``, each for ``ttl`` seconds. All methods block: call them in a worker thread."""

    def __init__(self, url: str, ttl: float) -> None:
        self._fs, self._root = fsspec.url_to_fs(url)
        self.ttl = ttl

    def put(self, data: bytes, extension: str) -> str:
        """Store a file, all of it or nothing, and return its name."""
        name = f"{secrets.token_urlsafe(24)}.{extension}"
        self._fs.makedirs(self._root, exist_ok=True)
        put_whole(self._fs, self._path(name), data)
        return name

    def get(self, name: str) -> MediaFile | None:
        """The file, or None where there is none (any more).

        Raises:
            StoreError: the store cannot be read.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        path = self._path(name)
        try:
            remaining = self._remaining(path)
            if remaining <= 0:
                return None
            return MediaFile(self._fs.cat_file(path), CONTENT_TYPES[match[1]], remaining)
        except FileNotFoundError:  # never there, or swept meanwhile
            return None
        except OSError as error:
            raise StoreError(f"{name} cannot be read") from error

    def sweep(self) -> int:
        """Delete what has expired, files that were never finished included; returns how many."""
        self._fs.invalidate_cache()
        try:
            paths = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return 0
        return sum(self._delete_expired(path) for path in paths if self._is_ours(path))

    def _delete_expired(self, path: str) -> bool:
        try:
            if self._remaining(path) > 0:
                return False
            self._fs.rm_file(path)
        except FileNotFoundError:  # another adapter was faster
            return False
        return True

    def _remaining(self, path: str) -> float:
        return float(self._fs.modified(path).timestamp() + self.ttl - time.time())

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    @staticmethod
    def _is_ours(path: str) -> bool:
        return _NAME.fullmatch(path.rpartition("/")[2].removesuffix(UNFINISHED)) is not None


async def sweep_forever(store: MediaStore, metrics: Metrics) -> None:
    """Delete expired files every now and then, until cancelled."""
    while True:
        try:
            expired = await asyncio.to_thread(store.sweep)
            metrics.media_expired.inc(expired)
            logger.debug("%d media files expired", expired)
        except Exception:
            logger.exception("sweeping the media store failed")
        await asyncio.sleep(min(max(store.ttl / 10, 1), 60))


def routes(store: MediaStore) -> APIRouter:
    """The route that serves the store's files; open without a key."""
    router = APIRouter(tags=["media"])

    @router.head("/v1/media/{name}", include_in_schema=False)
    @router.get("/v1/media/{name}")
    async def fetch(request: Request, name: str) -> Response:
        """A generated file, until it expires."""
        file = await asyncio.to_thread(store.get, name)
        if file is None:
            raise ApiError(404, "there is no such file, or it has expired", code="not_found")
        headers = {
            "ETag": f'"{name}"',  # a name is never used for other content
            "Cache-Control": f"private, max-age={int(file.remaining)}, immutable",
            "X-Content-Type-Options": "nosniff",
        }
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(file.data, headers=headers, media_type=file.content_type)

    return router
