"""FLUX and its relatives."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKLFlux2,
    ChromaTransformer2DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    OvisImageTransformer2DModel,
)
from transformers import Qwen3ForCausalLM, Qwen3Model

from tests.families import parts
from tests.families import tiny_tokenizers as tokenizers
from tests.families.family import family

_TRANSFORMER: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 4, 8),
}
_PLAIN_VAE: dict[str, Any] = {"use_quant_conv": False, "use_post_quant_conv": False}


def _flux(*, guidance_embeds: bool, **transformer: Any) -> dict[str, Any]:
    return {
        "transformer": FluxTransformer2DModel(
            **{**_TRANSFORMER, **transformer}, pooled_projection_dim=32, guidance_embeds=guidance_embeds
        ),
        "scheduler": parts.flow_match(use_dynamic_shifting=True),
        "vae": parts.kl_vae(4, **_PLAIN_VAE),
        "text_encoder": parts.clip_text(),
        "tokenizer": tokenizers.clip(),
        "text_encoder_2": parts.t5_encoder(),
        "tokenizer_2": tokenizers.t5(),
        "image_encoder": None,
        "feature_extractor": None,
    }


@family("FLUX.1 dev", "FluxPipeline", width=32, height=40, num_inference_steps=3, max_sequence_length=48)
def flux_dev() -> dict[str, Any]:
    return _flux(guidance_embeds=True)


@family(
    "FLUX.1 with true guidance",
    "FluxPipeline",
    width=32,
    height=40,
    num_inference_steps=3,
    guidance_scale=3.0,
    max_sequence_length=48,
)
def flux_true_guidance() -> dict[str, Any]:
    return _flux(guidance_embeds=False)


@family(
    "FLUX.1 Kontext",
    "FluxKontextPipeline",
    width=32,
    height=40,
    num_inference_steps=3,
    max_sequence_length=48,
)
def kontext() -> dict[str, Any]:
    return _flux(guidance_embeds=True)


@family(
    "FLUX.1 Fill",
    "FluxFillPipeline",
    "inpainting",
    width=32,
    height=40,
    num_inference_steps=5,
    max_sequence_length=48,
)
def fill() -> dict[str, Any]:
    # The noise, the image under the mask, and the mask: 2x2 latents of 4 channels, twice, and 4x4 pixels.
    components = _flux(guidance_embeds=True, in_channels=48, out_channels=16)
    return {name: part for name, part in components.items() if part is not None}


@family(
    "FLUX.2 klein",
    "Flux2KleinPipeline",
    width=64,  # images of less are refused
    height=80,
    num_inference_steps=3,
    max_sequence_length=96,
    text_encoder_out_layers=[1, 2],
)
def klein() -> dict[str, Any]:
    return {
        **_flux2(guidance_embeds=False),
        "text_encoder": Qwen3ForCausalLM(parts.qwen3_config(layers=3)),
        "tokenizer": tokenizers.qwen(),
    }


@family(
    "FLUX.2 dev",
    "Flux2Pipeline",
    width=64,
    height=80,
    num_inference_steps=3,
    max_sequence_length=320,  # its system message, and a prompt
    text_encoder_out_layers=[1, 2],
)
def flux2_dev() -> dict[str, Any]:
    return {
        **_flux2(guidance_embeds=True),
        "text_encoder": parts.mistral3(),
        "tokenizer": parts.pixtral_processor(),
    }


def _flux2(*, guidance_embeds: bool) -> dict[str, Any]:
    return {
        "transformer": Flux2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=64,  # two layers of the text encoder
            timestep_guidance_channels=16,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=guidance_embeds,
        ),
        "scheduler": parts.flow_match(use_dynamic_shifting=True),
        "vae": AutoencoderKLFlux2(
            block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=4,
            sample_size=32,
        ),
    }


@family("Chroma", "ChromaPipeline", width=32, height=40, num_inference_steps=3, max_sequence_length=48)
def chroma() -> dict[str, Any]:
    return {
        "transformer": ChromaTransformer2DModel(
            **_TRANSFORMER,
            approximator_num_channels=16,
            approximator_hidden_dim=16,
            approximator_layers=1,
        ),
        "scheduler": parts.flow_match(),
        "vae": parts.kl_vae(4, **_PLAIN_VAE),
        "text_encoder": parts.t5_encoder(),
        "tokenizer": tokenizers.t5(),
        "image_encoder": None,
        "feature_extractor": None,
    }


@family(
    "Ovis-Image", "OvisImagePipeline", width=32, height=40, num_inference_steps=3, max_sequence_length=224
)
def ovis() -> dict[str, Any]:
    return {
        "transformer": OvisImageTransformer2DModel(**{**_TRANSFORMER, "out_channels": 16}),
        "scheduler": parts.flow_match(use_dynamic_shifting=True),
        "vae": parts.kl_vae(4, **_PLAIN_VAE),
        "text_encoder": Qwen3Model(parts.qwen3_config()),
        "tokenizer": tokenizers.qwen(),
    }


FAMILIES = (flux_dev, flux_true_guidance, kontext, fill, klein, flux2_dev, chroma, ovis)
