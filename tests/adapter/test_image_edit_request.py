"""What is refused of edits and variations before a model is looked at. The app has no Triton: the rest gets a 503."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import FastAPI
from hostile_files import WHOLE_PNG
from in_process import send
from openai_adapter.image_request import (
    EditRequest,
    ImageRequest,
    VariationRequest,
    list_images,
    parse,
)
from openai_adapter.request_fields import from_form
from video_server import refusal

EDITS, VARIATIONS = "/v1/images/edits", "/v1/images/variations"
URL = "data:image/png;base64,AAAA"
FILE = ("a fox.png", WHOLE_PNG)
JSON = {"content-type": "application/json"}

BAD_EDITS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"image": None}, "image", "missing", "a file, a data URL, or an object with 'image_url'"),
    ({"image": []}, "image", "too_many_images", "a list of 1 to 16"),
    ({"image": [URL] * 17}, "image", "too_many_images", "has 17 pictures; allowed: a file"),
    ({"images": [URL]}, "images", "conflicting_values", "one of the two"),
    ({"image": None, "images": URL}, "images", "invalid_value", "allowed: a list of 1 to 16"),
    ({"image": None, "images": {"image_url": URL}}, "images", "invalid_value", "allowed: a list"),
    ({"image": None, "images": []}, "images", "too_many_images", "a list of 1 to 16"),
    ({"markup": URL}, "markup", "unsupported_parameter", "'mask'"),
    ({"input_fidelity": "medium"}, "input_fidelity", "invalid_value", "'low', 'high'"),
    ({"input_fidelity": "high", "strength": 0.5}, "input_fidelity", "conflicting_values", "one of the two"),
    ({"frame_count": 2}, "frame_count", "unsupported_parameter", "gif"),
]


@pytest.mark.parametrize(("fields", "param", "code", "words"), BAD_EDITS)
def test_bad_edits(app: FastAPI, fields: dict[str, Any], param: str, code: str, words: str) -> None:
    answer = send(app, "POST", EDITS, json={"prompt": "a fox", "image": URL, **fields})
    assert refusal(answer) == (400, param, code)
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"image": None}, "image", "missing"),
        ({"image": [URL, URL]}, "image", "too_many_images"),
        ({"images": [URL]}, "images", "unsupported_parameter"),
        ({"mask": URL}, "mask", "unsupported_parameter"),
        ({"prompt": "a fox"}, "prompt", "unsupported_parameter"),
        ({"stream": True}, "stream", "unsupported_parameter"),
        ({"partial_images": 0}, "partial_images", "unsupported_parameter"),
        ({"n": 11}, "n", "invalid_value"),
        ({"sizes": "64x64"}, "sizes", "unknown_parameter"),
    ],
)
def test_bad_variations(app: FastAPI, fields: dict[str, Any], param: str, code: str) -> None:
    answer = send(app, "POST", VARIATIONS, json={"image": URL, **fields})
    assert refusal(answer) == (400, param, code)
    if code == "unknown_parameter":
        assert "prompt" not in answer.json()["error"]["message"].partition("allowed: ")[2].split(", ")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mask": URL, "input_fidelity": "high", "n": 10, "quality": "low", "size": "auto"},
        {"image": None, "images": [{"image_url": URL}] * 16, "mask": {"image_url": URL}},
        {"image": [URL, {"image_url": URL}], "strength": 0.5},
        {"stream": True, "partial_images": 3, "output_format": "webp", "output_compression": 1},
        {"response_format": "url", "user": "me", "moderation": "low", "background": "opaque"},
        dict.fromkeys(("mask", "images", "input_fidelity", "markup", "strength", "style")),
    ],
)
def test_good_edits_reach_the_model(app: FastAPI, fields: dict[str, Any]) -> None:
    answer = send(app, "POST", EDITS, json={"prompt": "a fox", "image": URL, **fields})
    assert answer.status_code == 503, answer.text


def test_good_forms_reach_the_model(app: FastAPI) -> None:
    """As OpenAI's clients send them."""
    texts = {"prompt": "7", "n": "2", "stream": "true", "partial_images": "1", "strength": "0.5"}
    one = [("image", FILE), ("mask", FILE)]
    several: list[Any] = [("image[]", FILE)] * EditRequest.MAX_IMAGES + [("mask", FILE)]
    for path, data, files in (
        (EDITS, texts, one),
        (EDITS, texts, several),
        (EDITS, {**texts, "image": URL, "mask": json.dumps({"image_url": URL})}, []),
        (VARIATIONS, {"n": "2", "size": "64x64", "response_format": "url"}, [("image", FILE)]),
    ):
        answer = send(app, "POST", path, data=data, files=files or None)
        assert answer.status_code == 503, answer.text


