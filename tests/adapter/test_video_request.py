"""The fields of a request for a video: what each comes to, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from diffusion_backend.errors import DiffusionError
from diffusion_backend.settings import MAX_FPS, MAX_SEED, ModelLimits
from fastapi import FastAPI
from in_process import send
from openai_adapter.errors import ApiError
from openai_adapter.request_fields import from_form, unwrap
from openai_adapter.video_request import Plan, VideoRequest, parse, plan, plan_remix
from test_registry import LIMITS
from video_server import VIDEOS, refusal

SURROGATE = "a\ud800"
VIDEO: ModelLimits = ModelLimits.model_validate(
    {
        **LIMITS.model_dump(),
        "tasks": ("text-to-video",),
        "default_num_frames": 81,
        "min_num_frames": 5,
        "max_num_frames": 121,
        "num_frames_step": 4,
        "default_fps": 16,
        "guidance_argument": "guidance_scale",
        "default_guidance_scale": 5.0,
    }
)
IMAGE_TO_VIDEO = VIDEO.model_copy(update={"tasks": ("image-to-video",), "max_images": 1})


def plan_of(limits: ModelLimits = VIDEO, **fields: Any) -> Plan:
    return plan(parse(unwrap({"prompt": "a fox", **fields})), limits)


def error_of(limits: ModelLimits = VIDEO, **fields: Any) -> DiffusionError:
    with pytest.raises(DiffusionError) as caught:
        plan_of(limits, **fields)
    return caught.value


def test_the_defaults_are_those_of_the_model() -> None:
    made = plan_of()
    assert made.seconds == "5.0625"
    settings = made.settings
    assert (settings.width, settings.height) == (64, 64)
    assert (settings.num_frames, settings.fps, settings.num_inference_steps) == (81, 16, 20)
    assert settings.guidance_scale == 5.0
    assert settings.quality == "auto"
    assert 0 <= settings.seed <= MAX_SEED
    assert plan_of().settings.seed != settings.seed


@pytest.mark.parametrize(
    ("fields", "frames"),
    [
        ({"seconds": "4"}, 65),  # 64: between 61 and 65, which is nearer
        ({"seconds": 4}, 65),
        ({"seconds": 4.0}, 65),
        ({"seconds": "4.1"}, 65),
        ({"seconds": "5"}, 81),
        ({"seconds": "3.9375"}, 65),  # 63, as near to 61 as to 65: the longer one
        ({"seconds": "3.93"}, 61),
        ({"seconds": "4", "fps": 8}, 33),
        ({"seconds": "1", "fps": 120}, 121),
        ({"seconds": "0.3125"}, 5),
        ({"seconds": "7.5625"}, 121),
        ({"seconds": "4", "num_frames": 65}, 65),
        ({"num_frames": 5}, 5),
        ({"fps": 1}, 81),
    ],
)
def test_the_nearest_length_is_made(fields: dict[str, Any], frames: int) -> None:
    assert plan_of(**fields).settings.num_frames == frames


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"seconds": "4"}, "4"),
        ({"seconds": 4}, "4"),
        ({"seconds": 4.5}, "4.5"),
        ({"num_frames": 65}, "4.0625"),
        ({"num_frames": 5, "fps": 24}, "0.208333"),
    ],
)
def test_seconds_are_a_text_of_what_was_asked_for_or_is_made(fields: dict[str, Any], seconds: str) -> None:
    assert plan_of(**fields).seconds == seconds


@pytest.mark.parametrize(
    "seconds",
    [
        *("", " ", "four", "4s", " 4", "4 ", "4\n", "+4", "-4", "1e1", "4.", ".5", "nan", "inf", "Infinity"),
        *("0", "0.0", "٤", "9" * 21, 0, -1, 10**400, 1e308, float("inf"), float("nan")),
        *(True, False, [], {}),
    ],
)
def test_seconds_that_are_none(seconds: object) -> None:
    with pytest.raises(DiffusionError) as caught:
        parse({"prompt": "a fox", "seconds": seconds})
    assert (caught.value.param, caught.value.code) == ("seconds", "invalid_value")
    assert "allowed: numbers above 0" in caught.value.message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"seconds": "8"}, "'seconds' is '8' at 16 frames a second; allowed: numbers from 0.3125 to 7.5625"),
        ({"seconds": 0.1}, "'seconds' is 0.1 at 16 frames a second; allowed: numbers from 0.3125 to 7.5625"),
        ({"seconds": 2, "fps": 120}, "at 120 frames a second; allowed: numbers from 0.0416667 to 1.00833"),
    ],
)
def test_a_length_that_the_model_has_not(fields: dict[str, Any], words: str) -> None:
    error = error_of(**fields)
    assert (error.param, error.code) == ("seconds", "invalid_value")
    assert words in error.message


@pytest.mark.parametrize("frames", [61, 69, True, 65.0, "65", [65]])
def test_seconds_and_frames_that_contradict(frames: object) -> None:
    error = error_of(seconds="4", num_frames=frames)
    assert (error.param, error.code) == ("num_frames", "conflicting_values")
    assert "and 65 by 'seconds' and 'fps'; allowed: one of the two" in error.message


def test_true_is_not_one_frame() -> None:
    limits = VIDEO.model_copy(update={"min_num_frames": 1})
    assert plan_of(limits, seconds=0.0625, num_frames=1).settings.num_frames == 1
    assert error_of(limits, seconds=0.0625, num_frames=True).code == "conflicting_values"


BAD_FIELDS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"prompt": None}, "prompt", "missing", "'prompt'"),
    ({"prompt": ""}, "prompt", "empty_prompt", "'prompt'"),
    ({"prompt": 1}, "prompt", "invalid_value", "1"),
    ({"prompt": SURROGATE}, "prompt", "invalid_unicode", "'prompt'"),
    ({"prompt": "x" * 32_001}, "prompt", "string_too_long", "32000"),
    ({"model": 1}, "model", "invalid_value", "'model' is 1; allowed: the id of a model"),
    ({"model": SURROGATE}, "model", "invalid_value", "'model'"),
    ({"quality": "ultra"}, "quality", "invalid_value", "'ultra'; allowed: auto"),
    ({"quality": ["low"]}, "quality", "invalid_value", "['low']"),
    ({"user": 1}, "user", "invalid_value", "'user' is 1"),
    ({"safety_identifier": SURROGATE}, "safety_identifier", "invalid_value", "'safety_identifier'"),
    ({"n": 1}, "n", "unsupported_parameter", "a job makes one video"),
    ({"stream": True}, "stream", "unsupported_parameter", "ask for its status"),
    ({"width": 64}, "width", "unsupported_parameter", "use 'size'"),
    ({"height": 64}, "height", "unsupported_parameter", "use 'size'"),
    ({"response_format": "url"}, "response_format", "unsupported_parameter", "its content route"),
    ({"sed": 1}, "sed", "unknown_parameter", "allowed: prompt, model, size, quality"),
    ({"extra_body": [1]}, "extra_body", "invalid_value", "an object of fields"),
    ({"fps": 8, "extra_body": {"fps": 9}}, "fps", "conflicting_values", "'fps' is 8, and 9 in 'extra_body'"),
    ({"extra_body": {"sed": 1}}, "sed", "unknown_parameter", "'sed' is not a known field"),
]
BAD_ON_A_MODEL: list[tuple[dict[str, Any], str, str, str]] = [
    ({"size": "65x64"}, "size", "invalid_size", "'65x64'; allowed: 'auto' (64x64)"),
    ({"size": "720x1280"}, "size", "invalid_size", "at most 128x128"),
    ({"size": 64}, "size", "invalid_size", "64"),
    ({"fps": 0}, "fps", "invalid_value", f"'fps' is 0; allowed: integers from 1 to {MAX_FPS}"),
    ({"fps": MAX_FPS + 1}, "fps", "invalid_value", f"{MAX_FPS + 1}"),
    ({"fps": True}, "fps", "invalid_value", "true"),
    ({"fps": 8.0}, "fps", "invalid_value", "8.0"),
    ({"fps": "eight"}, "fps", "invalid_value", "'eight'"),
    ({"fps": "eight", "seconds": "4"}, "fps", "invalid_value", "'eight'"),
    ({"num_frames": 6}, "num_frames", "invalid_value", "'num_frames' is 6; allowed: 5, 9, 13, ... 121"),
    ({"num_frames": 125}, "num_frames", "invalid_value", "125"),
    ({"num_frames": True}, "num_frames", "invalid_value", "true"),
    ({"seed": -1}, "seed", "invalid_value", "-1"),
    ({"seed": MAX_SEED + 1}, "seed", "invalid_value", f"{MAX_SEED}"),
    ({"seed": "x"}, "seed", "invalid_value", "'x'"),
    ({"num_inference_steps": 101}, "num_inference_steps", "invalid_value", "101"),
    ({"guidance_scale": 101}, "guidance_scale", "invalid_value", "101"),
    ({"guidance_scale": "high"}, "guidance_scale", "invalid_value", "'high'"),
    ({"negative_prompt": 1}, "negative_prompt", "invalid_value", "1"),
    ({"input_reference": "data:..."}, "input_reference", "unsupported_parameter", "text-to-video: send none"),
]


@pytest.mark.parametrize(("fields", "param", "code", "words"), BAD_FIELDS + BAD_ON_A_MODEL)
def test_what_is_refused_names_the_field_its_value_and_what_is_allowed(
    fields: dict[str, Any], param: str, code: str, words: str
) -> None:
    error = error_of(**fields)
    assert (error.param, error.code) == (param, code)
    assert words in error.message


def test_null_is_not_given() -> None:
    names = set(VideoRequest.model_fields) - {"prompt"}
    request = parse(unwrap({"prompt": "a fox", "extra_body": None, **dict.fromkeys(names), "n": None}))
    assert request == parse({"prompt": "a fox"})


def test_a_model_that_needs_an_image() -> None:
    error = error_of(IMAGE_TO_VIDEO)
    assert error.param == "input_reference"
    assert "'input_reference' is missing" in error.message


def test_a_form_has_the_types_of_json() -> None:
    """Numbers are; what looks otherwise stays a text, and is refused as one."""
    typed = from_form(
        VideoRequest,
        {
            "prompt": "7",
            "fps": "8",
            "num_frames": "9",
            "seed": "-1",
            "num_inference_steps": "2",
            "guidance_scale": "2.5",
            "seconds": "4",
            "size": "64x64",
            "input_reference": '{"image_url": "data:image/png;base64,AA=="}',
        },
    )
    assert typed == {
        "prompt": "7",
        "fps": 8,
        "num_frames": 9,
        "seed": -1,
        "num_inference_steps": 2,
        "guidance_scale": 2.5,
        "seconds": "4",
        "size": "64x64",
        "input_reference": {"image_url": "data:image/png;base64,AA=="},
    }
    as_it_is = {"fps": "8.0", "seed": "1" * 21, "num_frames": "0x9", "guidance_scale": "1e3"}
    assert from_form(VideoRequest, as_it_is) == as_it_is


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"image_url"', "is not valid JSON"),
        ("{" * 100_000, "is not valid JSON"),
        ('{"image_url": ' + "[" * 99_000, "is nested too deeply"),
        ('{"image_url": ' + "[" * 900 + "]" * 900 + "}", "is nested too deeply"),
        ('{"image_url": NaN}', "NaN is not a number"),
        ('{"image_url": "a", "image_url": "b"}', "'image_url' twice"),
    ],
)
def test_json_in_a_form_that_is_none(text: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        from_form(VideoRequest, {"input_reference": text})
    assert caught.value.status == 400
    assert words in caught.value.message
    assert len(caught.value.message) < 200


def test_a_remix_has_another_prompt_and_the_same_rest() -> None:
    source = plan_of(seed=5, num_frames=9, fps=8, size="128x64").settings.model_dump()
    assert plan_remix("a cat", source, VIDEO).model_dump() == {**source, "prompt": "a cat"}


def test_a_remix_is_checked_by_what_the_model_is_now() -> None:
    source = plan_of(num_frames=121).settings.model_dump()
    with pytest.raises(DiffusionError) as caught:
        plan_remix("a cat", source, VIDEO.model_copy(update={"max_num_frames": 81}))
    assert caught.value.param == "num_frames"
    for prompt, code in ((None, "missing"), ("", "empty_prompt"), (1, "invalid_value")):
        with pytest.raises(DiffusionError) as caught:
            plan_remix(prompt, source, VIDEO)
        assert (caught.value.param, caught.value.code) == ("prompt", code)


def post_form(app: FastAPI, fields: dict[str, Any], **files: tuple[str, bytes]) -> httpx.Response:
    """As ``multipart/form-data``, as the official clients do."""
    return send(app, "POST", VIDEOS, files={**{name: (None, text) for name, text in fields.items()}, **files})


@pytest.mark.parametrize(("fields", "param", "code", "words"), BAD_FIELDS)
def test_json_over_http(app: FastAPI, fields: dict[str, Any], param: str, code: str, words: str) -> None:
    body = json.dumps({"prompt": "a fox", **fields})
    answer = send(app, "POST", VIDEOS, content=body, headers={"content-type": "application/json"})
    assert refusal(answer) == (400, param, code)
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": ""}, "prompt", "empty_prompt"),
        ({"seconds": "four"}, "seconds", "invalid_value"),
        ({"quality": "ultra"}, "quality", "invalid_value"),
        ({"n": "1"}, "n", "unsupported_parameter"),
        ({"sed": "1"}, "sed", "unknown_parameter"),
        ({"extra_body": "{}"}, "extra_body", "invalid_value"),
        ({"prompt[text]": "a fox"}, "prompt[text]", "duplicate_field"),
        ({"user[name]": "x"}, "user", "invalid_value"),
        ({"fps": "8", "extra_body[fps]": "9"}, "fps", "conflicting_values"),
        ({"extra_body[sed]": "9"}, "sed", "unknown_parameter"),
        ({"input_reference": "{"}, "input_reference", "invalid_json"),
    ],
)
def test_a_form_over_http(app: FastAPI, fields: dict[str, str], param: str, code: str) -> None:
    assert refusal(post_form(app, {"prompt": "a fox", **fields})) == (400, param, code)


@pytest.mark.parametrize("name", ["prompt", "size", "seed", "model", "user", "size[a]", "extra_body[seed]"])
@pytest.mark.parametrize("headers", [{}, {"idempotency-key": "k"}])
def test_a_file_where_none_belongs(app: FastAPI, name: str, headers: dict[str, str]) -> None:
    files: dict[str, Any] = {name: ("seed.txt", b"1")}
    if name != "prompt":
        files["prompt"] = (None, "a fox")
    answer = send(app, "POST", VIDEOS, files=files, headers=headers)
    param = name.removeprefix("extra_body[").partition("]")[0].partition("[")[0]
    assert refusal(answer) == (400, param, "invalid_value")
    assert f"'{param}' is a file; allowed: " in answer.json()["error"]["message"]


@pytest.mark.parametrize("boundary", ["xyz", "json", "application-json"])
def test_the_boundary_of_a_form_says_nothing_of_its_type(app: FastAPI, boundary: str) -> None:
    """``{`` would be a text, and no URL, if this were taken for JSON."""
    answer = send(
        app,
        "POST",
        VIDEOS,
        content=(
            f'--{boundary}\r\ncontent-disposition: form-data; name="prompt"\r\n\r\na fox\r\n--{boundary}\r\n'
            f'content-disposition: form-data; name="input_reference"\r\n\r\n{{\r\n--{boundary}--\r\n'
        ),
        headers={"content-type": f"multipart/form-data; boundary={boundary}"},
    )
    assert refusal(answer) == (400, "input_reference", "invalid_json")
    assert "not valid JSON" in answer.json()["error"]["message"]


def test_what_is_not_refused_needs_a_model(app: FastAPI) -> None:
    fields = {"prompt": "a fox", "seconds": "4", "size": "auto", "extra_body[fps]": "8"}
    assert refusal(post_form(app, fields)) == (503, None, "not_ready")
    assert refusal(send(app, "POST", VIDEOS, json={"prompt": "a fox"})) == (503, None, "not_ready")
    answer = send(app, "POST", VIDEOS, data={"prompt": "a fox", "seed": "5"})  # urlencoded
    assert refusal(answer) == (503, None, "not_ready")
