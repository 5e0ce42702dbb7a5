"""LoRAs for tiny pipelines: random, made with PEFT and written by the pipeline's own ``save_lora_weights``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig, inject_adapter_in_model
from peft.utils import get_peft_model_state_dict

_DENOISER = ["to_q", "to_k", "to_v"]
_TEXT_ENCODER = ["q_proj", "v_proj"]
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
