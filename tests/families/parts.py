"""Components that several families share: text encoders and VAEs, as small as their code allows."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKL, AutoencoderKLWan, FlowMatchEulerDiscreteScheduler
from diffusion_backend import processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
    Qwen3Config,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from tests.families import tiny_tokenizers as tokenizers
from tests.families.tiny_tokenizers import VOCABULARY

_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_LAYERS: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": VOCABULARY}


def clip_config(layers: int = 2) -> CLIPTextConfig:
    return CLIPTextConfig(
        **_LAYERS,
        projection_dim=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )


def clip_text() -> CLIPTextModel:
    return CLIPTextModel(clip_config())


def clip_text_projected() -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(clip_config())


def t5_config(cls: Any = T5Config) -> Any:
    return cls(vocab_size=VOCABULARY, d_model=32, d_ff=48, d_kv=8, num_heads=4, num_layers=2)


def t5_encoder() -> T5EncoderModel:
    return T5EncoderModel(t5_config())


def umt5_encoder() -> UMT5EncoderModel:
    return UMT5EncoderModel(t5_config(UMT5Config))


def gemma2() -> Gemma2Model:
    config = Gemma2Config(
        **_LAYERS, **_HEADS, num_hidden_layers=2, sliding_window=16, query_pre_attn_scalar=8
    )
    return Gemma2Model(config)


def qwen3_config(layers: int = 2) -> Qwen3Config:
    return Qwen3Config(**_LAYERS, **_HEADS, num_hidden_layers=layers, tie_word_embeddings=False)


def qwen25_text_config() -> dict[str, Any]:
    return {
        **_LAYERS,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [1, 1, 2],
            "type": "mrope",
        },
    }


def qwen25_vl() -> Qwen2_5_VLForConditionalGeneration:
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [0],
    }
    tokens = tokenizers.qwen_vl().get_vocab()
    config = Qwen2_5_VLConfig(
        text_config=qwen25_text_config(),
        vision_config=vision,
        image_token_id=tokens["<|image_pad|>"],
        video_token_id=tokens["<|video_pad|>"],
        vision_start_token_id=tokens["<|vision_start|>"],
        vision_end_token_id=tokens["<|vision_end|>"],
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def qwen_vl_processor() -> Qwen2VLProcessor:
    """An image is at most 16 tokens: each is of four patches with a side of 14 pixels."""
    without_video = processors.without_torchvision(Qwen2VLProcessor)
    assert without_video is not None
    return without_video(
        image_processor=Qwen2VLImageProcessorPil(size={"shortest_edge": 28**2, "longest_edge": 16 * 28**2}),
        tokenizer=tokenizers.qwen_vl(),
    )


def mistral3() -> Mistral3ForConditionalGeneration:
    text = MistralConfig(**_LAYERS, **_HEADS, num_hidden_layers=3, sliding_window=None)
    vision = PixtralVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=56
    )
    return Mistral3ForConditionalGeneration(
        Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    )


def pixtral_processor() -> Any:
    tokenizer = tokenizers.byte_level()
    tokenizer.add_tokens(["[IMG]"], special_tokens=True)
    return processors.PixtralProcessor(tokenizer, chat_template=tokenizers.PARTS_TEMPLATE)


# A VAE whose pictures have eight times the side of its latents, which some pipelines take for granted.
FOUR_BLOCKS: dict[str, Any] = {
    "block_out_channels": (4, 4, 4, 4),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
}


def kl_vae(channels: int = 16, **settings: Any) -> AutoencoderKL:
    """Pictures of twice the latents' side: the smallest with an up and a down block."""
    return AutoencoderKL(
        **{
            "block_out_channels": (8, 16),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "latent_channels": channels,
            "norm_num_groups": 4,
            "sample_size": 32,
            "scaling_factor": 0.36,
            "shift_factor": 0.12,
            **settings,
        }
    )


def wan_vae(cls: Any = AutoencoderKLWan) -> Any:
    return cls(
        base_dim=4,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )


def flow_match(**settings: Any) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(**settings)
