"""The seams: three stages equal the unsplit pipeline, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiffusionPipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from diffusion_backend import conditioning, loading, seams
from diffusion_backend.errors import DiffusionError, Status
from diffusion_backend.loading import Stage
from diffusion_backend.model_config import read_model_config
from diffusion_backend.settings import ModelLimits, Settings, check, resolve
from diffusion_backend.tasks import IMAGE_EDIT, IMAGE_TO_IMAGE, IMAGE_TO_VIDEO, INPAINTING, TEXT_TO_IMAGE
from PIL import Image
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

pytestmark = pytest.mark.parallel

ROOT = Path(__file__).resolve().parents[1]
FLUX = ROOT / "model_repository/emoji-flux"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def flux_limits() -> ModelLimits:
    return ModelLimits.model_validate(read_model_config(FLUX).parameters)


@pytest.fixture(scope="module")
def stable_diffusion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Stable Diffusion 1.5 with random weights, saved as a diffusers folder."""
    folder = tmp_path_factory.mktemp("stable-diffusion")
    torch.manual_seed(0)
    words = [
        "<|startoftext|>",
        "<|endoftext|>",
        *"abcdefghijklmnopqrstuvwxyz",
        *(f"{c}</w>" for c in "abcdefxo"),
    ]
    text = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    StableDiffusionPipeline(
        unet=UNet2DConditionModel(
            block_out_channels=(4, 8),
            layers_per_block=1,
            sample_size=16,
            in_channels=4,
            out_channels=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=32,
            norm_num_groups=2,
        ),
        scheduler=DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False),
        vae=AutoencoderKL(
            block_out_channels=(4, 8),
            down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
            up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
            latent_channels=4,
            norm_num_groups=2,
        ),
        text_encoder=CLIPTextModel(text).eval(),
        tokenizer=CLIPTokenizer(
            vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=77
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)
    return folder


def split(source: Path, limits: ModelLimits, settings: Settings) -> np.ndarray[Any, Any]:
    """The picture by way of the three stages, the conditioning and the latents crossing as they do in Triton."""
    pipeline = loading.open_pipeline(str(source))
    stages = {
        stage: loading.load_stage(
            pipeline, stage, device=CPU, dtype=torch.float32, methods=seams.STAND_IN_METHODS
        )[0]
        for stage in Stage
    }
    encoder, denoiser, decoder = stages.values()
    calls = seams.record(encoder, seams.call_arguments(encoder, limits, settings))
    blob = conditioning.pack(conditioning.Conditioning(calls, settings.model_dump(), 0.0))
    arrived = conditioning.unpack(blob)
    denoised = seams.replay(
        denoiser, arrived.calls, seams.call_arguments(denoiser, limits, settings), settings.seed
    )
    latents = torch.from_numpy(denoised.latents.numpy().copy())
    picture: np.ndarray[Any, Any] = seams.decode(decoder, latents, denoised.decode_arguments)[0].numpy()
    return picture


