"""The slim ``settings`` that travel from denoise to vae_decode: what it needs to decode and to report."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diffusion_backend.errors import invalid


class DecodeSettings(BaseModel):
    """No prompt is among them. ``decode_arguments`` are the pipeline's further arguments of ``vae.decode``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    width: int = Field(gt=0)
    height: int = Field(gt=0)
    quality: str
    seed: int
    guidance_scale: float | None
    num_inference_steps: int
    step: int
    is_final: bool
    decode_arguments: dict[str, bool | int | float | str | None]
    timings: dict[str, float]


def parse_decode_settings(text: str | None) -> DecodeSettings:
    """Read the ``settings`` tensor.

    Raises:
        DiffusionError: INVALID_ARG, naming the first field that is wrong.
    """
    if text is None:
        raise invalid("settings", "'settings' is missing", "missing_input")
    try:
        return DecodeSettings.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "settings"
        raise invalid(
            "settings", f"'settings' is not the denoise stage's output: {field}: {first['msg']}"
        ) from None
