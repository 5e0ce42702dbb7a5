"""Read the fields of a request, strictly: what readers of JSON or of forms disagree about is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import aclosing
from typing import Any, NoReturn
from urllib.parse import unquote_to_bytes

from diffusion_backend.errors import show
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import FormParser, MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from openai_adapter.errors import CLIENT_CLOSED_REQUEST, ApiError

MAX_DEPTH = 32  # parsing survives more, but not everything that later touches the value does
MAX_FIELDS = 64
MAX_VALUES = 100_000  # in JSON: far beyond what any request has, and soon read
_JSON = "application/json"
_MULTIPART = "multipart/form-data"
_FORMS = (_MULTIPART, "application/x-www-form-urlencoded")
_TOO_DEEP = f"is nested too deeply; allowed: {MAX_DEPTH} levels"


async def read_json_object(request: Request) -> dict[str, Any]:
    """The request's body, a JSON object.

    Raises:
        ApiError: 415 for another content type, 400 for anything that is not one unambiguous JSON object.
    """
    if _media_type(request) != _JSON:
        raise _unsupported(request, [_JSON])
    try:
        body = await request.body()
    except ClientDisconnect:
        raise _ended_early() from None
    try:
        text = body.decode()
    except UnicodeDecodeError:
        raise _invalid("the body is not UTF-8") from None
    return parse_json_object(text)


def parse_json_object(text: str, field: str | None = None) -> dict[str, Any]:
    """The JSON object that the body is, or the text of a ``field`` in it.

    Raises:
        ApiError: 400 for anything that is not one unambiguous JSON object.
    """
    what = "the body" if field is None else f"'{field}'"
    if sum(map(text.count, ",[{")) > MAX_VALUES:
        raise _invalid(f"{what} has too many values; allowed: {MAX_VALUES}", field)
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise _invalid(f"{what} {_TOO_DEEP}", field) from None
    except json.JSONDecodeError as error:
        raise _invalid(f"{what} is not valid JSON: {error}", field) from None
    except ValueError:
        raise _invalid(f"{what} has a number with too many digits", field) from None
    if not isinstance(value, dict):
        raise _invalid(f"{what} is not a JSON object", field)
    if _is_deeper(value, MAX_DEPTH):
        raise _invalid(f"{what} {_TOO_DEEP}", field)
    return value


async def read_fields(request: Request, max_field_bytes: int, max_files: int = 1) -> dict[str, Any]:
    """The fields of a request whose body is a JSON object or a form.

    Those of a form are texts, files (``UploadFile``), for names such as ``a[]`` lists of such, and for names such as
    ``a[b]`` objects. The files are open until the request is answered (``middleware.Forms``). ``max_field_bytes``: of
    one that is a text.

    Raises:
        ApiError: as ``read_json_object``; 400 for a form that is none, or has a field twice or not in UTF-8.
    """
    if not is_form(request):
        if _media_type(request) != _JSON:
            raise _unsupported(request, [_JSON, *_FORMS])
        return await read_json_object(request)
    try:
        form = await _parse_form(request, max_field_bytes, max_files)
    except ClientDisconnect:
        raise _ended_early() from None
    except MultiPartException as error:
        if error.message.startswith("Too many files"):
            raise ApiError(
                400,
                f"the body has more than {max_files} files; allowed: at most {max_files}",
                code="too_many_files",
            ) from None
        raise ApiError(400, f"the body is not a form: {error.message}", code="invalid_form") from None
    except (KeyError, ValueError):
        raise ApiError(400, "the body is not a form", code="invalid_form") from None
    request.state.form = form
    fields: dict[str, Any] = {}
    for name, value in form.multi_items():
        _put(fields, name, value)
    return fields


def show_field(value: object) -> str:
    """A field's value as an error message quotes it: of files, that they are such."""
    return "a file" if has_file(value) else show(value)


def has_file(value: object) -> bool:
    """Whether a field of a form is a file, or has one in it."""
    return isinstance(value, UploadFile) or any(map(has_file, _children(value)))


def is_form(request: Request) -> bool:
    """Whether the body is a form, whose values are texts and files."""
    return _media_type(request) in _FORMS


class _Multipart(MultiPartParser):
    """Starlette's drops the last part without a word where the body ends within it, and reads what is not UTF-8 as
    Latin-1.


    Files stay in memory, which ``middleware.BodyLimit`` bounds: no upload is written to a disk.
    """

    spool_max_size = 0  # no size is too large
    has_ended = False

    def on_part_begin(self) -> None:
        if self._charset != "utf-8":
            raise MultiPartException("Its charset is not UTF-8.")
        super().on_part_begin()

    def on_part_end(self) -> None:
        part = self._current_part
        if part.file is None:
            _decode(bytes(part.data), part.field_name)
        super().on_part_end()

    def on_end(self) -> None:
        self.has_ended = True


class _UrlEncoded(FormParser):
    """Starlette's reads as Latin-1 what is UTF-8 and not escaped, and puts U+FFFD for what is neither."""

    def on_field_end(self) -> None:
        super().on_field_end()
        raw_name, raw_value = (
            unquote_to_bytes(bytes(raw).replace(b"+", b" ")) for raw in (self._field_name, self._field_value)
        )
        name = raw_name.decode(errors="backslashreplace")
        self._items[-1] = (name, _decode(raw_value, name))


async def _parse_form(request: Request, max_field_bytes: int, max_files: int) -> FormData:
    async with aclosing(request.stream()) as stream:
        if _media_type(request) != _MULTIPART:
            urlencoded = _UrlEncoded(
                request.headers, stream, max_fields=MAX_FIELDS, max_part_size=max_field_bytes
            )
            return await urlencoded.parse()
        multipart = _Multipart(
            request.headers,
            stream,
            max_files=max_files,
            max_fields=MAX_FIELDS,
            max_part_size=max_field_bytes,
        )
        form = await multipart.parse()
    if not multipart.has_ended:
        await form.close()
        raise MultiPartException("It has no end.")
    return form


def _put(fields: dict[str, Any], name: str, value: str | UploadFile) -> None:
    outer, bracket, inner = name.partition("[")
    if outer and bracket and inner == "]":
        items = fields.setdefault(outer, [])
        if not isinstance(items, list):
            raise _twice(name)
        items.append(value)
        return
    target, key = fields, name
    if bracket and inner.endswith("]") and inner != "]":
        target, key = fields.setdefault(outer, {}), inner[:-1]
    if not isinstance(target, dict) or key in target:
        raise _twice(name)
    target[key] = value


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ApiError(
            400,
            f"the field {show(name)} is not valid UTF-8: {error.reason} at byte {error.start}; allowed: UTF-8",
            param=name,
            code="invalid_unicode",
        ) from None


def _twice(name: str) -> ApiError:
    message = f"the body has the field {show(name)} twice, or its name in two forms; allowed: once"
    return ApiError(400, message, param=name, code="duplicate_field")


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _unsupported(request: Request, allowed: Iterable[str]) -> ApiError:
    return ApiError(
        415,
        f"'content-type' is {show(request.headers.get('content-type', ''))}; allowed: "
        + ", ".join(f"'{media_type}'" for media_type in allowed),
        code="unsupported_media_type",
    )


def _ended_early() -> ApiError:
    return ApiError(CLIENT_CLOSED_REQUEST, "the body ended early", code="cancelled")


def _is_deeper(value: object, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return False
    return True


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise _twice(name)
        result[name] = value
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise _invalid(f"the body is not valid JSON: {name} is not a number")


def _invalid(message: str, field: str | None = None) -> ApiError:
    return ApiError(400, message, param=field, code="invalid_json")
