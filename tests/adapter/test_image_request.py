"""What is refused before a model is looked at. The app's Triton is down: what is not refused gets a 503."""

from __future__ import annotations

import json
from typing import Any

import pytest
from diffusion_backend.errors import DiffusionError
from diffusion_backend.settings import MAX_SEED
from fastapi import FastAPI
from in_process import send
from openai_adapter.image_request import ImageRequest, Plan, parse, plan
from test_registry import LIMITS

GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"
DATA_URL = "data:image/png;base64,AAAA"
SURROGATE = "a\ud800"
BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "missing"),
    ({"prompt": 1}, "prompt", "invalid_value"),
    ({"prompt": ""}, "prompt", "empty_prompt"),
    ({"prompt": " \n\u3000"}, "prompt", "empty_prompt"),
    ({"prompt": "x" * 32_001}, "prompt", "string_too_long"),
    ({"prompt": SURROGATE}, "prompt", "invalid_unicode"),
    ({"model": 1}, "model", "invalid_value"),
    ({"model": SURROGATE}, "model", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 11}, "n", "invalid_value"),
    ({"n": True}, "n", "invalid_value"),
    ({"n": 1.0}, "n", "invalid_value"),
    ({"n": "1"}, "n", "invalid_value"),
    ({"quality": "ultra"}, "quality", "invalid_value"),
    ({"quality": ["low"]}, "quality", "invalid_value"),
    ({"response_format": "file"}, "response_format", "invalid_value"),
    ({"output_format": "gif"}, "output_format", "invalid_value"),
    ({"output_format": "svg"}, "output_format", "invalid_value"),
    ({"output_compression": 101, "output_format": "webp"}, "output_compression", "invalid_value"),
    ({"output_compression": False, "output_format": "webp"}, "output_compression", "invalid_value"),
    ({"output_compression": 50}, "output_compression", "invalid_value"),
    ({"background": "transparent"}, "background", "invalid_value"),
    ({"moderation": "high"}, "moderation", "invalid_value"),
    ({"user": 1}, "user", "invalid_value"),
    ({"user": SURROGATE}, "user", "invalid_value"),
    ({"safety_identifier": SURROGATE}, "safety_identifier", "invalid_value"),
    ({"stream": 0}, "stream", "invalid_value"),
    ({"partial_images": 1}, "partial_images", "invalid_value"),
    ({"partial_images": 1, "stream": False}, "partial_images", "invalid_value"),
    ({"partial_images": 4, "stream": True}, "partial_images", "invalid_value"),
    ({"partial_images": -1, "stream": True}, "partial_images", "invalid_value"),
    ({"stream": True, "response_format": "url"}, "response_format", "invalid_value"),
    ({"partial_images": False}, "partial_images", "invalid_value"),
    ({"style": "vivid"}, "style", "unsupported_parameter"),
    ({"complexity": "low"}, "complexity", "unsupported_parameter"),
    ({"frame_count": 2}, "frame_count", "unsupported_parameter"),
    ({"frame_duration_ms": 200}, "frame_duration_ms", "unsupported_parameter"),
    ({"svg": {"model": "m"}}, "svg", "unsupported_parameter"),
    ({"width": 64}, "width", "unsupported_parameter"),
    ({"height": 64}, "height", "unsupported_parameter"),
    ({"sed": 1}, "sed", "unknown_parameter"),
    ({"k\ud800": 1}, "k\\ud800", "unknown_parameter"),
    ({"extra_body": [1]}, "extra_body", "invalid_value"),
    ({"extra_body": {"extra_body": {}}}, "extra_body", "invalid_value"),
    ({"extra_body": {"what": 1}}, "what", "unknown_parameter"),
    ({"extra_body": {"seed": 1}, "seed": 2}, "seed", "conflicting_values"),
    ({"extra_body": {"seed": 1}, "seed": True}, "seed", "conflicting_values"),
]


@pytest.mark.parametrize("path", [GENERATIONS, EDITS])
@pytest.mark.parametrize(("fields", "param", "code"), BAD_FIELDS)
def test_bad_fields(app: FastAPI, fields: dict[str, Any], param: str, code: str, path: str) -> None:
    body = json.dumps({"prompt": "a fox", **({"image": DATA_URL} if path == EDITS else {}), **fields})
    answer = send(app, "POST", path, content=body, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    assert error["type"] == "invalid_request_error"
    assert param in error["message"].replace("\\\\", "\\")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream": False, "partial_images": 0, "background": "opaque", "moderation": "low", "user": "me"},
        {"stream": True, "partial_images": 3, "response_format": "b64_json"},
        {"stream": True},
        {"output_format": "png", "output_compression": 100, "response_format": "url"},
        {"output_format": "jpeg", "output_compression": 0, "background": "auto"},
        {"prompt": "🦊" * 32_000},
        {"extra_body": {"seed": 1, "guidance_scale": 2.0}, "seed": 1, "guidance_scale": 2},
        {"extra_body": {"seed": None}, "seed": 1},
        {"extra_body": None},
        dict.fromkeys(("model", "n", "size", "quality", "style", "svg", "stream", "seed", "what")),
    ],
)
def test_good_fields_reach_the_model(app: FastAPI, fields: dict[str, Any]) -> None:
    answer = send(app, "POST", "/v1/images/generations", json={"prompt": "a fox", **fields})
    assert answer.status_code == 503, answer.text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff",
        b"\xef\xbb\xbf{}",
        b'{"prompt": "a", "prompt": "a"}',
        b'{"prompt": "a", "svg": {"a": 1, "a": 2}}',
        b'{"prompt": "a", "n": NaN}',
        b'{"prompt": "a", "n": -Infinity}',
        b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}",
        b'{"a":' * 100_000,
        b'{"prompt": "a", "n": ' + b"[" * 900 + b"]" * 900 + b"}",
    ],
)
def test_bad_json(app: FastAPI, body: bytes) -> None:
    answer = send(
        app, "POST", "/v1/images/generations", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in ("invalid_json", "duplicate_field")


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("", 415),
        ("text/plain", 415),
        ("multipart/form-data; boundary=x", 415),
        ("Application/JSON; charset=utf-8", 503),
    ],
)
def test_content_type(app: FastAPI, content_type: str, status: int) -> None:
    headers = {"content-type": content_type} if content_type else {}
    answer = send(app, "POST", "/v1/images/generations", content=b'{"prompt": "a"}', headers=headers)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def plan_of(**fields: Any) -> Plan:
    return plan(parse(ImageRequest, {"prompt": "a fox", **fields}), LIMITS)


def test_plan_takes_following_seeds() -> None:
    planned = plan_of(n=3, seed=7, size="128x64")
    assert [settings.seed for settings in planned.images] == [7, 8, 9]
    assert (planned.settings.width, planned.settings.height) == (128, 64)


def test_plan_draws_a_seed() -> None:
    assert len({plan_of().settings.seed for _ in range(10)}) > 1


def test_plan_keeps_seeds_in_range() -> None:
    largest = MAX_SEED - 9
    assert plan_of(n=10, seed=largest).images[-1].seed == MAX_SEED
    with pytest.raises(DiffusionError) as caught:
        plan_of(n=10, seed=largest + 1)
    assert caught.value.param == "seed"
    assert str(largest) in caught.value.message
