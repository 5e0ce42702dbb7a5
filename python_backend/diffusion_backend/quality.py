"""The quality table: which VAE decode tier a request's ``quality`` asks for."""

from __future__ import annotations

from enum import StrEnum

from diffusion_backend.errors import invalid, show


class Tier(StrEnum):
    """How the VAE decodes: with the untouched module, or with the rewritten decoder."""

    LOSSLESS = "lossless"
    FAST = "fast"


DEFAULT = ("auto", "standard")
TIERS = {
    "lossless": Tier.LOSSLESS,
    "xhigh": Tier.LOSSLESS,
    "max": Tier.LOSSLESS,
    "hd": Tier.LOSSLESS,
    "low": Tier.FAST,
    "medium": Tier.FAST,
    "high": Tier.FAST,
}
QUALITIES = (*DEFAULT, *TIERS)


def resolve_tier(quality: object, default: Tier) -> Tier:
    """The tier for a request's quality; ``None``, ``auto`` and ``standard`` mean the model's default.

    Raises:
        DiffusionError: INVALID_ARG, naming the allowed values.
    """
    if quality is None or quality in DEFAULT:
        return default
    if isinstance(quality, str) and quality in TIERS:
        return TIERS[quality]
    raise invalid("quality", f"'quality' is {show(quality)}; allowed: {', '.join(QUALITIES)}")
