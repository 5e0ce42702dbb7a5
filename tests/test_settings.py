"""Settings: every field is filled from the model's limits and refused by name when it is outside them."""

from __future__ import annotations

from pathlib import Path

import pytest
from diffusion_backend.errors import DiffusionError, Status, show
from diffusion_backend.model_config import read_model_config
from diffusion_backend.quality import QUALITIES, Tier, resolve_tier
from diffusion_backend.settings import (
    MAX_PROMPT_CHARACTERS,
    MAX_SEED,
    ModelLimits,
    check,
    parse_limits,
    parse_size,
    resolve,
)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def limits() -> ModelLimits:
    return ModelLimits.model_validate(read_model_config(ROOT / "model_repository/emoji-flux").parameters)


def test_defaults_are_the_models(limits: ModelLimits) -> None:
    settings = resolve(limits, "a fox", None, {})
    assert (settings.width, settings.height, settings.num_inference_steps) == (64, 64, 20)
    assert (settings.guidance_scale, settings.negative_prompt, settings.quality) == (2.0, "", "auto")
    assert 0 <= settings.seed < 2**32


def test_none_means_not_given(limits: ModelLimits) -> None:
    given = resolve(limits, "a fox", None, {"seed": 3, "width": None, "guidance_scale": None})
    assert given == resolve(limits, "a fox", "", {"seed": 3})


def test_seeds_differ_when_none_is_given(limits: ModelLimits) -> None:
    assert len({resolve(limits, "a fox", None, {}).seed for _ in range(20)}) > 15


@pytest.mark.parametrize(
    "parameters",
    [
        {"width": 8, "height": 128},
        {"num_inference_steps": 1},
        {"num_inference_steps": 200},
        {"guidance_scale": 0},
        {"guidance_scale": 100.0},
        {"seed": 0},
        {"seed": MAX_SEED},
        *({"quality": quality} for quality in QUALITIES),
    ],
)
def test_accepted(limits: ModelLimits, parameters: dict[str, object]) -> None:
    settings = resolve(limits, "a fox", None, parameters).model_dump()
    assert {name: settings[name] for name in parameters} == parameters


@pytest.mark.parametrize(
    ("parameters", "param", "words"),
    [
        ({"width": 65}, "width", "65; allowed: multiples of 8 from 8 to 128"),
        ({"width": 136}, "width", "136"),
        ({"height": 0}, "height", "0"),
        ({"height": "64"}, "height", "'64'"),
        ({"height": 64.0}, "height", "64.0"),
        ({"num_inference_steps": 0}, "num_inference_steps", "0; allowed: integers from 1 to 200"),
        ({"num_inference_steps": 201}, "num_inference_steps", "201"),
        ({"num_inference_steps": True}, "num_inference_steps", "true"),
        ({"guidance_scale": -0.1}, "guidance_scale", "-0.1; allowed: numbers from 0 to 100"),
        ({"guidance_scale": float("nan")}, "guidance_scale", "nan"),
        ({"guidance_scale": float("inf")}, "guidance_scale", "inf"),
        ({"guidance_scale": "2"}, "guidance_scale", "'2'"),
        ({"guidance_scale": 10**400}, "guidance_scale", "1000"),
        ({"seed": -1}, "seed", "-1"),
        ({"seed": MAX_SEED + 1}, "seed", str(MAX_SEED)),
        ({"seed": 1.5}, "seed", "1.5"),
        ({"quality": "ultra"}, "quality", "'ultra'; allowed: auto, standard, lossless"),
        ({"quality": 1}, "quality", "1"),
        ({"steps": 3}, "steps", "allowed: width, height, num_inference_steps, guidance_scale, seed, quality"),
    ],
)
def test_refused(limits: ModelLimits, parameters: dict[str, object], param: str, words: str) -> None:
    with pytest.raises(DiffusionError) as caught:
        resolve(limits, "a fox", None, parameters)
    assert (caught.value.param, caught.value.status) == (param, Status.INVALID_ARG)
    assert words in caught.value.message


