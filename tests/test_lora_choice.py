"""Which LoRAs a request asks for: all forms of it, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from diffusion_backend.errors import DiffusionError, Status
from diffusion_backend.lora_choice import MAX_WEIGHT, check_loras, to_text
from diffusion_backend.model_config import read_model_config
from diffusion_backend.settings import ModelLimits, Settings, check, parse_limits, resolve

pytestmark = pytest.mark.parallel

ROOT = Path(__file__).resolve().parents[1]
KNOWN = {"pixel": "/a", "ink.v2": "/b", "wool": "/c"}


@pytest.fixture(scope="module")
def parameters() -> dict[str, str]:
    return read_model_config(ROOT / "model_repository/emoji-flux").parameters


@pytest.fixture(scope="module")
def limits(parameters: dict[str, str]) -> ModelLimits:
    return parse_limits({**parameters, "loras": json.dumps(KNOWN)})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ()),
        ({}, ()),
        ([], ()),
        ("pixel", (("pixel", 1.0),)),
        ("ink.v2:0.5", (("ink.v2", 0.5),)),
        ("wool:-1e-1, pixel:+2.", (("pixel", 2.0), ("wool", -0.1))),
        ("pixel:0", (("pixel", 0.0),)),
        ({"wool": 2, "ink.v2": 0.25}, (("ink.v2", 0.25), ("wool", 2.0))),
        ([["wool", 20], ("ink.v2", -20.0)], (("ink.v2", -20.0), ("wool", 20.0))),
    ],
)
def test_accepted(value: Any, expected: Any) -> None:
    assert check_loras(KNOWN, value) == expected
    assert check_loras(KNOWN, to_text(expected) or None) == expected
    assert check_loras(KNOWN, json.loads(json.dumps(expected))) == expected


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("", "names ''; allowed: ink.v2, pixel, wool"),
        ("pixel,", "names ''"),
        ("ink", "names 'ink'"),
        ("Pixel:1", "names 'Pixel'"),
        ({"../etc": 1.0}, "names '../etc'"),
        ([[1, 1.0]], "names 1"),
        ("pixel,pixel:0.5", "'pixel' twice"),
        ([["wool", 1], ["wool", 1]], "'wool' twice"),
        ("pixel:", "weight ''; allowed: numbers from -20 to 20"),
        ("pixel:nan", "weight 'nan'"),
        ("pixel:inf", "weight 'inf'"),
        ("pixel:1_0", "weight '1_0'"),
        ("pixel:0x1", "weight '0x1'"),
        ("pixel:1:2", "weight '1:2'"),
        ("pixel:٣", "weight"),
        ("pixel:1e999", "weight inf"),
        ("pixel:20.1", "weight 20.1"),
        ({"pixel": "0.5"}, "weight '0.5'"),
        ({"pixel": None}, "weight null"),
        ({"pixel": True}, "weight true"),
        ({"pixel": float("nan")}, "weight nan"),
        ({"pixel": float("-inf")}, "weight -inf"),
        ({"pixel": 10**400}, "weight 1000"),
        (1, "'lora' is 1; allowed: 'NAME'"),
        (["pixel"], "'lora' is ['pixel']; allowed: 'NAME'"),
    ],
)
def test_refused(value: Any, words: str) -> None:
    with pytest.raises(DiffusionError) as caught:
        check_loras(KNOWN, value)
    error = caught.value
    assert words in error.message
    assert (error.param, error.status) == ("lora", Status.INVALID_ARG)


def test_a_model_without_loras_says_so(parameters: dict[str, str]) -> None:
    limits = parse_limits(parameters)
    assert limits.loras == {}
    assert resolve(limits, "a fox", None, {}).loras == ()
    with pytest.raises(DiffusionError, match="this model has no LoRAs") as caught:
        resolve(limits, "a fox", None, {"lora": "pixel"})
    assert caught.value.code == "unknown_lora"


def test_settings_carry_them_and_ask_for_them_again(limits: ModelLimits) -> None:
    settings = resolve(limits, "a fox", None, {"lora": f"wool:{-MAX_WEIGHT},pixel:0.1", "seed": 1})
    assert settings.loras == (("pixel", 0.1), ("wool", -20.0))
    travelled = json.loads(json.dumps(settings.model_dump()))
    assert check(limits, travelled) == Settings.model_validate(travelled) == settings
    assert resolve(limits, "a fox", None, settings.to_parameters()) == settings


def test_settings_of_before_there_were_loras_have_none(limits: ModelLimits) -> None:
    """Jobs in an adapter's database, and files of warmup samples."""
    settings = resolve(limits, "a fox", None, {"seed": 1})
    old = {name: value for name, value in settings.model_dump().items() if name != "loras"}
    assert check(limits, old) == Settings.model_validate(old) == settings
    assert "lora" not in settings.to_parameters()


@pytest.mark.parametrize("loras", ["[]", "{", '{"a": 1}', "1"])
def test_a_list_that_is_none_is_named(parameters: dict[str, str], loras: str) -> None:
    with pytest.raises(ValueError, match="parameter 'loras"):
        parse_limits({**parameters, "loras": loras})
