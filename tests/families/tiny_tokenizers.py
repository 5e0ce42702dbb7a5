"""Tiny tokenizers of every kind that the families use, made in memory."""

from __future__ import annotations

import string
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    ByT5Tokenizer,
    CLIPTokenizer,
    GemmaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    T5Tokenizer,
)

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Mistral's: a message's content is a list of parts.
PARTS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}[IMG]{% endif %}{% endfor %}{% endfor %}"
)
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = 512  # of every text encoder: more than any tokenizer here has


def clip(pad_token: str = "<|endoftext|>") -> CLIPTokenizer:
    words = ["<|startoftext|>", "<|endoftext|>", "!", *BYTES, *(f"{byte}</w>" for byte in BYTES[:200])]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(words))}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77, pad_token=pad_token)


def t5(max_length: int = 64) -> T5Tokenizer:
    pieces = ["▁", *string.ascii_letters, *string.digits, *string.punctuation]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((piece, -2.0) for piece in pieces)]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=max_length)


def byt5() -> ByT5Tokenizer:
    return ByT5Tokenizer()


def gemma(max_length: int = 64) -> GemmaTokenizer:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    vocabulary = {word: i for i, word in enumerate([*special, "▁", *string.printable])}
    return GemmaTokenizer(vocab=vocabulary, merges=[], model_max_length=max_length, padding_side="right")


def qwen() -> Qwen2Tokenizer:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Qwen2Tokenizer(
        vocab={word: i for i, word in enumerate([*special, *BYTES])},
        merges=[],
        additional_special_tokens=special[1:],
        padding_side="right",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def qwen_vl() -> Qwen2Tokenizer:
    """With the tokens that stand for an image."""
    images = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = qwen()
    tokenizer.add_tokens(images, special_tokens=True)
    return tokenizer


def byte_level(**kwargs: Any) -> PreTrainedTokenizerFast:
    """As Llama's and GLM's: bytes with a few special tokens."""
    special = ["<pad>", "<eos>", "<bos>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    model = models.BPE(vocab={word: i for i, word in enumerate([*special, *BYTES])}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=special[3:],
        padding_side="left",
        **kwargs,
    )
