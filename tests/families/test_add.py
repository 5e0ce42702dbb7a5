"""``add`` and the families: what it writes without weights is what the real stages make, and what it refuses."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DiTPipeline,
    DiTTransformer2DModel,
    StableDiffusionPipeline,
)
from diffusion_backend import conditioning, loading, seams
from diffusion_backend.errors import DiffusionError
from diffusion_backend.loading import Stage
from diffusion_backend.model_config import read_model_config
from diffusion_backend.repository import add
from diffusion_backend.settings import ModelLimits, check

from tests.families import parts
from tests.families.catalogue import FAMILIES
from tests.families.conftest import MODEL, Added
from tests.families.family import Family
from tests.families.stable_diffusion import sd15
from tests.families.three_stages import CPU
from tests.test_repository import skeleton

TEXT_TO_IMAGE = [family for family in FAMILIES if family.task == "text-to-image"]
VIDEO = [family for family in FAMILIES if family.task.endswith("video")]
# The size, the step of the sizes, and the rank of the latents.
EXPECTED = {
    "Stable Diffusion 1.5": (32, 32, 8, 3),
    "Stable Diffusion XL": (32, 32, 8, 3),
    "Stable Diffusion 3": (32, 32, 2, 3),
    "FLUX.1 dev": (32, 40, 4, 3),
    "FLUX.1 with true guidance": (32, 40, 4, 3),
    "FLUX.2 klein": (32, 40, 4, 3),
    "Chroma": (32, 40, 4, 3),
    "Ovis-Image": (32, 40, 4, 3),
    "Z-Image": (32, 48, 4, 3),
    "Qwen-Image": (32, 48, 16, 4),
    "Sana": (32, 64, 32, 3),
    "PixArt-Sigma": (32, 48, 8, 3),
    "HunyuanImage 2.1": (64, 96, 8, 3),
    "AuraFlow": (32, 48, 4, 3),
    "Lumina Image 2.0": (32, 48, 16, 3),
    "CogView4": (32, 48, 16, 3),
    "PRX": (32, 48, 4, 3),
}
AddedFamily = Callable[[Family], Added]


@pytest.mark.parametrize("family", TEXT_TO_IMAGE, ids=lambda family: family.name)
def test_what_is_written_dry_is_what_real_weights_make(
    family: Family, saved: Callable[[Family], Path], added: AddedFamily
) -> None:
    assert added(family).refusal is None
    repository = added(family).repository
    limits = ModelLimits.model_validate(read_model_config(repository / MODEL).parameters)
    latents = read_model_config(repository / f"{MODEL}_vae_decode").message.input[0]
    assert (
        limits.default_width,
        limits.default_height,
        limits.size_multiple,
        len(latents.dims),
    ) == EXPECTED[family.name]

    (file,) = (repository / f"{MODEL}_denoise/warmup").iterdir()
    dry = conditioning.unpack(file.read_bytes())
    settings = check(limits, dry.settings)
    pipeline = loading.open_pipeline(str(saved(family)))
    encoder, denoiser = (
        loading.load_stage(pipeline, stage, device=CPU, dtype=torch.float32, methods=seams.STAND_IN_METHODS)[
            0
        ]
        for stage in (Stage.ENCODE, Stage.DENOISE)
    )
    real = seams.record(encoder, seams.call_arguments(encoder, limits, settings))
    assert [(c.name, skeleton(c.result)) for c in dry.calls] == [(c.name, skeleton(c.result)) for c in real]
    # The warmup sample runs with real weights, too, and its latents are those that warm up the next stage.
    warm = seams.replay(denoiser, dry.calls, seams.call_arguments(denoiser, limits, settings), 0)
    (sample, *_) = read_model_config(repository / f"{MODEL}_vae_decode").message.model_warmup
    assert list(sample.inputs["latents"].dims) == list(warm.latents.shape[1:])


@pytest.mark.parametrize("family", VIDEO, ids=lambda family: family.name)
def test_video_is_refused_by_name(family: Family, added: AddedFamily) -> None:
    refusal = added(family).refusal
    assert refusal == f"{family.pipeline} cannot be served: it makes video, which is not served yet"
    assert list(added(family).repository.iterdir()) == []


class DrawsWhileEncoding(StableDiffusionPipeline):
    def encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
        torch.randn(1)
        return super().encode_prompt(*args, **kwargs)


class EncodesOutsideItsMethods(StableDiffusionPipeline):
    def prepare_latents(self, *args: Any, **kwargs: Any) -> Any:
        self.text_encoder(torch.zeros(1, 4, dtype=torch.long))
        return super().prepare_latents(*args, **kwargs)


class NeverDenoises(StableDiffusionPipeline):
    def prepare_extra_step_kwargs(self, *_args: Any, **_kwargs: Any) -> Any:
        return self.vae.decode(torch.zeros(1, 4, 16, 16))


class NeverDecodes(StableDiffusionPipeline):
    def __call__(self, *args: Any, output_type: str = "pil", **kwargs: Any) -> Any:
        assert output_type == "pt"
        return super().__call__(*args, output_type="latent", **kwargs)

    # What the class says that it takes.
    __call__.__signature__ = inspect.signature(StableDiffusionPipeline.__call__)  # type: ignore[attr-defined]


class ReturnsObjects(StableDiffusionPipeline):
    def encode_style(self) -> object:
        return object()

    def prepare_latents(self, *args: Any, **kwargs: Any) -> Any:
        self.encode_style()
        return super().prepare_latents(*args, **kwargs)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (DrawsWhileEncoding, "its encode_prompt draws random numbers"),
        (EncodesOutsideItsMethods, "it uses its CLIPTextModel outside the stage that holds it"),
        (NeverDenoises, "it decodes before it denoises"),
        (NeverDecodes, "it ended without decoding"),
        (ReturnsObjects, "an object of class object cannot travel"),
    ],
)
def test_what_does_not_split_is_refused_by_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    saved: Callable[[Family], Path],
    cls: type[StableDiffusionPipeline],
    reason: str,
) -> None:
    source = tmp_path / "pipeline"
    shutil.copytree(saved(sd15), source)
    index = json.loads((source / "model_index.json").read_text())
    (source / "model_index.json").write_text(json.dumps({**index, "_class_name": cls.__name__}))
    monkeypatch.setattr(diffusers, cls.__name__, cls, raising=False)
    with pytest.raises(DiffusionError, match=f"{cls.__name__} cannot be served: .*{reason}"):
        add(str(source), MODEL, tmp_path / "repository")
    assert list((tmp_path / "repository").glob("*")) == []


def test_a_pipeline_without_a_prompt_is_refused_by_name(tmp_path: Path) -> None:
    """DiT makes pictures of classes, not of prompts."""
    DiTPipeline(
        transformer=DiTTransformer2DModel(
            num_layers=1,
            num_attention_heads=2,
            attention_head_dim=8,
            num_embeds_ada_norm=10,
            norm_num_groups=4,
        ),
        vae=parts.kl_vae(4, shift_factor=None),
        scheduler=DDIMScheduler(),
    ).save_pretrained(tmp_path / "pipeline")
    with pytest.raises(DiffusionError, match="DiTPipeline cannot be served: it takes no prompt"):
        add(str(tmp_path / "pipeline"), MODEL, tmp_path / "repository")