@pytest.mark.parametrize(
    ("data", "files", "param", "code"),
    [
        ({}, [("image", FILE), ("image", FILE)], "image", "duplicate_field"),
        ({}, [("image", FILE), ("image[]", FILE)], "image[]", "duplicate_field"),
        ({}, [("image[]", FILE)] * 18, None, "too_many_files"),
        ({}, [("image[]", FILE)] * 17, "image", "too_many_images"),
        ({}, [("image", FILE), ("size", FILE)], "size", "invalid_value"),
        ({}, [("image", FILE), ("size[]", FILE)], "size", "invalid_value"),
        ({}, [("image", FILE), ("n[a]", FILE)], "n", "invalid_value"),
        ({"n": "two"}, [("image", FILE)], "n", "invalid_value"),
        ({"n": "2.0"}, [("image", FILE)], "n", "invalid_value"),
        ({"stream": "yes"}, [("image", FILE)], "stream", "invalid_value"),
        ({"mask": "{"}, [("image", FILE)], "mask", "invalid_json"),
    ],
)
def test_bad_forms(
    app: FastAPI, data: dict[str, str], files: list[Any], param: str | None, code: str
) -> None:
    answer = send(app, "POST", EDITS, data={"prompt": "a fox", **data}, files=files)
    assert refusal(answer) == (400, param, code)


def test_a_body_may_have_as_many_bytes_as_its_path_allows(app: FastAPI) -> None:
    for path, megabytes in ((EDITS, 85), (VARIATIONS, 27), ("/v1/images/generations", 1)):
        answer = send(app, "POST", path, content=b" " * megabytes * 2**20, headers=JSON)
        assert refusal(answer) == (400, None, "invalid_json")
        answer = send(app, "POST", path, content=b" " * (megabytes + 4) * 2**20, headers=JSON)
        assert refusal(answer) == (413, None, "content_too_large")


def test_forms_have_the_types_of_json() -> None:
    typed = from_form(
        EditRequest,
        {
            "prompt": "7",
            "n": "2",
            "stream": "true",
            "strength": "0.5",
            "image": [json.dumps({"image_url": URL}), URL],
            "seed": "7",
            "lora": {"ink": "0.5", "oil": "much"},
            "user": "8",
        },
    )
    assert typed == {
        "prompt": "7",
        "n": 2,
        "stream": True,
        "strength": 0.5,
        "image": [{"image_url": URL}, URL],
        "seed": 7,
        "lora": {"ink": 0.5, "oil": "much"},
        "user": "8",
    }
    loras = {"ink": 0.5}
    assert from_form(ImageRequest, {"lora": json.dumps(loras)}) == {"lora": loras}
    assert from_form(ImageRequest, {"lora": "ink:0.5"}) == {"lora": "ink:0.5"}
    assert from_form(ImageRequest, {"n": "0x2", "stream": "True"}) == {"n": "0x2", "stream": "True"}


def test_errors_name_the_place_in_a_list() -> None:
    for fields, names in (
        ({"image": URL}, ["image"]),
        ({"image": [URL]}, ["image[0]"]),
        ({"images": [URL, URL]}, ["images[0]", "images[1]"]),
    ):
        request = parse(EditRequest, {"prompt": "a fox", **fields})
        assert [reference.field for reference in list_images(request)] == names
    assert [reference.field for reference in list_images(parse(VariationRequest, {"image": [URL]}))] == [
        "image[0]"
    ]
