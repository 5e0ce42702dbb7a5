"""Whether a model's rows are in a batch what they are alone: tried when the denoise stage loads.

Two requests that differ in embeddings, seed and number of steps are denoised alone and then together. A model that
mixes its rows, or takes an argument for shared that is not, gives itself away by differences far above rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline

from diffusion_backend import batching, loading, seams, values
from diffusion_backend.conditioning import Call, Conditioning
from diffusion_backend.rows import Denoiser, Row
from diffusion_backend.settings import ModelLimits, Settings

logger = logging.getLogger(__name__)

# Of the largest latent. Rounding is 1e-6 to 1e-5 in float32 and grows with the dtype's epsilon; mixed rows are near 1.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_STEPS = (2, 3)
_NOISE = 0.5  # of the embeddings; warmup samples hold zeros


@dataclass(frozen=True)
class BatchingCheck:
    """``difference`` is the largest one, as a share of the largest latent. ``joined`` says whether rows ever met."""

    difference: float
    tolerance: float
    joined: bool

    @property
    def passed(self) -> bool:
        return self.joined and self.difference <= self.tolerance


def check_batching(
    pipe: DiffusionPipeline, limits: ModelLimits, settings: Settings, sample: Conditioning, dtype: Any
) -> BatchingCheck:
    """Denoise two variants of ``sample`` alone and together. ``dtype``: what tensors of ``sample`` stand for."""

    def work(number: int) -> Callable[[Denoiser | None], torch.Tensor]:
        asked = settings.model_copy(update={"seed": number, "num_inference_steps": _STEPS[number]})
        calls = [Call(call.name, _vary(call.result, number)) for call in sample.calls]

        def run(denoiser: Denoiser | None) -> torch.Tensor:
            arguments = seams.call_arguments(pipe, limits, asked, sample.images)
            return seams.replay(
                pipe, calls, arguments, asked.seed, recorded_dtype=dtype, denoiser=denoiser
            ).latents

        return run

    works = [work(number) for number in range(len(_STEPS))]
    tolerance = TOLERANCES.get(loading.denoiser_dtype(pipe), max(TOLERANCES.values()))
    try:
        alone = [run(None) for run in works]
        together, joined = _run_together(works)
    except Exception:
        logger.exception("the batching check failed")
        return BatchingCheck(float("inf"), tolerance, joined=True)
    largest = max(latents.abs().max().item() for latents in alone)
    difference = max((a - b).abs().max().item() for a, b in zip(alone, together, strict=True))
    return BatchingCheck(difference / max(largest, 1e-6), tolerance, joined)


def _run_together(works: list[Callable[[Denoiser | None], torch.Tensor]]) -> tuple[list[torch.Tensor], bool]:
    rows = [Row(work) for work in works]
    joined = False
    with torch.no_grad():
        for row in rows:
            row.start()
        while standing := [row for row in rows if row.call]:
            batch = [row for row in standing if row.call.key == standing[0].call.key]  # type: ignore[union-attr]
            joined = joined or len(batch) > 1
            outputs = batching.forward([row.call for row in batch if row.call])
            for row, output in zip(batch, outputs, strict=True):
                row.resume(output)
    return [row.result for row in rows], joined


def _vary(result: Any, seed: int) -> Any:
    """``result`` with noise on the embeddings: tensors with a row axis of one, and entries of lists (one a row).

    Positions and masks stay as they are.
    """
    generator = torch.Generator("cpu").manual_seed(seed)

    def add_noise(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        noise = torch.randn(tensor.shape, generator=generator) * _NOISE
        return tensor + noise.to(tensor.dtype)

    def vary(value: Any) -> Any:
        if isinstance(value, list):
            return [values.map_tensors(entry, add_noise) for entry in value]
        if isinstance(value, tuple):
            return tuple(vary(part) for part in value)
        return values.map_tensors(value, lambda t: add_noise(t) if t.ndim > 1 and len(t) == 1 else t)

    return vary(result)
