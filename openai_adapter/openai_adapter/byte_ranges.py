"""Stored bytes as HTTP serves them: whole or in part, again only if they changed (RFC 9110).

Starlette's ``FileResponse`` serves files of this machine alone, and no part of it can be used by itself.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from openai_adapter.errors import ApiError

# From ``start`` until before ``end``; None where the file is gone.
Reader = Callable[[int, int], bytes | None]

CHUNK_BYTES = 2**20

# RFC 9110, 14.1.2. A position of more digits is no position in any file of ours.
_RANGE = re.compile(r"bytes=\s*(?P<first>[0-9]{0,18})-(?P<last>[0-9]{0,18})\s*", re.IGNORECASE)
_ETAGS = re.compile(r'(?P<weak>W/)?(?P<tag>"[^"]*")')


async def serve_bytes(
    request: Request,
    read: Reader,
    *,
    size: int,
    media_type: str,
    etag: str,
    filename: str,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """The answer to a GET or HEAD for ``size`` bytes, with status 200, 206 or 304.

    ``read`` blocks, is called in a worker thread, and never for more than ``CHUNK_BYTES``. ``etag`` is a strong one
    with its quotes: the same one always means the same bytes. ``filename`` is our own word for the file, in plain
    ASCII; never a client's. ``headers`` are added.

    A request for several ranges gets the whole, which RFC 9110 (14.2) allows: players ask for one.

    Raises:
        ApiError: 404 where the file is gone, 412 for an ``If-Match`` of other bytes, 416 for a range that lies beyond
            the end.
    """
    common = {
        **(headers or {}),
        "Accept-Ranges": "bytes",
        "ETag": etag,
        "Content-Disposition": f'inline; filename="{filename}"',
        "X-Content-Type-Options": "nosniff",
    }
    if _is_unmodified(request, etag):
        return Response(status_code=304, headers=common)
    part = _find_part(request, size, etag)
    start, end = part or (0, size)
    common["Content-Length"] = str(end - start)
    if part is not None:
        common["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    is_head = request.method == "HEAD"
    # Nothing is sent before there is something to send: afterwards it would be too late for a 404.
    first = await asyncio.to_thread(read, start, min(end, start + (1 if is_head else CHUNK_BYTES)))
    if first is None:
        raise ApiError(404, "the file is gone", code="not_found")
    if is_head:
        return Response(headers=common, media_type=media_type)
    status = 200 if part is None else 206
    return StreamingResponse(_stream(read, first, start, end), status, common, media_type)


async def _stream(read: Reader, first: bytes, start: int, end: int) -> AsyncIterator[bytes]:
    chunk: bytes | None = first
    while chunk:
        yield chunk
        start += len(chunk)
        if start >= end:
            return
        chunk = await asyncio.to_thread(read, start, min(end, start + CHUNK_BYTES))
    if start < end:
        # The client must not take a part for the whole: this closes the connection before its length is reached.
        raise EOFError(f"a file ended at {start} instead of {end} while it was sent")


def _is_unmodified(request: Request, etag: str) -> bool:
    """What the preconditions say (RFC 9110, 13.2.2); we have no modification dates."""
    match = _header(request, "if-match")
    if match is not None and match != "*" and etag not in _tags(match, weak=False):
        raise ApiError(412, f"'if-match' names other bytes than {etag}", code="precondition_failed")
    none_match = _header(request, "if-none-match")
    return none_match is not None and (none_match == "*" or etag in _tags(none_match, weak=True))


def _find_part(request: Request, size: int, etag: str) -> tuple[int, int] | None:
    """Start and end of the one range that is asked for, or None for the whole."""
    text = request.headers.get("range", "")
    match = _RANGE.fullmatch(text)
    if request.method != "GET" or match is None or len(request.headers.getlist("range")) > 1:
        return None
    if request.headers.get("if-range", etag).strip() != etag:  # a date or a weak tag never holds
        return None
    first, last = match["first"], match["last"]
    if not (first or last) or (first and last and int(last) < int(first)):
        return None  # not a range at all
    if first:
        start, end = int(first), min(int(last) + 1, size) if last else size
    else:
        start, end = max(0, size - int(last)), size
    if start >= end:
        headers = {"Content-Range": f"bytes */{size}", "Accept-Ranges": "bytes"}
        message = f"'range' is {text.strip()!r}, of a file of {size} bytes; allowed: ranges that start in it"
        raise ApiError(416, message, code="range_not_satisfiable", headers=headers)
    return start, end


def _header(request: Request, name: str) -> str | None:
    lines = request.headers.getlist(name)
    return ", ".join(lines).strip() if lines else None


def _tags(text: str, *, weak: bool) -> set[str]:
    """The tags in a list; weak ones count only for the weak comparison (RFC 9110, 8.8.3.2)."""
    return {match["tag"] for match in _ETAGS.finditer(text) if weak or not match["weak"]}
