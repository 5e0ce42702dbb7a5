from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import httpx
import pytest
from fastapi import FastAPI
from in_process import send
from openai_adapter.byte_ranges import CHUNK_BYTES, serve_bytes
from starlette.requests import Request
from starlette.responses import Response

from openai_adapter import byte_ranges, errors

DATA = bytes(range(100))
ETAG = '"video_1.video"'


class Store:
    """One file, whose reads are noted."""

    def __init__(self, data: bytes | None) -> None:
        self.data = data
        self.reads: list[tuple[int, int]] = []
        self.threads: set[int] = set()

    def read(self, start: int, end: int) -> bytes | None:
        self.reads.append((start, end))
        self.threads.add(threading.get_ident())
        return None if self.data is None else self.data[start:end]


def serve(store: Store, size: int) -> FastAPI:
    app = FastAPI()
    errors.install(app)

    @app.head("/file")
    @app.get("/file")
    async def fetch(request: Request) -> Response:
        return await serve_bytes(
            request,
            store.read,
            size=size,
            media_type="video/mp4",
            etag=ETAG,
            filename="video_1.mp4",
            headers={"Cache-Control": "private"},
        )

    return app


Ask = Callable[..., httpx.Response]


@pytest.fixture
def ask() -> Ask:
    """Sends a request for a file of 100 bytes, with these headers."""

    def ask(*headers: tuple[str, str], method: str = "GET", data: bytes = DATA) -> httpx.Response:
        return send(serve(Store(data), len(data)), method, "/file", headers=list(headers))

    return ask


def assert_whole(answer: httpx.Response) -> None:
    assert answer.status_code == 200
    assert answer.content == DATA
    assert answer.headers["content-length"] == "100"
    assert "content-range" not in answer.headers


def test_whole(ask: Ask) -> None:
    answer = ask()
    assert_whole(answer)
    assert answer.headers["content-type"] == "video/mp4"
    assert answer.headers["accept-ranges"] == "bytes"
    assert answer.headers["etag"] == ETAG
    assert answer.headers["content-disposition"] == 'inline; filename="video_1.mp4"'
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "private"


@pytest.mark.parametrize("headers", [(), (("range", "bytes=10-19"),), (("range", "bytes=100-"),)])
def test_head_is_the_whole_without_a_body(ask: Ask, headers: tuple[tuple[str, str], ...]) -> None:
    """Ranges are defined for GET alone."""
    head, whole = ask(*headers, method="HEAD"), ask()
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers == whole.headers


@pytest.mark.parametrize(
    ("header", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=0-99", 0, 100),
        ("bytes=10-19", 10, 20),
        ("bytes=10-", 10, 100),
        ("bytes=0-", 0, 100),
        ("bytes=99-", 99, 100),
        ("bytes=90-1000", 90, 100),
        ("bytes=90-999999999999999999", 90, 100),
        ("bytes=-1", 99, 100),
        ("bytes=-100", 0, 100),
        ("bytes=-1000", 0, 100),
        ("Bytes=10-19", 10, 20),
        ("bytes= 10-19 ", 10, 20),
        ("bytes=0010-0019", 10, 20),
    ],
)
def test_one_range(ask: Ask, header: str, start: int, end: int) -> None:
    answer = ask(("range", header))
    assert answer.status_code == 206
    assert answer.content == DATA[start:end]
    assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/100"
    assert answer.headers["content-length"] == str(end - start)
    assert answer.headers["etag"] == ETAG
    assert answer.headers["content-type"] == "video/mp4"


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=100-200", "bytes=999999999999999999-", "bytes=-0"])
def test_ranges_beyond_the_end(ask: Ask, header: str) -> None:
    answer = ask(("range", header))
    assert answer.status_code == 416
    assert answer.headers["content-range"] == "bytes */100"
    error = answer.json()["error"]
    assert error["code"] == "range_not_satisfiable"
    assert header in error["message"]


@pytest.mark.parametrize(
    "header",
    [
        "",
        "bytes",
        "bytes=",
        "bytes=-",
        "bytes=a-b",
        "bytes=1",
        "bytes=20-10",
        "bytes=1-2-3",
        "bytes=--1",
        "bytes=+1-2",
        "bytes=1.0-2",
        "bytes=0x1-2",
        "bytes=1_0-20",
        f"bytes={'9' * 5000}-",
        "bytes=\xb2-3",
        "items=0-1",
        "bytes = 0-1",
    ],
)
def test_what_is_no_range_is_ignored(header: str) -> None:
    assert_whole(
        send(serve(Store(DATA), 100), "GET", "/file", headers=[(b"range", header.encode("latin-1"))])
    )


def test_several_ranges_get_the_whole(ask: Ask) -> None:
    assert_whole(ask(("range", "bytes=0-9,20-29")))
    assert_whole(ask(("range", "bytes=0-9, -5")))
    assert_whole(ask(("range", "bytes=200-,0-1")))
    assert_whole(ask(("range", "bytes=0-9"), ("range", "bytes=20-29")))


