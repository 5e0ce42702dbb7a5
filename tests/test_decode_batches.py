"""Which pictures are decoded as one batch, and whose a failure is."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from diffusers.image_processor import VaeImageProcessor
from diffusion_backend import seams
from diffusion_backend.errors import invalid
from diffusion_backend.fast_decoders import FastDecoder
from diffusion_backend.fast_path_gate import register_vae_fast_path_gate, use_vae_fast_path
from diffusion_backend.quality import Tier
from diffusion_backend.stages import vae_decode
from diffusion_backend.stages.clip_decode import TritonPythonModel as ClipModel
from diffusion_backend.stages.decode_batches import Work, group
from diffusion_backend.stages.decode_settings import DecodeSettings
from diffusion_backend.stages.decoder import Decoder
from diffusion_backend.stages.vae_decode import TritonPythonModel

pytestmark = pytest.mark.parallel

DEFAULT = 64 * 64


class Metrics:
    """What was told of decodes."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, int]] = []
        self.repeats = 0

    def decoded(self, path: str, pictures: int, _seconds: float) -> None:
        self.batches.append((path, pictures))

    def repeated(self) -> None:
        self.repeats += 1


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
    metrics = Metrics()
    monkeypatch.setattr(model, "_decode", decode)
    checked = SimpleNamespace(check_latents=lambda *_: None, metrics=metrics)
    monkeypatch.setattr(model, "_decoder", checked, raising=False)
    assert model._answer([work(0)]) == ["picture"]
    assert tiers == [Tier.FAST, Tier.LOSSLESS]
    assert metrics.repeats == 1


def tiny_decoder() -> Decoder:
    """A stage's, of a tiny VAE with random weights and its fast decoder in float32."""
    torch.manual_seed(0)
    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 3,
        up_block_types=["UpDecoderBlock2D"] * 3,
        block_out_channels=[8, 16, 16],
        norm_num_groups=4,
        latent_channels=4,
    ).eval()
    register_vae_fast_path_gate(vae, FastDecoder(vae, torch.float32))
    made = Decoder.__new__(Decoder)
    made.seams, made._use_fast_path, made._has_fast_path = seams, use_vae_fast_path, True
    made.metrics, made._scale = Metrics(), 4
    made.pipe = SimpleNamespace(
        vae=vae, device=torch.device("cpu"), image_processor=VaeImageProcessor(vae_scale_factor=4)
    )
    return made


def test_a_batch_of_fast_ones_is_what_each_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: each request gets its own picture, in the order in which they came."""
    monkeypatch.setattr(vae_decode, "_response", lambda image, info: (image, info))
    model, rng = TritonPythonModel(), np.random.default_rng(0)
    model._decoder = tiny_decoder()
    works = [
        dataclasses.replace(work(index, tier), latents=rng.standard_normal((1, 4, 16, 16)).astype(np.float32))
        for index, tier in enumerate([Tier.FAST, Tier.FAST, Tier.LOSSLESS, Tier.FAST])
    ]
    together = {}
    for batch in group(works, 8 * DEFAULT):
        together |= {one.index: got for one, got in zip(batch, model._answer(batch), strict=True)}
    assert model._decoder.metrics.batches == [("fast", 3), ("lossless", 1)]
    alone = [model._answer([one])[0] for one in works]
    for index, (picture, info) in enumerate(alone):
        got, got_info = together[index]
        assert got.shape == (64, 64, 3)
        assert got_info["decode_path"] == info["decode_path"] == works[index].tier.value
        assert np.abs(got.astype(int) - picture).max() <= 1  # sums of a batch round differently on a CPU
        others = [each for other, (each, _) in enumerate(alone) if other != index]
        assert all(np.abs(got.astype(int) - other).max() > 8 for other in others)
    np.testing.assert_array_equal(together[2][0], alone[2][0])


def test_a_clip_that_the_fast_decoder_fails_at_is_decoded_losslessly() -> None:
    class Seams:
        """A VAE that only the lossless way leads through."""

        def run_vae(self, pipe: Any, *_: Any) -> str:
            if pipe.is_fast:
                raise RuntimeError("not finite")
            return "clip"

    model, made = ClipModel(), tiny_decoder()

    @contextmanager
    def use_fast_path(_vae: Any, enabled: bool) -> Iterator[bool]:
        made.pipe.is_fast = enabled
        yield enabled

    made.seams, made._use_fast_path = Seams(), use_fast_path
    model._decoder = made
    clip, path = model._decode("id", torch.zeros(1), work(0).settings, Tier.FAST)
    assert (clip, path, made.metrics.repeats) == ("clip", Tier.LOSSLESS, 1)
    assert model._decode("id", torch.zeros(1), work(0).settings, Tier.LOSSLESS) == ("clip", Tier.LOSSLESS)
    assert made.metrics.repeats == 1
