"""All families, in the order of the table."""

from __future__ import annotations

from tests.families import dit, flux, stable_diffusion, video, wan
from tests.families.family import Family

FAMILIES: tuple[Family, ...] = (
    *stable_diffusion.FAMILIES,
    *flux.FAMILIES,
    *dit.FAMILIES,
    *wan.FAMILIES,
    *video.FAMILIES,
)
