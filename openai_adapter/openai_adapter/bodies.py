"""Read a JSON object from a request, strictly: what JSON readers disagree about is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NoReturn

from diffusion_backend.errors import show
from starlette.requests import ClientDisconnect, Request

from openai_adapter.errors import CLIENT_CLOSED_REQUEST, ApiError

MAX_DEPTH = 32  # parsing survives more, but not everything that later touches the value does
_TOO_DEEP = f"the body is nested too deeply; allowed: {MAX_DEPTH} levels"


async def read_json_object(request: Request) -> dict[str, Any]:
    """The request's body, a JSON object.

    Raises:
        ApiError: 415 for another content type, 400 for anything that is not one unambiguous JSON object.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(
            415,
            f"'content-type' is {show(content_type)}; allowed: 'application/json'",
            code="unsupported_media_type",
        )
    try:
        body = await request.body()
    except ClientDisconnect:
        raise ApiError(CLIENT_CLOSED_REQUEST, "the body ended early", code="cancelled") from None
    try:
        value = json.loads(body.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise _invalid(_TOO_DEEP) from None
    except UnicodeDecodeError:
        raise _invalid("the body is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _invalid(f"the body is not valid JSON: {error}") from None
    except ValueError:
        raise _invalid("the body has a number with too many digits") from None
    if not isinstance(value, dict):
        raise _invalid("the body is not a JSON object")
    if _is_deeper(value, MAX_DEPTH):
        raise _invalid(_TOO_DEEP)
    return value


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
            raise ApiError(400, f"the body has {show(name)} twice", param=name, code="duplicate_field")
        result[name] = value
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise _invalid(f"the body is not valid JSON: {name} is not a number")


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_json")
