"""What an operator may write into a stage's ``config.pbtxt``, and what is said of the rest."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from diffusion_backend.errors import DiffusionError
from diffusion_backend.stages import common
from diffusion_backend.stages.common import StageConfig

from tests.running_server import ROOT


def config(**parameters: str) -> StageConfig:
    return StageConfig(
        model="wan_vae_decode",
        instance="wan_vae_decode_0",
        limits=None,  # type: ignore[arg-type]
        source="",
        device=torch.device("cpu"),
        dtype=None,
        parameters=parameters,
    )


@pytest.mark.parametrize("text", ["0", "40", "1e2", " 12.5 "])
def test_numbers(text: str) -> None:
    assert config(size=text).number("size", at_least=0) == float(text)


@pytest.mark.parametrize("text", ["many", "", "nan", "-1", "inf", "-inf", "1e999", "40 dB"])
def test_no_numbers(text: str) -> None:
    said = (
        f"the parameter 'size' in the config.pbtxt of wan_vae_decode is {text!r}; allowed: numbers from 0.5"
    )
    with pytest.raises(DiffusionError, match=f"^{re.escape(said)}$"):
        config(size=text).number("size", at_least=0.5)


@pytest.mark.parametrize("text", ["1", "16777216"])
def test_integers(text: str) -> None:
    assert config(size=text).integer("size", at_least=1) == int(text)


@pytest.mark.parametrize(
    "text", ["0", "-3", "1.5", "1e3", "", "nan", "16 MiB", "1_000", "9" * 5000, "\u0663"]
)
def test_no_integers(text: str) -> None:
    with pytest.raises(
        DiffusionError, match=r"'size' in .* wan_vae_decode is '.*'; allowed: integers from 1$"
    ):
        config(size=text).integer("size", at_least=1)


def test_a_parameter_that_is_missing_is_named() -> None:
    for read in (config().parameter, lambda name: config().integer(name, 1)):
        with pytest.raises(
            DiffusionError, match="wan_vae_decode has no parameter 'size': add the model again"
        ):
            read("size")


@pytest.mark.parametrize("model_config", [{}, {"parameters": {}}])
def test_a_stage_whose_ensemble_is_not_named(model_config: dict[str, object], tmp_path: Path) -> None:
    args = {
        "model_config": json.dumps(model_config),
        "model_name": "wan_encode",
        "model_repository": str(tmp_path / "wan_encode"),
    }
    with pytest.raises(DiffusionError, match="wan_encode has no parameter 'ensemble'"):
        common.start_stage(args)


@pytest.mark.parametrize(
    ("stage", "name", "low", "is_whole"),
    [
        ("encode", "encoder_cache_bytes", 0, True),
        ("denoise", "max_queued_requests", 1, True),
        ("denoise", "max_batch_rows", 0, False),
        ("vae_decode", "fast_path_min_psnr_db", 0, False),
        ("vae_decode", "max_gpu_batch_rows", 0, False),
        ("vae_decode", "vae_scale_factor", 1, True),
    ],
)
def test_what_add_writes_is_allowed(stage: str, name: str, low: float, is_whole: bool) -> None:
    text = (ROOT / f"model_repository/emoji-flux_{stage}/config.pbtxt").read_text()
    (value,) = re.findall(rf'key: "{name}" value: {{ string_value: "(.*?)" }}', text)
    read = config(**{name: value})
    assert math.isfinite(read.integer(name, int(low)) if is_whole else read.number(name, low))
