"""Which pictures are decoded as one batch, and whose a failure is."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from diffusion_backend.errors import invalid
from diffusion_backend.quality import Tier
from diffusion_backend.stages.decode_batches import Work, group
from diffusion_backend.stages.decode_settings import DecodeSettings
from diffusion_backend.stages.vae_decode import TritonPythonModel

DEFAULT = 64 * 64


def work(index: int, tier: Tier = Tier.FAST, side: int = 64, **decode_arguments: Any) -> Work:
    settings = DecodeSettings(
        width=side,
        height=side,
        quality="high",
        seed=0,
        guidance_scale=None,
        num_inference_steps=1,
        step=1,
        is_final=True,
        num_frames=None,
        fps=None,
        decode_arguments=decode_arguments,
        timings={},
    )
    latents = np.zeros((1, 4, side // 8, side // 8), np.float32)
    return Work(index, str(index), latents, settings, tier)


def indices(works: list[Work], max_pixels: float) -> list[list[int]]:
    return [[one.index for one in batch] for batch in group(works, max_pixels)]


def test_fast_ones_of_a_shape_share_a_batch_up_to_the_cap() -> None:
    works = [work(0), work(1, side=128), work(2), work(3), work(4, side=128), work(5)]
    assert indices(works, 3 * DEFAULT) == [[0, 2, 3], [5], [1], [4]]
    assert indices(works, 8 * DEFAULT) == [[0, 2, 3, 5], [1, 4]]


def test_lossless_ones_and_other_arguments_do_not() -> None:
    works = [work(0, Tier.LOSSLESS), work(1), work(2, Tier.LOSSLESS), work(3, timestep=0.05), work(4)]
    assert indices(works, 8 * DEFAULT) == [[0], [1, 4], [2], [3]]


def test_a_failure_in_a_batch_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = SimpleNamespace(TritonError=SimpleNamespace, InferenceResponse=lambda error: error)
    errors.TritonError = lambda text, code: text  # noqa: ARG005
    errors.TritonError.INVALID_ARG = "INVALID_ARG"
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", errors)  # type: ignore[arg-type]

    def decode(batch: list[Work]) -> list[str]:
        if any(one.index == 1 for one in batch):
            raise invalid("latents", "these are bad")
        return [f"picture {one.index}" for one in batch]

    model = TritonPythonModel()
    monkeypatch.setattr(model, "_decode", decode)
    monkeypatch.setattr(model, "_decoder", SimpleNamespace(check_latents=lambda *_: None), raising=False)
    first, second, third = model._answer([work(0), work(1), work(2)])
    assert (first, third) == ("picture 0", "picture 2")
    assert "these are bad" in second
