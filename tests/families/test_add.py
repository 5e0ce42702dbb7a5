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
from diffusion_backend import conditioning, loading, seams, values
from diffusion_backend.errors import DiffusionError
from diffusion_backend.loading import Stage
from diffusion_backend.model_config import read_model_config
from diffusion_backend.repository import BuildOptions, add, read_model
from diffusion_backend.settings import ModelLimits, check
from diffusion_backend.task_pipelines import pipelines_by_task
from diffusion_backend.tasks import IMAGE_EDIT, IMAGE_TO_IMAGE, INPAINTING, TEXT_TO_IMAGE

from tests.families import parts
from tests.families.catalogue import FAMILIES
from tests.families.conftest import Added
from tests.families.dit import qwen_edit
from tests.families.family import Family
from tests.families.stable_diffusion import sd15
from tests.families.three_stages import CPU
from tests.families.wan import wan21, wan21_image

pytestmark = pytest.mark.parallel

MODEL = "tiny"
# The size, the step of the sizes, and the rank of the latents; of video also the numbers of frames (the default, the
# smallest, the largest, their step) and how many a second.
EXPECTED = {
    "Stable Diffusion 1.5": (32, 32, 8, 3),
    "Stable Diffusion XL": (32, 32, 8, 3),
    "Stable Diffusion 3": (32, 32, 2, 3),
    "FLUX.1 dev": (32, 40, 4, 3),
    "FLUX.1 with true guidance": (32, 40, 4, 3),
    "FLUX.1 Kontext": (32, 40, 4, 3),
    "FLUX.1 Fill": (32, 40, 4, 3),
    "FLUX.2 klein": (64, 80, 4, 3),
    "FLUX.2 dev": (64, 80, 4, 3),
    "Chroma": (32, 40, 4, 3),
    "Ovis-Image": (32, 40, 4, 3),
    "Z-Image": (32, 48, 4, 3),
    "Qwen-Image": (32, 48, 16, 4),
    "Qwen-Image-Edit": (32, 64, 32, 4),
    "Qwen-Image-Edit-Plus": (32, 64, 32, 4),
    "Sana": (32, 64, 32, 3),
    "PixArt-Sigma": (32, 48, 8, 3),
    "HunyuanImage 2.1": (64, 96, 8, 3),
    "AuraFlow": (32, 48, 4, 3),
    "Lumina Image 2.0": (32, 48, 16, 3),
    "CogView4": (32, 48, 16, 3),
    "PRX": (32, 48, 4, 3),
    "Wan 2.1 T2V": (32, 16, 16, 4, 5, 1, 9, 4, 16),
    "Wan 2.2 T2V": (32, 16, 16, 4, 5, 1, 9, 4, 16),
    "Wan 2.2 TI2V 5B": (32, 16, 16, 4, 5, 1, 9, 4, 16),
    "Wan 2.1 I2V": (32, 16, 16, 4, 5, 1, 9, 4, 16),
    "Wan 2.2 I2V": (32, 16, 16, 4, 5, 1, 9, 4, 16),
    "SkyReels V2": (32, 16, 16, 4, 5, 1, 9, 4, 16),
    "Sana Video": (32, 32, 32, 4, 5, 1, 9, 4, 16),
    "LTX-Video T2V": (32, 32, 32, 4, 9, 1, 17, 4, 25),
    "LTX-Video 0.9.5 T2V": (32, 32, 32, 4, 9, 1, 17, 4, 25),
    "LTX-Video I2V": (32, 32, 32, 4, 9, 1, 17, 4, 25),
    "HunyuanVideo": (32, 32, 16, 4, 5, 1, 9, 4, 16),
    "HunyuanVideo 1.5": (32, 32, 8, 4, 5, 1, 9, 4, 16),
    "CogVideoX": (32, 32, 16, 4, 9, 1, 17, 8, 16),
    "Mochi 1": (32, 32, 16, 4, 7, 1, 13, 6, 16),
}


def skeleton(value: object) -> object:
    """With tensors replaced by shape and dtype."""
    in_order = values.map_tensors(value, torch.Tensor.contiguous)
    return values.to_skeleton(in_order, lambda tensor: [*tensor.shape, str(tensor.dtype)])


# The tasks of those that take images besides, and how many of them.
FROM_AN_IMAGE = ((TEXT_TO_IMAGE, IMAGE_TO_IMAGE, INPAINTING), 1)
TASKS: dict[str, tuple[tuple[str, ...], int]] = {
    "Stable Diffusion 1.5": FROM_AN_IMAGE,
    "Stable Diffusion XL": FROM_AN_IMAGE,
    "Stable Diffusion 3": FROM_AN_IMAGE,
    "FLUX.1 dev": FROM_AN_IMAGE,
    "FLUX.1 with true guidance": FROM_AN_IMAGE,
    "FLUX.1 Kontext": ((TEXT_TO_IMAGE, IMAGE_EDIT), 1),
    "FLUX.1 Fill": ((INPAINTING,), 1),
    "FLUX.2 klein": ((TEXT_TO_IMAGE, IMAGE_EDIT), 16),
    "FLUX.2 dev": ((TEXT_TO_IMAGE, IMAGE_EDIT), 16),
    "Z-Image": FROM_AN_IMAGE,
    "Qwen-Image": FROM_AN_IMAGE,
    "Qwen-Image-Edit": ((IMAGE_EDIT,), 1),
    "Qwen-Image-Edit-Plus": ((IMAGE_EDIT,), 16),
}

