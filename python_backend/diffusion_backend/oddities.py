"""What some pipelines do that three stages cannot repeat as it stands, and what is done about it.

This is the only place with such knowledge. It goes by what a class says of itself (the arguments it takes, its
configuration), not by the names of pipelines.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

# Arguments that a pipeline's call is always given, if it takes them.
CALL_ARGUMENTS: dict[str, Any] = {
    # Renders the nearest size of a list and resizes the picture after decoding. A request's size is made as asked.
    "use_resolution_binning": False,
    # Scales an image to the nearest size of a list (FLUX Kontext). It comes in the size that is asked for.
    "_auto_resize": False,
}

# Arguments that a pipeline's constructor is always given, if it takes them.
INIT_ARGUMENTS: dict[str, Any] = {
    # Looks at the decoded picture and blackens it when in doubt: after vae.decode, where no stage runs its code. What
    # a service lets through is its operator's decision.
    "safety_checker": None,
    "requires_safety_checker": False,
    # Writes into the decoded picture, after vae.decode, if a package for it happens to be installed.
    "add_watermarker": False,
}

# transformers classes that are built from a part of the configuration that their checkpoints hold.
NESTED_CONFIGURATIONS = {
    # PRX's text encoder is the encoder of an encoder-decoder model; diffusers' own loader picks it out, too.
    "T5GemmaEncoder": "encoder",
}


# The area in pixels to which a pipeline scales the size that it is asked for (FLUX Kontext): it is given that of the
# size itself.
AREA_ARGUMENT = "max_area"


def call_arguments(cls: type[DiffusionPipeline], width: int, height: int) -> dict[str, Any]:
    """What a call of ``cls`` for a picture of this size is given on top of the request's arguments."""
    return _accepted({**CALL_ARGUMENTS, AREA_ARGUMENT: width * height}, cls.__call__)


def default_size(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same call arguments with the choice of the size left to the pipeline."""
    kept = {name: value for name, value in arguments.items() if name != AREA_ARGUMENT}
    return {**kept, "width": None, "height": None}


def init_arguments(cls: type[DiffusionPipeline]) -> dict[str, Any]:
    """The entries of ``INIT_ARGUMENTS`` that ``cls`` takes."""
    return _accepted(INIT_ARGUMENTS, cls.__init__)


def _accepted(arguments: dict[str, Any], function: Any) -> dict[str, Any]:
    accepted = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in accepted}


def transformers_config(cls: Any, folder: Path) -> Any:
    """The configuration that a transformers class is built from."""
    config = cls.config_class.from_pretrained(folder)
    part = NESTED_CONFIGURATIONS.get(cls.__name__)
    return config if part is None else getattr(config, part)


def upcast_vae(pipe: DiffusionPipeline) -> None:
    """Turn the VAE of a pipeline to the dtype in which that pipeline decodes.

    Some VAEs overflow in float16 and say so (``force_upcast``). Pipelines that heed it (SDXL) turn them to float32
    just before they decode, inside ``__call__``; the stage that decodes does it once.
    """
    heeds = hasattr(pipe, "upcast_vae") and getattr(pipe.vae.config, "force_upcast", False)
    if heeds and pipe.vae.dtype == torch.float16:
        pipe.vae.to(torch.float32)


def picture(decoded: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W] of what the VAE of an image pipeline decoded.

    Some have a video VAE (Qwen-Image), whose one frame their ``__call__`` takes out after decoding.
    """
    return decoded[:, :, 0] if decoded.ndim == 5 else decoded
