"""Which of the pictures that wait together are decoded as one batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from diffusion_backend.quality import Tier
from diffusion_backend.stages.decode_settings import DecodeSettings


@dataclass(frozen=True)
class Work:
    """One request's: ``latents`` [1, C, H, W], or [1, C, F, H, W], float32. ``index`` is its place in ``execute``.

    ``tier`` is that of the decoder that is going to run, not of the quality asked for. ``overlay`` are the pixels that
    stay, [H, W, 4], where a mask says that some do.
    """

    index: int
    request_id: str
    latents: np.ndarray[Any, Any]
    settings: DecodeSettings
    tier: Tier
    overlay: np.ndarray[Any, Any] | None = None

    @property
    def key(self) -> Any:
        """What is equal among those that may be decoded as one batch: never that of a lossless one."""
        if self.tier is Tier.LOSSLESS:
            return self.index
        return self.latents.shape, json.dumps(self.settings.decode_arguments, sort_keys=True)


def group(works: list[Work], max_pixels: float) -> Iterator[list[Work]]:
    """Batches of one key and at most so many pixels; a picture that is larger has one of its own."""
    groups: dict[Any, list[Work]] = {}
    for work in works:
        groups.setdefault(work.key, []).append(work)
    for members in groups.values():
        pixels = members[0].settings.width * members[0].settings.height
        # The operator may have named any number of pixels, too large ones for an int, too.
        count = max(1, int(min(max_pixels / pixels, len(members))))
        yield from (members[start : start + count] for start in range(0, len(members), count))
