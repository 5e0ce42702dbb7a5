"""The Stable Diffusion line."""

from __future__ import annotations

from typing import Any

from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    SD3Transformer2DModel,
    UNet2DConditionModel,
)
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from transformers import CLIPConfig, CLIPImageProcessorPil

from tests.families import parts
from tests.families import tiny_tokenizers as tokenizers
from tests.families.family import family

_UNET: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "sample_size": 16,
    "norm_num_groups": 4,
}


@family("Stable Diffusion 1.5", "StableDiffusionPipeline", num_inference_steps=3)
def sd15() -> dict[str, Any]:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    return {
        "unet": UNet2DConditionModel(
            **_UNET,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=32,
        ),
        "scheduler": DDIMScheduler(
            beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False, steps_offset=1
        ),
        "vae": parts.kl_vae(4, shift_factor=None),
        "text_encoder": parts.clip_text(),
        "tokenizer": tokenizers.clip(),
        "safety_checker": StableDiffusionSafetyChecker(CLIPConfig(projection_dim=32, vision_config=vision)),
        "feature_extractor": CLIPImageProcessorPil(),
    }


@family("Stable Diffusion XL", "StableDiffusionXLPipeline", num_inference_steps=3)
def sdxl() -> dict[str, Any]:
    return {
        "unet": UNet2DConditionModel(
            **_UNET,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=(2, 4),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=80,  # six time ids of 8, and the pooled prompt
            cross_attention_dim=64,
        ),
        "scheduler": EulerDiscreteScheduler(
            beta_schedule="scaled_linear", steps_offset=1, timestep_spacing="leading"
        ),
        "vae": parts.kl_vae(4, shift_factor=None),
        "text_encoder": parts.clip_text(),
        "text_encoder_2": parts.clip_text_projected(),
        "tokenizer": tokenizers.clip(),
        "tokenizer_2": tokenizers.clip(pad_token="!"),
    }


@family("Stable Diffusion 3", "StableDiffusion3Pipeline", num_inference_steps=3, max_sequence_length=32)
def sd3() -> dict[str, Any]:
    return {
        "transformer": SD3Transformer2DModel(
            sample_size=16,
            patch_size=1,
            in_channels=16,  # its inpainting asks for as many
            out_channels=16,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pooled_projection_dim=64,
        ),
        "scheduler": parts.flow_match(shift=3.0),
        "vae": parts.kl_vae(16, use_quant_conv=False, use_post_quant_conv=False),
        "text_encoder": parts.clip_text_projected(),
        "tokenizer": tokenizers.clip(),
        "text_encoder_2": parts.clip_text_projected(),
        "tokenizer_2": tokenizers.clip(pad_token="!"),
        "text_encoder_3": parts.t5_encoder(),
        "tokenizer_3": tokenizers.t5(),
        "image_encoder": None,
        "feature_extractor": None,
    }


FAMILIES = (sd15, sdxl, sd3)