@pytest.mark.parametrize(
    ("tag", "is_part"),
    [
        (ETAG, True),
        (f" {ETAG} ", True),
        (f"W/{ETAG}", False),
        ('"other"', False),
        ("*", False),
        ("", False),
        ("Tue, 01 Dec 2026 00:00:00 GMT", False),
    ],
)
def test_if_range(ask: Ask, tag: str, is_part: bool) -> None:
    answer = ask(("range", "bytes=10-19"), ("if-range", tag))
    assert answer.status_code == (206 if is_part else 200)
    assert answer.content == (DATA[10:20] if is_part else DATA)
    beyond = ask(("range", "bytes=100-"), ("if-range", tag))
    assert beyond.status_code == (416 if is_part else 200)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("tags", [ETAG, f"W/{ETAG}", "*", f'"a", {ETAG}', f'"a,b",W/{ETAG} , "c"'])
def test_if_none_match(ask: Ask, tags: str, method: str) -> None:
    for answer in (
        ask(("if-none-match", tags), method=method),
        ask(("if-none-match", tags), ("range", "bytes=100-"), method=method),
        ask(("if-none-match", '"x"'), ("if-none-match", tags.replace("*", ETAG)), method=method),
    ):
        assert (answer.status_code, answer.content) == (304, b"")
        assert answer.headers["etag"] == ETAG
        assert answer.headers["cache-control"] == "private"
        assert "content-length" not in answer.headers
        assert "content-type" not in answer.headers


@pytest.mark.parametrize("tags", ["", '"other"', "video_1.video", '"video_1.vide"', f"{ETAG[:-1]}"])
def test_if_none_match_of_others(ask: Ask, tags: str) -> None:
    assert_whole(ask(("if-none-match", tags)))


@pytest.mark.parametrize(
    ("tags", "status"),
    [(ETAG, 200), ("*", 200), (f'"a", {ETAG}', 200), ('"a"', 412), (f"W/{ETAG}", 412)],
)
def test_if_match(ask: Ask, tags: str, status: int) -> None:
    answer = ask(("if-match", tags))
    assert answer.status_code == status
    if status == 412:
        assert answer.json()["error"]["code"] == "precondition_failed"


def test_an_empty_file(ask: Ask) -> None:
    answer = ask(data=b"")
    assert (answer.status_code, answer.content, answer.headers["content-length"]) == (200, b"", "0")
    assert ask(("range", "bytes=0-"), data=b"").status_code == 416


def test_large_files_are_read_in_pieces_in_other_threads() -> None:
    data = bytes(range(256)) * (10 * CHUNK_BYTES // 256) + b"end"
    store = Store(data)
    answer = send(serve(store, len(data)), "GET", "/file", headers={"range": "bytes=1-"})
    assert answer.content == data[1:]
    assert len(store.reads) == 11
    assert max(end - start for start, end in store.reads) == CHUNK_BYTES
    assert threading.get_ident() not in store.threads


def test_head_reads_one_byte() -> None:
    store = Store(DATA)
    assert send(serve(store, 100), "HEAD", "/file").headers["content-length"] == "100"
    assert store.reads == [(0, 1)]


def test_a_range_reads_no_more_than_it_sends() -> None:
    store = Store(bytes(10 * CHUNK_BYTES))
    send(serve(store, 10 * CHUNK_BYTES), "GET", "/file", headers={"range": "bytes=5000000-5000009"})
    assert store.reads == [(5_000_000, 5_000_010)]


def test_nothing_is_read_ahead_of_a_slow_client() -> None:
    store = Store(bytes(10 * CHUNK_BYTES))

    async def take_two() -> None:
        scope = {"type": "http", "method": "GET", "headers": []}
        answer = await serve_bytes(
            Request(scope), store.read, size=10 * CHUNK_BYTES, media_type="a/b", etag=ETAG, filename="a"
        )
        chunks = aiter(answer.body_iterator)  # type: ignore[attr-defined]
        await anext(chunks)
        await anext(chunks)

    asyncio.run(take_two())
    assert len(store.reads) == 2


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_file_that_is_gone(method: str) -> None:
    answer = send(serve(Store(None), 100), method, "/file")
    assert answer.status_code == 404
    if method == "GET":
        assert answer.json()["error"]["code"] == "not_found"


def test_a_file_that_ends_early_is_not_taken_for_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_ranges, "CHUNK_BYTES", 10)

    async def read_all() -> None:
        scope = {"type": "http", "method": "GET", "headers": []}
        answer = await serve_bytes(
            Request(scope), Store(DATA[:55]).read, size=100, media_type="a/b", etag=ETAG, filename="a"
        )
        async for chunk in answer.body_iterator:  # type: ignore[attr-defined]
            received.append(chunk)

    received: list[bytes] = []
    with pytest.raises(EOFError, match="55 instead of 100"):
        asyncio.run(read_all())
    assert b"".join(received) == DATA[:55]