def unsplit(source: Path, limits: ModelLimits, settings: Settings) -> np.ndarray[Any, Any]:
    """The picture by plain diffusers, as PIL would save it."""
    pipe = DiffusionPipeline.from_pretrained(source, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    torch.manual_seed(settings.seed)
    arguments = {**seams.call_arguments(pipe, limits, settings), "output_type": "pil"}
    return np.asarray(pipe(**arguments).images[0])


@pytest.mark.parametrize(
    "parameters",
    [
        {"seed": 1},
        {"seed": 2, "width": 128, "height": 72, "num_inference_steps": 3},
        {"seed": 3, "guidance_scale": 1.0, "num_inference_steps": 5},
        {"seed": 4, "guidance_scale": 7.5, "num_inference_steps": 5},
    ],
)
def test_flux_is_bit_identical(flux_limits: ModelLimits, parameters: dict[str, Any]) -> None:
    settings = resolve(flux_limits, "a fox on a blue background", None, parameters)
    source = FLUX / "pipeline"
    np.testing.assert_array_equal(
        split(source, flux_limits, settings), unsplit(source, flux_limits, settings)
    )


def test_nothing_in_the_seams_knows_flux(flux_limits: ModelLimits, stable_diffusion: Path) -> None:
    limits = flux_limits.model_copy(update={"guidance_argument": "guidance_scale", "call_arguments": {}})
    settings = resolve(limits, "a fox", "abc", {"seed": 5, "num_inference_steps": 4, "guidance_scale": 5.0})
    np.testing.assert_array_equal(
        split(stable_diffusion, limits, settings), unsplit(stable_diffusion, limits, settings)
    )


def test_a_stage_loads_only_its_own_weights() -> None:
    pipeline = loading.open_pipeline(str(FLUX / "pipeline"))
    sizes = {}
    for stage in Stage:
        pipe, sizes[stage] = loading.load_stage(
            pipeline, stage, device=CPU, dtype=None, methods=seams.STAND_IN_METHODS
        )
        for component in pipeline.modules:
            on_meta = {tensor.device.type for tensor in getattr(pipe, component.name).parameters()} == {
                "meta"
            }
            assert on_meta == (component.stage != stage), component
    stored = sum(path.stat().st_size for path in (FLUX / "pipeline").rglob("*.safetensors"))
    assert 0.98 * stored < sum(sizes.values()) < 1.02 * stored


def test_runs_leave_no_state_behind(flux_limits: ModelLimits) -> None:
    """A run between two equal runs changes nothing: each has its own scheduler and pipeline object."""
    pipeline = loading.open_pipeline(str(FLUX / "pipeline"))
    pipes = [
        loading.load_stage(pipeline, s, device=CPU, dtype=torch.float32, methods=seams.STAND_IN_METHODS)[0]
        for s in (Stage.ENCODE, Stage.DENOISE)
    ]

    def latents(steps: int) -> torch.Tensor:
        settings = resolve(flux_limits, "a cat", None, {"seed": 1, "num_inference_steps": steps})
        calls = seams.record(pipes[0], seams.call_arguments(pipes[0], flux_limits, settings))
        return seams.replay(pipes[1], calls, seams.call_arguments(pipes[1], flux_limits, settings), 1).latents

    before = latents(2)
    latents(4)
    assert torch.equal(before, latents(2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_warmup_file_fits_a_denoiser_of_any_dtype(flux_limits: ModelLimits, dtype: torch.dtype) -> None:
    """It was made in float32; on a GPU the denoiser computes in what its weights are stored in."""
    pipeline = loading.open_pipeline(str(FLUX / "pipeline"))
    denoiser, _ = loading.load_stage(
        pipeline, Stage.DENOISE, device=CPU, dtype=dtype, methods=seams.STAND_IN_METHODS
    )
    blob = (ROOT / "model_repository/emoji-flux_denoise/warmup/64x64.conditioning").read_bytes()
    warmup = conditioning.unpack(blob)
    settings = check(flux_limits, warmup.settings)
    arguments = seams.call_arguments(denoiser, flux_limits, settings)
    assert warmup.dtype == "float32"
    denoised = seams.replay(denoiser, warmup.calls, arguments, settings.seed, recorded_dtype=torch.float32)
    assert denoised.latents.dtype == torch.float32
    with pytest.raises(RuntimeError, match="dtype"):
        seams.replay(
            denoiser, warmup.calls, seams.call_arguments(denoiser, flux_limits, settings), settings.seed
        )


def test_the_pipelines_own_refusal_is_the_clients_fault(flux_limits: ModelLimits) -> None:
    pipeline = loading.open_pipeline(str(FLUX / "pipeline"))
    pipe = loading.load_dry(pipeline, Stage.ENCODE, methods=seams.STAND_IN_METHODS)
    limits = flux_limits.model_copy(update={"call_arguments": {"max_sequence_length": 513}})
    settings = resolve(limits, "a fox", None, {})
    with pytest.raises(DiffusionError, match="max_sequence_length") as caught:
        seams.record(pipe, seams.call_arguments(pipe, limits, settings))
    assert caught.value.status is Status.INVALID_ARG


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([], "lacks a result of encode_prompt"),
        ([conditioning.Call("__init__", None)], "'__init__'"),
    ],
)
def test_calls_that_do_not_fit(flux_limits: ModelLimits, calls: list[conditioning.Call], words: str) -> None:
    pipeline = loading.open_pipeline(str(FLUX / "pipeline"))
    pipe = loading.load_dry(pipeline, Stage.DENOISE, methods=seams.STAND_IN_METHODS)
    settings = resolve(flux_limits, "a fox", None, {})
    with pytest.raises(DiffusionError, match=words):
        seams.replay(pipe, calls, seams.call_arguments(pipe, flux_limits, settings), 0)


def test_a_stage_that_calls_anothers_component_is_said_not_to_split() -> None:
    pipeline = loading.open_pipeline(str(FLUX / "pipeline"))
    pipe = loading.load_dry(pipeline, Stage.DENOISE, methods=seams.STAND_IN_METHODS)
    with pytest.raises(DiffusionError, match="cannot be split"):
        pipe.text_encoder(torch.zeros(1, 1, dtype=torch.long))


def blank(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height))


