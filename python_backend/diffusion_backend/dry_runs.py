"""A pipeline run through the seams without its weights: which shapes and sizes come out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from diffusion_backend import conditioning, loading, seams
from diffusion_backend.errors import unusable
from diffusion_backend.loading import PipelineFolder
from diffusion_backend.stage_names import Stage
from diffusion_backend.task_pipelines import pipelines_by_task


@dataclass(frozen=True)
class Decoded:
    """The size of a picture or clip, in pixels, and how many frames a clip has."""

    width: int
    height: int
    num_frames: int | None


class DryRuns:
    """The three stages of a pipeline whose own components compute shapes only, for each of its tasks.

    Each run draws from a generator of its own, so runs do not depend on their order.
    """

    def __init__(self, pipeline: PipelineFolder) -> None:
        self._pipeline = pipeline
        self.encode, denoise, self._decode = (
            loading.load_dry(pipeline, stage, methods=seams.STAND_IN_METHODS) for stage in Stage
        )
        self.by_task = pipelines_by_task(self.encode)
        self._denoise = pipelines_by_task(denoise)

    def take_images(self) -> None:
        """From now on the encode stage encodes images, too."""
        self.encode = loading.load_dry(
            self._pipeline, Stage.ENCODE, methods=seams.STAND_IN_METHODS, takes_image=True
        )
        self.by_task = pipelines_by_task(self.encode)

    def record(self, task: str, arguments: dict[str, Any]) -> list[conditioning.Call]:
        """What the encode stage records."""
        return seams.record(self.by_task[task], _seeded(arguments))

    def denoise(self, task: str, arguments: dict[str, Any]) -> seams.Denoised:
        """Zero latents of the right shape, by way of encode and denoise."""
        calls = self.record(task, arguments)
        return seams.replay(self._denoise[task], calls, _seeded(arguments), seed=0)

    def decode(self, task: str, arguments: dict[str, Any]) -> Decoded:
        """What comes out at the end."""
        denoised = self.denoise(task, arguments)
        vae = self._decode.vae
        decode_arguments = seams.read_decode_arguments(denoised.decode_arguments)
        made = vae.decode(denoised.latents, return_dict=False, **decode_arguments)[0]
        is_clip = seams.makes_video(self.encode)
        if is_clip and (made.ndim != 5 or denoised.latents.ndim != 5):
            raise unusable("its VAE decodes a clip frame by frame, which is not served")
        return Decoded(made.shape[-1], made.shape[-2], made.shape[2] if is_clip else None)


def _seeded(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, "generator": torch.Generator("cpu").manual_seed(0)}
