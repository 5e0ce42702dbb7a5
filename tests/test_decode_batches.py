"""Which pictures are decoded as one batch, and whose a failure is."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from diffusion_backend.errors import invalid
from diffusion_backend.quality import Tier
from diffusion_backend.stages.decode_batches import Work, group
from diffusion_backend.stages.decode_settings import DecodeSettings
from diffusion_backend.stages.decoder import Decoder
from diffusion_backend.stages.vae_decode import TritonPythonModel

DEFAULT = 64 * 64


def work(index: int, tier: Tier = Tier.FAST, side: int = 64, **decode_arguments: Any) -> Work:
    settings = DecodeSettings(
        task="text-to-image",
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


def test_a_cap_without_end_is_none() -> None:
    assert indices([work(0), work(1)], math.inf) == [[0, 1]]


def test_without_batches_each_is_alone_however_small() -> None:
    assert indices([work(0, side=8), work(1, side=8), work(2, side=8)], 0) == [[0], [1], [2]]


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


def decoder(monkeypatch: pytest.MonkeyPatch, *, has_fast_path: bool) -> Decoder:
    """One that has loaded nothing."""
    made = Decoder.__new__(Decoder)
    limits = SimpleNamespace(default_quality=Tier.LOSSLESS)
    monkeypatch.setattr(made, "config", SimpleNamespace(limits=limits), raising=False)
    monkeypatch.setattr(made, "_has_fast_path", has_fast_path, raising=False)
    return made


@pytest.mark.parametrize(("has_fast_path", "batches"), [(True, [[0, 1]]), (False, [[0], [1]])])
def test_without_a_fast_path_nothing_is_batched(
    has_fast_path: bool, batches: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs is the lossless decoder then, and lossless means alone."""
    tier = decoder(monkeypatch, has_fast_path=has_fast_path).tier(work(0).settings)
    assert indices([work(0, tier), work(1, tier)], 8 * DEFAULT) == batches


def test_what_the_fast_decoder_fails_at_is_decoded_losslessly(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = []

    def decode(batch: list[Work]) -> list[str]:
        tiers.append(batch[0].tier)
        if batch[0].tier is Tier.FAST:
            raise RuntimeError("not finite")
        return ["picture"]

    model = TritonPythonModel()
    monkeypatch.setattr(model, "_decode", decode)
    monkeypatch.setattr(model, "_decoder", SimpleNamespace(check_latents=lambda *_: None), raising=False)
    assert model._answer([work(0)]) == ["picture"]
    assert tiers == [Tier.FAST, Tier.LOSSLESS]