AddedFamily = Callable[[Family], Added]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_is_written_dry_is_what_real_weights_make(
    family: Family, saved: Callable[[Family], Path], added: AddedFamily
) -> None:
    assert added(family).refusal is None
    repository = added(family).repository
    limits = ModelLimits.model_validate(read_model_config(repository / family.model).parameters)
    latents = read_model_config(repository / f"{family.model}_vae_decode").message.input[0]
    frames = (
        limits.default_num_frames,
        limits.min_num_frames,
        limits.max_num_frames,
        limits.num_frames_step,
        limits.default_fps,
    )
    assert (
        limits.default_width,
        limits.default_height,
        limits.size_multiple,
        len(latents.dims),
        *(frames if limits.makes_video else ()),
    ) == EXPECTED[family.name]
    own = (family.task,), family.images
    assert (limits.tasks, limits.max_images) == TASKS.get(family.name, own)
    assert limits.makes_video or set(frames) == {None}

    pipeline = loading.open_pipeline(str(saved(family)))
    encoders, denoisers = (
        pipelines_by_task(
            loading.load_stage(
                pipeline,
                stage,
                device=CPU,
                dtype=torch.float32,
                methods=seams.STAND_IN_METHODS,
                takes_image=limits.takes_image,
            )[0]
        )
        for stage in (Stage.ENCODE, Stage.DENOISE)
    )
    files = {file.name: file for file in (repository / f"{family.model}_denoise/warmup").iterdir()}
    size = f"{limits.default_width}x{limits.default_height}"
    names = {task: f"{size}{'' if task == limits.task else f'_{task}'}.conditioning" for task in limits.tasks}
    assert set(files) == set(names.values())
    for task, name in names.items():
        dry = conditioning.unpack(files[name].read_bytes())
        settings = check(limits, dry.settings)
        assert settings.task == task
        seams.check_images(limits, settings, dry.images)
        arguments = seams.call_arguments(encoders[task], limits, settings, dry.images)
        real = seams.record(encoders[task], arguments)
        assert [(c.name, skeleton(c.result)) for c in dry.calls] == [
            (c.name, skeleton(c.result)) for c in real
        ]
        # The warmup sample runs with real weights, too, and its latents are those that warm up the next stage.
        arguments = seams.call_arguments(denoisers[task], limits, settings, dry.images)
        warm = seams.replay(denoisers[task], dry.calls, arguments, 0)
        (sample, *_) = read_model_config(repository / f"{family.model}_vae_decode").message.model_warmup
        assert list(sample.inputs["latents"].dims) == list(warm.latents.shape[1:])


def test_a_task_that_makes_one_size_only_is_none_of_the_model_s(
    saved: Callable[[Family], Path], tmp_path: Path
) -> None:
    """QwenImageEditInpaintPipeline makes pictures of an area of 1024x1024, whatever it is asked for."""
    shutil.copytree(saved(qwen_edit), tmp_path / "pipeline")
    path = tmp_path / "pipeline/generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "width": 1024, "height": 1024}))
    add(str(tmp_path / "pipeline"), MODEL, tmp_path / "repository", BuildOptions(warmup=False))
    limits = read_model(tmp_path / "repository" / MODEL)
    assert (limits.default_width, limits.default_height) == (1024, 1024)
    assert limits.tasks == (IMAGE_EDIT,)


def test_what_is_written_for_video(saved: Callable[[Family], Path], tmp_path: Path) -> None:
    """One message a slice, so decoupled; an image where one is taken, for each stage that needs it."""
    for name, family in (("text", wan21), ("image", wan21_image)):
        add(str(saved(family)), name, tmp_path)
        ensemble, encode, _, decode = (
            read_model_config(tmp_path / f"{name}{stage}").message
            for stage in ("", "_encode", "_denoise", "_vae_decode")
        )
        assert [output.name for output in ensemble.output] == ["frames", "info"]
        assert list(ensemble.output[0].dims) == [-1, -1, -1, 3]
        given = {tensor.name: list(tensor.dims) for tensor in ensemble.input}
        assert given == {
            "prompt": [1],
            "negative_prompt": [1],
            **({"image": [-1]} if name == "image" else {}),
        }
        assert ("image" in encode.model_warmup[0].inputs) == (name == "image")
        assert (decode.max_batch_size, decode.model_transaction_policy.decoupled) == (0, True)
        samples = [sample.name for sample in decode.model_warmup]
        assert samples == ["32x16_lossless", "32x16_high"]
    with pytest.raises(DiffusionError, match="'unary' cannot be had of WanPipeline: it makes video"):
        add(str(saved(wan21)), "unary", tmp_path, BuildOptions(unary=True))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"fps": "fast"}, "generation_config.json has fps 'fast'; allowed: integers"),
        ({"fps": 1000}, "'fps' is 1000; allowed: integers from 1 to 120"),
        ({"num_frames": 0}, "generation_config.json has num_frames 0; allowed: integers"),
        ({"image": "fox.png"}, "generation_config.json has 'image'"),
    ],
)
def test_a_generation_config_of_video_that_is_wrong(
    saved: Callable[[Family], Path], tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    shutil.copytree(saved(wan21), tmp_path / "pipeline")
    path = tmp_path / "pipeline/generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    with pytest.raises(DiffusionError, match=reason):
        add(str(tmp_path / "pipeline"), MODEL, tmp_path / "repository")


def test_fps_and_num_frames_come_from_the_generation_config(
    saved: Callable[[Family], Path], tmp_path: Path
) -> None:
    """A number of frames that does not come out as asked is that which does."""
    shutil.copytree(saved(wan21), tmp_path / "pipeline")
    path = tmp_path / "pipeline/generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "fps": 24, "num_frames": 7}))
    add(str(tmp_path / "pipeline"), MODEL, tmp_path / "repository")
    limits = read_model(tmp_path / "repository" / MODEL)
    assert (limits.default_fps, limits.default_num_frames) == (24, 5)


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
