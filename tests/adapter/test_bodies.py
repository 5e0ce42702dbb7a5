"""Bodies of requests: JSON objects and forms, which are read strictly or refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from fastapi import FastAPI
from in_process import send
from openai_adapter.bodies import MAX_DEPTH, MAX_FIELDS, MAX_VALUES, read_fields
from openai_adapter.errors import CLIENT_CLOSED_REQUEST, ApiError
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.types import Message
from video_server import VIDEOS, refusal

from openai_adapter import bodies

MAX_FIELD = 100
JSON, MULTIPART, URLENCODED = (
    "application/json",
    "multipart/form-data; boundary=xyz",
    "application/x-www-form-urlencoded",
)


def request_of(body: bytes, content_type: str | None, *, ends_early: bool = False) -> Request:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": ends_early}]
    messages += [{"type": "http.disconnect"}] * 2

    async def receive() -> Message:
        return messages.pop(0)

    headers = [] if content_type is None else [(b"content-type", content_type.encode())]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)


def read(body: bytes | str, content_type: str | None, **more: Any) -> dict[str, Any]:
    """The fields; of a file, its name and bytes."""
    data = body.encode() if isinstance(body, str) else body

    async def run() -> dict[str, Any]:
        fields = await read_fields(request_of(data, content_type, **more), MAX_FIELD)
        return {name: await plain(value) for name, value in fields.items()}

    async def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: await plain(each) for name, each in value.items()}
        if isinstance(value, list):
            return [await plain(each) for each in value]
        return (value.filename, await value.read()) if isinstance(value, UploadFile) else value

    return asyncio.run(run())


def error_of(body: bytes | str, content_type: str | None, **more: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(body, content_type, **more)
    return caught.value


def multipart(*parts: tuple[str, str | bytes] | tuple[str, str | bytes, str]) -> bytes:
    body = b""
    for name, value, *filename in parts:
        head = f'form-data; name="{name}"' + "".join(f'; filename="{each}"' for each in filename)
        data = value.encode() if isinstance(value, str) else value
        body += f"--xyz\r\ncontent-disposition: {head}\r\n\r\n".encode() + data + b"\r\n"
    return body + b"--xyz--\r\n"


def test_the_three_kinds() -> None:
    fields = {"prompt": "a fox & a ключ", "size": "64x64"}
    assert read(json.dumps(fields), JSON) == fields
    assert read(json.dumps(fields), "Application/JSON; charset=utf-8") == fields
    assert read(multipart(*fields.items()), MULTIPART) == fields
    encoded = "&".join(f"{name}={quote(value)}" for name, value in fields.items())
    assert read(encoded, URLENCODED) == fields
    assert read("prompt=a+fox+%26+a+ключ&size=64x64", URLENCODED) == fields, "curl --data escapes nothing"
    assert read(multipart(*fields.items()), f"{MULTIPART}; charset=UTF-8") == fields
    assert [bodies.is_form(request_of(b"", kind)) for kind in (JSON, MULTIPART, URLENCODED, None)] == [
        False,
        True,
        True,
        False,
    ]


def test_a_file_and_nested_names() -> None:
    body = multipart(
        ("prompt", "a fox"),
        ("image", b"\x89PNG\r\n--xy\r\n\0", "a fox.png"),
        ("extra[fps]", "8"),
        ("extra[seed]", "9"),
    )
    assert read(body, MULTIPART) == {
        "prompt": "a fox",
        "image": ("a fox.png", b"\x89PNG\r\n--xy\r\n\0"),
        "extra": {"fps": "8", "seed": "9"},
    }


@pytest.mark.parametrize("name", ["[]", "a[b", "a]", "[", "]", "a[b]c", ""])
def test_brackets_that_nest_nothing_are_part_of_the_name(name: str) -> None:
    assert read(multipart((name, "1")), MULTIPART) == {name: "1"}


def test_a_list_comes_in_parts() -> None:
    body = multipart(("a[]", "1"), ("b", "2"), ("a[]", b"\0", "a.png"))
    assert read(body, MULTIPART) == {"a": ["1", ("a.png", b"\0")], "b": "2"}
    assert read("a[]=1&a[]=2", URLENCODED) == {"a": ["1", "2"]}


def test_brackets_go_one_level_deep() -> None:
    assert read(multipart(("a[b][c]", "1")), MULTIPART) == {"a": {"b][c": "1"}}
    assert read(multipart(("[b]", "1")), MULTIPART) == {"": {"b": "1"}}


@pytest.mark.parametrize(
    "names",
    [
        *(("a", "a"), ("a[b]", "a[b]"), ("a", "a[b]"), ("a[b]", "a"), ("a", "c", "a")),
        *(("a[]", "a"), ("a", "a[]"), ("a[]", "a[]", "a"), ("a[]", "a[b]"), ("a[b]", "a[]")),
    ],
)
@pytest.mark.parametrize("kind", [MULTIPART, URLENCODED])
def test_a_field_comes_once(names: tuple[str, ...], kind: str) -> None:
    parts = [(name, str(number)) for number, name in enumerate(names)]
    body = multipart(*parts) if kind == MULTIPART else "&".join(f"{name}={value}" for name, value in parts)
    error = error_of(body, kind)
    assert (error.status, error.code, error.param) == (400, "duplicate_field", names[-1])
    assert f"'{names[-1]}' twice" in error.message


def test_a_field_of_json_comes_once_at_any_depth() -> None:
    for body in ('{"a": 1, "a": 1}', '{"b": [{"a": 1, "a": 2}]}'):
        error = error_of(body, JSON)
        assert (error.status, error.code, error.param) == (400, "duplicate_field", "a")


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (multipart(("a", "1")), "multipart/form-data", "Missing boundary"),
        (multipart(("a", "1")), "multipart/form-data; boundary=", "is not a form"),
        (b"", MULTIPART, "It has no end"),
        (b"a=1", MULTIPART, "is not a form"),
        (multipart(("a", "1")).replace(b"--xyz--", b""), MULTIPART, "It has no end"),
        (multipart(("a", "1"))[:-30], MULTIPART, "It has no end"),
        (multipart(("a", "1"), ("b", "2"))[:-12], MULTIPART, "It has no end"),
        (multipart(("a", "1"), ("b", "2", "b.png"))[:-5], MULTIPART, "It has no end"),
        (multipart(("a", "1")).replace(b"; name=", b"; nam="), MULTIPART, "name"),
        (b'--xyz\r\n: form-data; name="a"\r\n\r\n1\r\n--xyz--\r\n', MULTIPART, "is not a form"),
        (b"--xyz\r\ncontent-type: text/plain\r\n\r\n1\r\n--xyz--\r\n", MULTIPART, "is not a form"),
        (multipart(("a", "1" * (MAX_FIELD + 1))), MULTIPART, "maximum size"),
        ("a=" + "1" * (MAX_FIELD + 1), URLENCODED, "maximum size"),
        (multipart(*((f"f{n}", "1") for n in range(MAX_FIELDS + 1))), MULTIPART, "Too many fields"),
        ("&".join(f"f{n}=1" for n in range(MAX_FIELDS + 1)), URLENCODED, "Too many fields"),
    ],
)
def test_forms_that_are_none(body: bytes | str, kind: str, words: str) -> None:
    error = error_of(body, kind)
    assert (error.status, error.code) == (400, "invalid_form")
    assert words in error.message


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (multipart(("a", "1"), ("prompt", b"a f\xfcx")), MULTIPART),
        (multipart(("prompt", b"a f\xfcx"), ("image", b"\xfc", "a.png")), MULTIPART),
        (b"a=1&prompt=a f\xfcx", URLENCODED),
        (b"a=1&prompt=a+f%FCx", URLENCODED),
    ],
)
def test_texts_that_are_not_utf_8(body: bytes, kind: str) -> None:
    error = error_of(body, kind)
    assert (error.status, error.code, error.param) == (400, "invalid_unicode", "prompt")
    assert "'prompt' is not valid UTF-8: invalid start byte at byte 3" in error.message


@pytest.mark.parametrize("charset", ["latin-1", "utf-16", "none"])
def test_a_form_in_another_charset(charset: str) -> None:
    error = error_of(multipart(("a", "1")), f"{MULTIPART}; charset={charset}")
    assert (error.status, error.code) == (400, "invalid_form")
    assert "charset is not UTF-8" in error.message


def test_files_are_closed_when_the_request_is_answered(make_app: Callable[..., FastAPI]) -> None:
    """Also where it fails, and one of a file that is too large to be kept in memory."""
    app, seen = make_app(max_body_bytes=2**22), list[UploadFile]()

    @app.post("/keep")
    async def keep(request: Request) -> None:
        seen.append((await read_fields(request, MAX_FIELD))["file"])
        assert await seen[-1].read(1) == b"x"
        raise ApiError(400, "no")

    form = {"file": ("a.png", b"x" * 2**21)}
    assert send(app, "POST", "/keep", files=form).status_code == 400
    assert [file.file.closed for file in seen] == [True]


def test_as_many_files_as_are_allowed() -> None:
    body = multipart(*(("a[]", "1", "a.png") for _ in range(3)))

    async def run(count: int) -> int:
        fields = await read_fields(request_of(body, MULTIPART), MAX_FIELD, max_files=count)
        return len(fields["a"])

    assert asyncio.run(run(3)) == 3
    with pytest.raises(ApiError, match="the body has more than 2 files; allowed: at most 2") as caught:
        asyncio.run(run(2))
    assert (caught.value.status, caught.value.code) == (400, "too_many_files")


def test_no_upload_is_written_to_a_disk() -> None:
    body = multipart(("a", b"\0" * 5 * 2**20, "a.png"))
    file = asyncio.run(read_fields(request_of(body, MULTIPART), MAX_FIELD))["a"]
    assert (file.size, file.file._rolled) == (5 * 2**20, False)


def test_as_much_as_is_allowed() -> None:
    full = "1" * MAX_FIELD
    assert read(multipart(("a", full)), MULTIPART) == {"a": full}
    assert read(f"a={full[1:]}", URLENCODED) == {"a": full[1:]}, "with its name"
    names = [f"f{n}" for n in range(MAX_FIELDS)]
    assert list(read(multipart(*((name, "1") for name in names)), MULTIPART)) == names
    large = b"\0" * MAX_FIELD * 100
    assert read(multipart(("a", large, "a")), MULTIPART) == {"a": ("a", large)}, "a file has its own limit"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'"a"', "not a JSON object"),
        (b'{"a": NaN}', "NaN is not a number"),
        (b'{"a": -Infinity}', "-Infinity is not a number"),
        (b'{"a": ' + b"1" * 5000 + b"}", "too many digits"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": ' * (MAX_VALUES + 1), "too many values"),
        (b'{"a": ' * MAX_VALUES, "nested too deeply"),
        (b'{"a": ' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), "nested too deeply"),
    ],
)
def test_json_that_is_no_object(body: bytes, words: str) -> None:
    error = error_of(body, JSON)
    assert (error.status, error.code) == (400, "invalid_json")
    assert words in error.message


@pytest.mark.parametrize("kind", [None, "", "text/plain", "application/jsonp", "multipart/mixed", "json"])
def test_another_content_type(kind: str | None) -> None:
    error = error_of(b'{"a": 1}', kind)
    assert (error.status, error.code) == (415, "unsupported_media_type")
    for allowed in (JSON, "multipart/form-data", URLENCODED):
        assert f"'{allowed}'" in error.message


@pytest.mark.parametrize("kind", [JSON, MULTIPART, URLENCODED])
def test_a_client_that_leaves_within_the_body(kind: str) -> None:
    error = error_of(multipart(("a", "1"))[:-30], kind, ends_early=True)
    assert (error.status, error.code) == (CLIENT_CLOSED_REQUEST, "cancelled")


@pytest.mark.parametrize("kind", [JSON, MULTIPART, URLENCODED])
def test_a_body_that_is_too_large(app: FastAPI, kind: str) -> None:
    answer = send(app, "POST", VIDEOS, content=b"a" * 30 * 2**20, headers={"content-type": kind})
    assert refusal(answer) == (413, None, "content_too_large")
