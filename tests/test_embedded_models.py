"""What holds for each model that is in the repository: small enough for it, and with the defaults of its recipe."""

from __future__ import annotations

import json
from typing import Any

import pytest
import train_flux
import train_wan
from safetensors import safe_open

from tests.running_server import ROOT


@pytest.mark.parametrize(("model", "modules"), [("emoji-flux", 4), ("emoji-wan", 3)])
def test_weights_are_small_and_half_precision(model: str, modules: int) -> None:
    """At most 16 MB in all, and every tensor fp16."""
    folder = ROOT / "model_repository" / model
    weights = sorted((folder / "pipeline").rglob("*.safetensors"))
    assert len(weights) == modules
    assert sum(path.stat().st_size for path in weights) <= 16_000_000
    assert not [path for pattern in ("*.bin", "*.pt", "*.ckpt") for path in folder.rglob(pattern)]
    for path in weights:
        with safe_open(path, "pt") as tensors:
            assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"F16"}, path  # noqa: SIM118


@pytest.mark.parametrize(
    ("model", "defaults"),
    [("emoji-flux", train_flux.SERVING_DEFAULTS), ("emoji-wan", train_wan.SERVING_DEFAULTS)],
)
def test_serving_defaults_are_those_of_the_recipe(model: str, defaults: dict[str, Any]) -> None:
    """Retraining gives a folder with the same defaults."""
    config = ROOT / "model_repository" / model / "pipeline/generation_config.json"
    assert json.loads(config.read_text()) == defaults
