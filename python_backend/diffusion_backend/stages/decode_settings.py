"""The slim ``settings`` that travel from denoise to vae_decode: what it needs to decode and to report."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from diffusion_backend.errors import invalid
from diffusion_backend.quality import resolve_tier
from diffusion_backend.settings import (
    MAX_SEED,
    ModelLimits,
    Settings,
    check_fps,
    check_num_frames,
    parse_size,
)


class DecodeSettings(BaseModel):
    """No prompt is among them. ``decode_arguments`` are the pipeline's further arguments of ``vae.decode``, as
    ``values.to_json`` writes them. ``error`` is a ``DiffusionError``'s text, which vae_decode answers instead of a
    picture: an error of denoise itself, while a preview of the same request is decoded, would leave a request that
    tritonserver 2.51 never counts out."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    width: int = Field(gt=0)
    height: int = Field(gt=0)
    task: str
    quality: str
    seed: int = Field(ge=0, le=MAX_SEED)
    guidance_scale: float | None = Field(ge=0)
    num_inference_steps: int = Field(gt=0)
    step: int = Field(ge=0)
    is_final: bool
    num_frames: int | None
    fps: int | None
    error: str | None = None
    decode_arguments: dict[str, JsonValue]
    timings: dict[Literal["encode_seconds", "denoise_seconds"], Annotated[float, Field(ge=0)]]

    @classmethod
    def of(
        cls,
        settings: Settings,
        *,
        decode_arguments: dict[str, JsonValue],
        timings: dict[Any, float],
        step: int | None = None,
    ) -> Self:
        """Those of a request whose last step is done, or of its preview after ``step``."""
        return cls(
            width=settings.width,
            height=settings.height,
            task=settings.task,
            quality=settings.quality,
            seed=settings.seed,
            guidance_scale=settings.guidance_scale,
            num_inference_steps=settings.num_inference_steps,
            step=settings.num_inference_steps if step is None else step,
            is_final=step is None,
            num_frames=settings.num_frames,
            fps=settings.fps,
            decode_arguments=decode_arguments,
            timings=timings,
        )

    def info(self) -> dict[str, Any]:
        """What a client is told of them; of frames only where there are some."""
        hidden = {"decode_arguments", "timings", "error"}
        return self.model_dump(exclude=hidden if self.num_frames else {*hidden, "num_frames", "fps"})


def parse_decode_settings(text: str | None, limits: ModelLimits) -> DecodeSettings:
    """Read the ``settings`` tensor; the size is within the model's limits.

    Raises:
        DiffusionError: INVALID_ARG, naming the first field that is wrong.
    """
    if text is None:
        raise invalid("settings", "'settings' is missing", "missing_input")
    try:
        settings = DecodeSettings.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "settings"
        raise invalid(
            "settings", f"'settings' is not the denoise stage's output: {field}: {first['msg']}"
        ) from None
    parse_size(f"{settings.width}x{settings.height}", limits)
    check_num_frames(limits, settings.num_frames)
    check_fps(limits, settings.fps)
    resolve_tier(settings.quality, limits.default_quality)
    return settings
