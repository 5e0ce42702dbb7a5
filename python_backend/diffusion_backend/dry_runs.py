"""A pipeline run through the seams without its weights: which shapes and sizes come out."""

from __future__ import annotations

from typing import Any

import torch

from diffusion_backend import conditioning, loading, seams
from diffusion_backend.loading import PipelineFolder
from diffusion_backend.stage_names import Stage


class DryRuns:
    """The three stages of a pipeline whose own components compute shapes only.

    Each run draws from a generator of its own, so runs do not depend on their order.
    """

    def __init__(self, pipeline: PipelineFolder) -> None:
        self.encode, self._denoise, self._decode = (
            loading.load_dry(pipeline, stage, methods=seams.STAND_IN_METHODS) for stage in Stage
        )

    def record(self, arguments: dict[str, Any]) -> list[conditioning.Call]:
        """What the encode stage records."""
        return seams.record(self.encode, _seeded(arguments))

    def denoise(self, arguments: dict[str, Any]) -> seams.Denoised:
        """Zero latents of the right shape, by way of encode and denoise."""
        return seams.replay(self._denoise, self.record(arguments), _seeded(arguments), seed=0)

    def picture_size(self, arguments: dict[str, Any]) -> tuple[int, int]:
        """The (width, height) of the picture that comes out at the end."""
        denoised = self.denoise(arguments)
        vae = self._decode.vae
        decode_arguments = seams.read_decode_arguments(denoised.decode_arguments)
        image = vae.decode(denoised.latents, return_dict=False, **decode_arguments)[0]
        return image.shape[-1], image.shape[-2]


def _seeded(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, "generator": torch.Generator("cpu").manual_seed(0)}