def check_images(limits: ModelLimits, task: str, images: dict[str, Any]) -> None:
    """Of a request for pictures of 64x64."""
    seams.check_images(limits, Settings.model_construct(width=64, height=64, task=task), images)


SQUARE = blank(64, 64)
MAIN, MASKED = {seams.IMAGE: SQUARE}, {seams.IMAGE: SQUARE, seams.MASK: SQUARE}


@pytest.mark.parametrize(
    ("task", "images"),
    [
        (TEXT_TO_IMAGE, {}),
        (IMAGE_TO_IMAGE, MAIN),
        (IMAGE_TO_IMAGE, MASKED),
        (INPAINTING, MASKED),
        (IMAGE_EDIT, MASKED),
        (IMAGE_EDIT, {seams.IMAGE: [SQUARE, blank(128, 1), blank(1, 128)], seams.MASK: SQUARE}),
    ],
)
def test_images_that_a_task_takes(flux_limits: ModelLimits, task: str, images: dict[str, Any]) -> None:
    check_images(flux_limits.model_copy(update={"max_images": 3}), task, images)


@pytest.mark.parametrize(
    ("task", "images", "words"),
    [
        (TEXT_TO_IMAGE, MAIN, r"images of {'image': \(64, 64\)}; allowed: {}"),
        (TEXT_TO_IMAGE, {seams.MASK: SQUARE}, "allowed: {}"),
        (IMAGE_TO_IMAGE, {}, r"images of {}; allowed: {'image': \(64, 64\)}"),
        (IMAGE_TO_IMAGE, {seams.IMAGE: []}, "images of {'image': None}"),
        (IMAGE_TO_IMAGE, {seams.IMAGE: blank(64, 72)}, r"\(64, 72\)"),
        (IMAGE_TO_IMAGE, {**MAIN, "style": SQUARE}, "'style'"),
        (IMAGE_TO_IMAGE, {**MAIN, seams.MASK: [SQUARE]}, "'mask_image': None"),
        (
            IMAGE_TO_IMAGE,
            {seams.IMAGE: [SQUARE, SQUARE]},
            "1 further images, none of them too large; allowed: 0",
        ),
        (INPAINTING, MAIN, "'mask_image'"),
        (INPAINTING, {seams.IMAGE: SQUARE, seams.MASK: blank(8, 8)}, r"\(8, 8\)"),
        (IMAGE_EDIT, {seams.IMAGE: [SQUARE] * 4}, "3 further images, none of them too large; allowed: 2"),
        (IMAGE_EDIT, {seams.IMAGE: [SQUARE, blank(129, 1)]}, r"\[\(129, 1\)\] .* at most 128x128"),
        (IMAGE_EDIT, {seams.IMAGE: [SQUARE, blank(1, 129)]}, r"\[\(1, 129\)\] .* at most 128x128"),
    ],
)
def test_images_that_no_encode_stage_sends(
    flux_limits: ModelLimits, task: str, images: dict[str, Any], words: str
) -> None:
    with pytest.raises(DiffusionError, match=words) as caught:
        check_images(flux_limits.model_copy(update={"max_images": 3}), task, images)
    assert (caught.value.status, caught.value.param) == (Status.INVALID_ARG, "conditioning")


def test_a_clip_takes_no_mask(flux_limits: ModelLimits) -> None:
    limits = flux_limits.model_copy(update={"tasks": (IMAGE_TO_VIDEO,)})
    check_images(limits, IMAGE_TO_VIDEO, MAIN)
    with pytest.raises(DiffusionError, match="'mask_image'"):
        check_images(limits, IMAGE_TO_VIDEO, MASKED)
