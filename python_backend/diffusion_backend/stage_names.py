"""The three stages and what their Triton models are called. Nothing here imports torch."""

from __future__ import annotations

from enum import StrEnum


class Stage(StrEnum):
    """The three stages, in the order in which a request passes them."""

    ENCODE = "encode"
    DENOISE = "denoise"
    VAE_DECODE = "vae_decode"


def stage_model(model: str, stage: Stage) -> str:
    """The Triton model that is ``stage`` of the ensemble ``model``."""
    return f"{model}_{stage.value}"