@pytest.mark.parametrize(
    "prompt",
    ["🦊" * MAX_PROMPT_CHARACTERS, "a\x00b\x00", "مرحبا", "\u202eabc", "a" * MAX_PROMPT_CHARACTERS, "x\n"],
)
def test_any_unicode_prompt(limits: ModelLimits, prompt: str) -> None:
    assert resolve(limits, prompt, None, {}).prompt == prompt


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ("", "empty_prompt"),
        (" \n\t\u3000", "empty_prompt"),
        ("a" * (MAX_PROMPT_CHARACTERS + 1), "string_too_long"),
        ("fox \ud800", "invalid_unicode"),
        (None, "missing"),
        (["a"], "invalid_value"),
    ],
)
def test_bad_prompts(limits: ModelLimits, prompt: object, code: str) -> None:
    with pytest.raises(DiffusionError) as caught:
        resolve(limits, prompt, None, {})
    assert (caught.value.param, caught.value.code) == ("prompt", code)
    caught.value.to_text().encode()  # the error itself can be sent


def test_an_image_is_varied_without_a_prompt(limits: ModelLimits) -> None:
    assert resolve(limits, "", None, {}, images=1).prompt == ""
    for options in ({"images": 1, "has_mask": True}, {}):
        with pytest.raises(DiffusionError, match="'prompt' is ''; allowed: a text that is not blank"):
            resolve(limits, "", None, {}, **options)
    with pytest.raises(DiffusionError, match="'prompt' is ' '"):
        resolve(limits, " ", None, {}, images=1)


def test_negative_prompt_needs_guidance(limits: ModelLimits) -> None:
    assert resolve(limits, "a fox", "blue", {}).negative_prompt == "blue"
    with pytest.raises(DiffusionError, match="no effect with guidance_scale 1"):
        resolve(limits, "a fox", "blue", {"guidance_scale": 1})


def test_a_model_without_guidance_or_negative_prompt(limits: ModelLimits) -> None:
    plain = limits.model_copy(
        update={"guidance_argument": None, "default_guidance_scale": None, "default_negative_prompt": None}
    )
    assert resolve(plain, "a fox", "", {}).negative_prompt is None
    for negative, parameters in (("blue", {}), (None, {"guidance_scale": 2})):
        with pytest.raises(DiffusionError, match="takes no"):
            resolve(plain, "a fox", negative, parameters)


@pytest.mark.parametrize(
    ("parameter", "value", "words"),
    [
        ("size_multiple", "0", "greater than 0"),
        ("max_width", "abc", "valid integer"),
        ("default_width", "60", "'width' is 60; allowed: multiples of 8"),
        ("default_num_inference_steps", "500", "allowed: integers from 1 to 200"),
        ("default_guidance_scale", "nan", "finite number"),
        ("dtype", "fp16", "'auto', 'float32', 'float16' or 'bfloat16'"),
        ("colour", "red", "not permitted"),
    ],
)
def test_parameters_edited_badly_are_named(parameter: str, value: str, words: str) -> None:
    parameters = read_model_config(ROOT / "model_repository/emoji-flux").parameters
    with pytest.raises(ValueError, match=words):
        parse_limits({**parameters, parameter: value})


def test_check_refuses_forged_settings(limits: ModelLimits) -> None:
    fields = resolve(limits, "a fox", None, {"seed": 1}).model_dump()
    assert check(limits, fields).model_dump() == fields
    for forged in ({**fields, "width": 10**9}, {**fields, "extra": 1}, {"prompt": "a fox"}):
        with pytest.raises(DiffusionError):
            check(limits, forged)


@pytest.mark.parametrize(
    ("size", "expected"), [(None, (64, 64)), ("auto", (64, 64)), ("128x8", (128, 8)), ("064x64", (64, 64))]
)
def test_sizes(limits: ModelLimits, size: object, expected: tuple[int, int]) -> None:
    assert parse_size(size, limits) == expected


