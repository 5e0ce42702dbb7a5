"""The header ``Idempotency-Key``: what is a key, and what is the same request."""

from __future__ import annotations

from typing import Any

import pytest
from diffusion_backend.errors import DiffusionError
from openai_adapter.errors import ApiError
from openai_adapter.idempotency import read_idempotency
from openai_adapter.job_store import Idempotency
from starlette.requests import Request

FIELDS = {"prompt": "a fox", "seed": 1}


def request_of(*keys: str, path: str = "/v1/videos") -> Request:
    headers = [(b"idempotency-key", key.encode("latin-1")) for key in keys]
    return Request({"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers})


def read(*keys: str, fields: Any = FIELDS, **more: Any) -> Idempotency | None:
    return read_idempotency(request_of(*keys, **more), fields)


def digest(**more: Any) -> str:
    found = read("key", **more)
    assert found is not None
    return found.body_digest


def test_a_request_without_a_key_has_none() -> None:
    assert read() is None


@pytest.mark.parametrize("key", ["k", 'a-uuid_4~!"#', "x" * 255])
def test_keys(key: str) -> None:
    found = read(key)
    assert found is not None
    assert found.key == key


@pytest.mark.parametrize("key", ["", " ", "a b", "a\tb", "schlüssel", "x" * 256, "a\x7f"])
def test_what_is_no_key(key: str) -> None:
    with pytest.raises(DiffusionError) as caught:
        read(key)
    assert caught.value.param == "Idempotency-Key"
    assert "allowed: 1 to 255 visible ASCII characters" in caught.value.message


@pytest.mark.parametrize("keys", [("a", "b"), ("a", "a"), ("", "")])
def test_a_key_comes_once(keys: tuple[str, ...]) -> None:
    with pytest.raises(ApiError) as caught:
        read(*keys)
    assert (caught.value.status, caught.value.param) == (400, "Idempotency-Key")
    assert "comes 2 times; allowed: once" in caught.value.message


def test_the_order_of_fields_makes_no_difference() -> None:
    assert digest(fields=dict(reversed(FIELDS.items()))) == digest()


@pytest.mark.parametrize(
    "other",
    [
        {"fields": {"prompt": "a cat", "seed": 1}},
        {"fields": {"prompt": "a fox"}},
        {"fields": {"prompt": "a fox", "seed": "1"}},
        {"fields": {"prompt": "a fox", "seed": True}},
        {"fields": {"prompt": "a fox", "seed": 1.0}},
        {"fields": {**FIELDS, "input_reference": {"sha256": "00"}}},
        {"path": "/v1/videos/video_1/remix"},
    ],
)
def test_anything_else_is_another_request(other: dict[str, Any]) -> None:
    assert digest(**other) != digest()


def test_what_is_in_one_part_is_not_in_another() -> None:
    assert digest(path="/a", fields={}) != digest(path="/", fields={"a": {}})


def test_any_text_has_a_digest() -> None:
    assert digest(fields={"prompt": "\ud800\0"}) != digest(fields={"prompt": "\ud801\0"})
