"""Text-to-image families with a diffusion transformer of their own."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AdaptiveProjectedMixGuidance,
    AuraFlowTransformer2DModel,
    AutoencoderDC,
    AutoencoderKLHunyuanImage,
    AutoencoderKLQwenImage,
    CogView4Transformer2DModel,
    DPMSolverMultistepScheduler,
    HunyuanImageTransformer2DModel,
    Lumina2Transformer2DModel,
    PixArtTransformer2DModel,
    PRXTransformer2DModel,
    QwenImageTransformer2DModel,
    SanaTransformer2DModel,
    ZImageTransformer2DModel,
)
from transformers import GlmConfig, GlmModel, Qwen3Model, T5GemmaConfig
from transformers.models.t5gemma.configuration_t5gemma import T5GemmaModuleConfig
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

from tests.families import parts
from tests.families import tiny_tokenizers as tokenizers
from tests.families.family import family


@family(
    "Z-Image",
    "ZImagePipeline",
    width=32,
    height=48,
    num_inference_steps=3,
    guidance_scale=3.0,
    max_sequence_length=96,
)
def z_image() -> dict[str, Any]:
    return {
        "transformer": ZImageTransformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=1,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=32,
            axes_dims=[8, 4, 4],
            axes_lens=[256, 32, 32],
        ),
        "scheduler": parts.flow_match(shift=3.0),
        "vae": parts.kl_vae(4, use_quant_conv=False, use_post_quant_conv=False),
        "text_encoder": Qwen3Model(parts.qwen3_config()),
        "tokenizer": tokenizers.qwen(),
    }


@family(
    "Qwen-Image",
    "QwenImagePipeline",
    width=32,
    height=48,
    num_inference_steps=3,
    guidance_scale=3.0,
    max_sequence_length=256,
)
def qwen_image() -> dict[str, Any]:
    return {
        "transformer": QwenImageTransformer2DModel(
            in_channels=64,
            out_channels=16,
            num_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(4, 6, 6),
        ),
        "scheduler": parts.flow_match(use_dynamic_shifting=True),
        "vae": parts.wan_vae(AutoencoderKLQwenImage),
        "text_encoder": parts.qwen25_vl(),
        "tokenizer": tokenizers.qwen(),
    }


def _louder(vae: torch.nn.Module) -> torch.nn.Module:
    """With larger weights: its own make much the same picture of any latents, and the same latents of any image."""
    with torch.no_grad():
        for weight in vae.parameters():
            weight.mul_(3 if weight.ndim > 1 else 1)
    return vae


@family(
    "Qwen-Image-Edit",
    "QwenImageEditPipeline",
    "image-edit",
    width=32,
    height=64,
    num_inference_steps=2,
    guidance_scale=3.0,
)
def qwen_edit() -> dict[str, Any]:
    return {
        **qwen_image.build(),
        # Images are encoded with an area of 1024x1024, whatever their own: little is done at that size.
        "vae": _louder(
            AutoencoderKLQwenImage(
                base_dim=2,
                z_dim=16,
                dim_mult=[1] * 5,
                num_res_blocks=0,
                temperal_downsample=[False, True, True, True],
            )
        ),
        "tokenizer": tokenizers.qwen_vl(),
        "processor": parts.qwen_vl_processor(),
    }


@family(
    "Qwen-Image-Edit-Plus",
    "QwenImageEditPlusPipeline",
    "image-edit",
    width=32,
    height=64,
    num_inference_steps=2,
    guidance_scale=3.0,
)
def qwen_edit_plus() -> dict[str, Any]:
    return qwen_edit.build()


@family("Sana", "SanaPipeline", width=32, height=64, num_inference_steps=3, complex_human_instruction=None)
def sana() -> dict[str, Any]:
    return {
        "transformer": SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_attention_heads=2,
            attention_head_dim=8,
            num_cross_attention_heads=2,
            cross_attention_head_dim=8,
            cross_attention_dim=16,
            caption_channels=32,
            sample_size=32,
        ),
        "scheduler": DPMSolverMultistepScheduler(
            use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0
        ),
        "vae": AutoencoderDC(
            latent_channels=4,
            attention_head_dim=2,
            encoder_block_types=("ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "EfficientViTBlock"),
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            encoder_qkv_multiscales=((), (5,)),
            decoder_qkv_multiscales=((), (5,)),
            encoder_layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1),
            downsample_block_type="conv",
            upsample_block_type="interpolate",
            decoder_norm_types="rms_norm",
            decoder_act_fns="silu",
            scaling_factor=0.41,
        ),
        "text_encoder": parts.gemma2(),
        "tokenizer": tokenizers.gemma(),
    }


@family(
    "PixArt-Sigma",
    "PixArtSigmaPipeline",
    width=32,
    height=48,
    num_inference_steps=3,
    max_sequence_length=64,
)
def pixart() -> dict[str, Any]:
    return {
        "transformer": PixArtTransformer2DModel(
            sample_size=16,
            num_layers=1,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=2,
            caption_channels=32,
            cross_attention_dim=16,
            in_channels=4,
            out_channels=8,
            use_additional_conditions=False,
        ),
        "scheduler": DPMSolverMultistepScheduler(),
        "vae": parts.kl_vae(4, shift_factor=None),
        "text_encoder": parts.t5_encoder(),
        "tokenizer": tokenizers.t5(),
    }


@family("HunyuanImage 2.1", "HunyuanImagePipeline", width=64, height=96, num_inference_steps=3)
def hunyuan_image() -> dict[str, Any]:
    return {
        "transformer": HunyuanImageTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            num_attention_heads=2,
            attention_head_dim=16,
            patch_size=(1, 1),
            text_embed_dim=32,
            text_embed_2_dim=32,
            rope_axes_dim=(8, 8),
        ),
        "scheduler": parts.flow_match(shift=7.0),
        "vae": AutoencoderKLHunyuanImage(
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            block_out_channels=(32, 32, 32, 32),
            layers_per_block=1,
            spatial_compression_ratio=8,
            sample_size=128,
            scaling_factor=0.75,
        ),
        "text_encoder": parts.qwen25_vl(),
        "tokenizer": tokenizers.qwen(),
        "text_encoder_2": parts.t5_encoder(),
        "tokenizer_2": tokenizers.byt5(),
        # A step late enough for the momentum of the guidance, the state that a guider keeps, to count.
        "guider": AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=1),
        "ocr_guider": AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=1),
    }


@family("AuraFlow", "AuraFlowPipeline", width=32, height=48, num_inference_steps=3, max_sequence_length=48)
def aura_flow() -> dict[str, Any]:
    return {
        "transformer": AuraFlowTransformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_projection_dim=32,
            joint_attention_dim=32,
            pos_embed_max_size=256,
        ),
        "scheduler": parts.flow_match(shift=1.7),
        "vae": parts.kl_vae(4, shift_factor=None),
        "text_encoder": parts.umt5_encoder(),
        "tokenizer": tokenizers.t5(),
    }


@family("Lumina Image 2.0", "Lumina2Pipeline", width=32, height=48, num_inference_steps=3)
def lumina2() -> dict[str, Any]:
    return {
        "transformer": Lumina2Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            hidden_size=24,
            num_layers=1,
            num_refiner_layers=1,
            num_attention_heads=3,
            num_kv_heads=1,
            multiple_of=2,
            axes_dim_rope=(4, 2, 2),
            axes_lens=(300, 128, 128),
            cap_feat_dim=32,
        ),
        "scheduler": parts.flow_match(shift=6.0),
        "vae": parts.kl_vae(4, use_quant_conv=False, use_post_quant_conv=False, **parts.FOUR_BLOCKS),
        "text_encoder": parts.gemma2(),
        "tokenizer": tokenizers.gemma(),
    }


@family("CogView4", "CogView4Pipeline", width=32, height=48, num_inference_steps=3)
def cogview4() -> dict[str, Any]:
    text = GlmConfig(
        vocab_size=tokenizers.VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
    )
    return {
        "transformer": CogView4Transformer2DModel(
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            text_embed_dim=32,
            time_embed_dim=16,
            condition_dim=8,
            sample_size=16,
            rope_axes_dim=(16, 16),
        ),
        "scheduler": parts.flow_match(base_shift=0.25, max_shift=0.75, use_dynamic_shifting=True),
        "vae": parts.kl_vae(4, shift_factor=None, use_quant_conv=False, use_post_quant_conv=False),
        "text_encoder": GlmModel(text),
        "tokenizer": tokenizers.byte_level(),
    }


@family("PRX", "PRXPipeline", init={"default_sample_size": 32}, width=32, height=48, num_inference_steps=3)
def prx() -> dict[str, Any]:
    part: dict[str, Any] = {
        "vocab_size": tokenizers.VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 16,
    }
    both = T5GemmaConfig(encoder=T5GemmaModuleConfig(**part), decoder=T5GemmaModuleConfig(**part))
    encoder = T5GemmaEncoder(both.encoder)
    encoder.config = both  # public checkpoints keep the configuration of encoder and decoder
    return {
        "transformer": PRXTransformer2DModel(
            in_channels=4,
            patch_size=2,
            context_in_dim=32,
            hidden_size=16,
            mlp_ratio=2.0,
            num_heads=2,
            depth=1,
            axes_dim=[4, 4],
        ),
        "scheduler": parts.flow_match(),
        "text_encoder": encoder,
        "tokenizer": tokenizers.gemma(),
        "vae": parts.kl_vae(4, use_quant_conv=False, use_post_quant_conv=False),
    }


FAMILIES = (
    z_image,
    qwen_image,
    qwen_edit,
    qwen_edit_plus,
    sana,
    pixart,
    hunyuan_image,
    aura_flow,
    lumina2,
    cogview4,
    prx,
)
