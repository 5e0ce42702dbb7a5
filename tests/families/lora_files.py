"""LoRAs for tiny pipelines: random, made with PEFT and written by the pipeline's own ``save_lora_weights``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig, inject_adapter_in_model
from peft.utils import get_peft_model_state_dict

_DENOISER = ["to_q", "to_k", "to_v"]
_TEXT_ENCODER = ["q_proj", "k_proj", "v_proj", "out_proj"]
FILE = "pytorch_lora_weights.safetensors"


def save_lora(pipeline: Path, folder: Path, *parts: str, seed: int = 0, rank: int = 4) -> Path:
    """A LoRA for ``parts`` (components) of a pipeline on disk; returns ``folder``."""
    pipe = DiffusionPipeline.from_pretrained(pipeline)
    layers: dict[str, Any] = {}
    for part in parts:
        targets = _TEXT_ENCODER if part.startswith("text_encoder") else _DENOISER
        torch.manual_seed(seed)
        # Not zero, as PEFT begins a training with: these are to change something.
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, init_lora_weights=False)
        module = inject_adapter_in_model(config, getattr(pipe, part), "made")
        layers[f"{part}_lora_layers"] = get_peft_model_state_dict(module, adapter_name="made")
    type(pipe).save_lora_weights(folder, **layers)
    return folder


def as_kohya(tensors: dict[str, torch.Tensor], alpha: float) -> dict[str, torch.Tensor]:
    """A LoRA of Stable Diffusion 1.5 as trainers other than diffusers name its tensors."""
    named: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, rest = name.partition(".lora_")
        layer = layer.replace("text_encoder.", "lora_te_text_model_").replace("unet.", "lora_unet_")
        layer = layer.replace(".", "_")
        named[f"{layer}.lora_{'down' if rest.startswith('A') else 'up'}.weight"] = tensor
        named[f"{layer}.alpha"] = torch.tensor(alpha)
    return named
