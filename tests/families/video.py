"""Video families with VAEs of their own."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKLCogVideoX,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLLTXVideo,
    AutoencoderKLMochi,
    ClassifierFreeGuidance,
    CogVideoXDDIMScheduler,
    CogVideoXTransformer3DModel,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    MochiTransformer3DModel,
)
from transformers import LlamaConfig, LlamaModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

from tests.families import parts
from tests.families import tiny_tokenizers as tokenizers
from tests.families.family import family

_CALL: dict[str, Any] = {"width": 32, "height": 32, "num_inference_steps": 3}


def _ltx(*, timestep_conditioning: bool) -> dict[str, Any]:
    vae = AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False, False, False, False, False),
        upsample_residual=(False, False, False, False),
        upsample_factor=(1, 1, 1, 1),
        timestep_conditioning=timestep_conditioning,
        patch_size=1,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )
    return {
        "transformer": LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            patch_size=1,
            patch_size_t=1,
            num_attention_heads=4,
            attention_head_dim=8,
            cross_attention_dim=32,
            num_layers=1,
            caption_channels=32,
        ),
        "vae": vae,
        "scheduler": parts.flow_match(use_dynamic_shifting=True, shift_terminal=0.1),
        "text_encoder": parts.t5_encoder(),
        "tokenizer": tokenizers.t5(),
    }


@family("LTX-Video T2V", "LTXPipeline", "text-to-video", **_CALL, num_frames=9, max_sequence_length=48)
def ltx() -> dict[str, Any]:
    return _ltx(timestep_conditioning=False)


@family(
    "LTX-Video 0.9.5 T2V",
    "LTXPipeline",
    "text-to-video",
    **_CALL,
    num_frames=9,
    max_sequence_length=48,
    decode_timestep=0.05,
    decode_noise_scale=0.025,
)
def ltx_timestep() -> dict[str, Any]:
    return _ltx(timestep_conditioning=True)


@family(
    "LTX-Video I2V",
    "LTXImageToVideoPipeline",
    "image-to-video",
    **_CALL,
    num_frames=9,
    max_sequence_length=48,
)
def ltx_image() -> dict[str, Any]:
    return _ltx(timestep_conditioning=False)


@family(
    "HunyuanVideo", "HunyuanVideoPipeline", "text-to-video", **_CALL, num_frames=5, max_sequence_length=320
)
def hunyuan_video() -> dict[str, Any]:
    text = LlamaConfig(
        vocab_size=tokenizers.VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    return {
        "transformer": HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=10,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            patch_size=1,
            patch_size_t=1,
            guidance_embeds=True,
            text_embed_dim=32,
            pooled_projection_dim=32,
            rope_axes_dim=(2, 4, 4),
        ),
        "vae": AutoencoderKLHunyuanVideo(
            latent_channels=4,
            down_block_types=("HunyuanVideoDownBlock3D",) * 4,
            up_block_types=("HunyuanVideoUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            norm_num_groups=4,
        ),
        "scheduler": parts.flow_match(shift=7.0),
        "text_encoder": LlamaModel(text),
        "tokenizer": tokenizers.byte_level(),
        "text_encoder_2": parts.clip_text(),
        "tokenizer_2": tokenizers.clip(),
    }


@family("HunyuanVideo 1.5", "HunyuanVideo15Pipeline", "text-to-video", **_CALL, num_frames=5)
def hunyuan_video15() -> dict[str, Any]:
    return {
        "transformer": HunyuanVideo15Transformer3DModel(
            in_channels=9,  # latents, the conditioning frame's latents, and its mask
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=1,
            num_refiner_layers=1,
            text_embed_dim=32,
            text_embed_2_dim=32,
            image_embed_dim=12,
            rope_axes_dim=(2, 6, 8),
            target_size=32,
            task_type="t2v",
        ),
        "vae": AutoencoderKLHunyuanVideo15(
            latent_channels=4,
            block_out_channels=(16, 16, 16, 16),
            layers_per_block=1,
            spatial_compression_ratio=8,
            temporal_compression_ratio=4,
        ),
        "scheduler": parts.flow_match(shift=7.0),
        "text_encoder": Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**parts.qwen25_text_config())),
        "tokenizer": tokenizers.qwen(),
        "text_encoder_2": parts.t5_encoder(),
        "tokenizer_2": tokenizers.byt5(),
        "guider": ClassifierFreeGuidance(guidance_scale=3.0),
    }


@family("CogVideoX", "CogVideoXPipeline", "text-to-video", **_CALL, num_frames=9, max_sequence_length=48)
def cogvideox() -> dict[str, Any]:
    return {
        "transformer": CogVideoXTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=8,
            in_channels=4,
            out_channels=4,
            time_embed_dim=4,
            text_embed_dim=32,
            num_layers=1,
            sample_width=4,
            sample_height=4,
            sample_frames=9,
            patch_size=2,
            max_text_seq_length=48,
        ),
        "vae": AutoencoderKLCogVideoX(
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
        ),
        "scheduler": CogVideoXDDIMScheduler(),
        "text_encoder": parts.t5_encoder(),
        "tokenizer": tokenizers.t5(),
    }


@family("Mochi 1", "MochiPipeline", "text-to-video", **_CALL, num_frames=7, max_sequence_length=48)
def mochi() -> dict[str, Any]:
    return {
        "transformer": MochiTransformer3DModel(
            patch_size=2,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=2,
            pooled_projection_dim=16,
            in_channels=12,
            text_embed_dim=32,
            time_embed_dim=4,
        ),
        "vae": AutoencoderKLMochi(
            latent_channels=12,
            encoder_block_out_channels=(32, 32, 32, 32),  # its norms have 32 groups
            decoder_block_out_channels=(32, 32, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
        ),
        "scheduler": parts.flow_match(),
        "text_encoder": parts.t5_encoder(),
        "tokenizer": tokenizers.t5(),
    }


FAMILIES = (
    ltx,
    ltx_timestep,
    ltx_image,
    hunyuan_video,
    hunyuan_video15,
    cogvideox,
    mochi,
)
