"""Wan and the families that use its VAE."""

from __future__ import annotations

from typing import Any

from diffusers import (
    DPMSolverMultistepScheduler,
    SanaVideoTransformer3DModel,
    SkyReelsV2Transformer3DModel,
    UniPCMultistepScheduler,
    WanTransformer3DModel,
)
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

from tests.families import parts
from tests.families import tiny_tokenizers as tokenizers
from tests.families.family import family

_CALL: dict[str, Any] = {
    "width": 32,
    "height": 16,
    "num_frames": 5,
    "num_inference_steps": 3,
    "max_sequence_length": 48,
}
_TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 32,
    "num_layers": 1,
}


def _wan(**transformer: Any) -> dict[str, Any]:
    return {
        "tokenizer": tokenizers.t5(),
        "text_encoder": parts.umt5_encoder(),
        "vae": parts.wan_vae(),
        "scheduler": UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
        ),
        "transformer": WanTransformer3DModel(**{**_TRANSFORMER, **transformer}),
    }


@family("Wan 2.1 T2V", "WanPipeline", "text-to-video", **_CALL)
def wan21() -> dict[str, Any]:
    return {**_wan(), "transformer_2": None}


@family("Wan 2.2 T2V", "WanPipeline", "text-to-video", init={"boundary_ratio": 0.875}, **_CALL)
def wan22() -> dict[str, Any]:
    return {**_wan(), "transformer_2": WanTransformer3DModel(**_TRANSFORMER)}


@family("Wan 2.2 TI2V 5B", "WanPipeline", "text-to-video", init={"expand_timesteps": True}, **_CALL)
def wan22_small() -> dict[str, Any]:
    return {**_wan(), "transformer_2": None}


@family("Wan 2.1 I2V", "WanImageToVideoPipeline", "image-to-video", **_CALL)
def wan21_image() -> dict[str, Any]:
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        projection_dim=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
    )
    size = {"height": 32, "width": 32}
    return {
        **_wan(in_channels=36, image_dim=16, added_kv_proj_dim=24),
        "transformer_2": None,
        "image_encoder": CLIPVisionModel(vision),
        "image_processor": CLIPImageProcessorPil(crop_size=size, size={"shortest_edge": 32}),
    }


@family("Wan 2.2 I2V", "WanImageToVideoPipeline", "image-to-video", init={"boundary_ratio": 0.9}, **_CALL)
def wan22_image() -> dict[str, Any]:
    return {
        **_wan(in_channels=36),
        "transformer_2": WanTransformer3DModel(**{**_TRANSFORMER, "in_channels": 36}),
        "image_encoder": None,
        "image_processor": None,
    }


@family("SkyReels V2", "SkyReelsV2Pipeline", "text-to-video", **_CALL)
def skyreels() -> dict[str, Any]:
    return {**_wan(), "transformer": SkyReelsV2Transformer3DModel(**_TRANSFORMER)}


@family(
    "Sana Video",
    "SanaVideoPipeline",
    "text-to-video",
    width=32,
    height=32,
    frames=5,
    num_inference_steps=3,
    complex_human_instruction=None,
)
def sana_video() -> dict[str, Any]:
    return {
        "transformer": SanaVideoTransformer3DModel(
            in_channels=16,
            out_channels=16,
            num_layers=1,
            num_attention_heads=2,
            attention_head_dim=12,
            num_cross_attention_heads=2,
            cross_attention_head_dim=12,
            cross_attention_dim=24,
            caption_channels=32,
            sample_size=8,
        ),
        "scheduler": DPMSolverMultistepScheduler(
            use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=8.0
        ),
        "vae": parts.wan_vae(),
        "text_encoder": parts.gemma2(),
        "tokenizer": tokenizers.gemma(),
    }


FAMILIES = (wan21, wan22, wan22_small, wan21_image, wan22_image, skyreels, sana_video)