@pytest.mark.parametrize(
    "size",
    [
        "",
        "64",
        "64x",
        "64X64",
        "64x65",
        "0x0",
        "136x64",
        "-8x8",
        "64x64 ",
        "9999999x8",
        "٦٤x64",
        64,
        True,
        [],
    ],
)
def test_bad_sizes(limits: ModelLimits, size: object) -> None:
    with pytest.raises(DiffusionError, match="both multiples of 8, at least 8x8, at most 128x128") as caught:
        parse_size(size, limits)
    assert (caught.value.param, caught.value.code) == ("size", "invalid_size")


def test_the_quality_table() -> None:
    for default in Tier:
        assert {resolve_tier(quality, default) for quality in (None, "auto", "standard")} == {default}
    assert {resolve_tier(q, Tier.FAST) for q in ("lossless", "xhigh", "max", "hd")} == {Tier.LOSSLESS}
    assert {resolve_tier(q, Tier.LOSSLESS) for q in ("low", "medium", "high")} == {Tier.FAST}


def test_an_error_survives_triton() -> None:
    error = DiffusionError("'seed' is {\"message\": 1}", param="seed", code="x", status=Status.UNAVAILABLE)
    back = DiffusionError.from_text("in ensemble 'emoji-flux', " + error.to_text())
    assert back is not None
    assert vars(back) == vars(error)
    assert DiffusionError.from_text("Request timeout expired") is None


def test_show_is_short_and_printable() -> None:
    assert len(show("a" * 1000)) < 100
    show("\ud800").encode()


@pytest.fixture(scope="module")
def video(limits: ModelLimits) -> ModelLimits:
    """A model like Wan: clips of 1, 5, 9, ... frames."""
    fields = {
        "tasks": ("text-to-video",),
        "frames_argument": "num_frames",
        "default_num_frames": 81,
        "min_num_frames": 1,
        "max_num_frames": 161,
        "num_frames_step": 4,
        "default_fps": 16,
    }
    return ModelLimits.model_validate({**limits.model_dump(), **fields})


def test_frames_of_a_clip(video: ModelLimits) -> None:
    settings = resolve(video, "a fox", None, {})
    assert (settings.num_frames, settings.fps, settings.progress) == (81, 16, False)
    assert resolve(video, "a fox", None, {"num_frames": 161, "fps": 120}).num_frames == 161


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"num_frames": 80}, r"'num_frames' is 80; allowed: 1, 5, 9, \.\.\. 161 \(in steps of 4\)"),
        ({"num_frames": 165}, "'num_frames' is 165; allowed: 1, 5, 9"),
        ({"num_frames": 5.0}, r"'num_frames' is 5\.0"),
        ({"num_frames": 10**30}, "'num_frames' is 1000"),
        ({"fps": 121}, "'fps' is 121; allowed: integers from 1 to 120"),
        ({"partial_images": 1}, "'partial_images' is 1; allowed: 0, since this model makes video"),
        ({"trajectory": True}, "'trajectory' is true; allowed: false, since this model makes video"),
        ({"progress": 1}, "'progress' is 1; allowed: true, false"),
    ],
)
def test_refused_of_a_clip(video: ModelLimits, parameters: dict[str, object], words: str) -> None:
    with pytest.raises(DiffusionError, match=words) as caught:
        resolve(video, "a fox", None, parameters)
    assert caught.value.param == next(iter(parameters))


@pytest.mark.parametrize("name", ["num_frames", "fps"])
def test_pictures_have_no_frames(limits: ModelLimits, name: str) -> None:
    with pytest.raises(DiffusionError, match=f"'{name}' is 5; this model makes pictures, not video"):
        resolve(limits, "a fox", None, {name: 5})


def test_a_model_of_video_without_limits_of_frames(video: ModelLimits) -> None:
    fields = video.model_dump(exclude={"num_frames_step"})
    with pytest.raises(ValueError, match="'num_frames_step'"):
        parse_limits(fields)
