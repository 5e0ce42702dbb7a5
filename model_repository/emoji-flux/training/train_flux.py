"""Train the tokenizers, both text encoders and the transformer, and save the whole FluxPipeline.

The model learns to point from noise to picture (rectified flow): with x the latent of a picture, e noise and
t in 0..1, it sees (1 - t) x + t e with a caption, and predicts e - x.
"""

import argparse
import copy
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from common import fit, flow_loss, flow_optimizer
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from emoji import (
    BACKGROUNDS,
    HERE,
    TILE,
    all_captions,
    background_colours,
    composite,
    draw_caption,
    load_names,
    load_sheet,
)
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

CLIP_TOKENS = 32
T5_TOKENS = 16
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"

SERVING_DEFAULTS = {
    "prompt": "a red apple",
    "height": TILE,
    "width": TILE,
    "num_inference_steps": 20,
    "guidance_scale": 2.0,
    "negative_prompt": "",
    "max_sequence_length": T5_TOKENS,
}


def train_clip_tokenizer(captions: Sequence[str]) -> CLIPTokenizer:
    """CLIP's byte pair encoding, learned from the captions."""
    bpe = Tokenizer(models.BPE(end_of_word_suffix="</w>", continuing_subword_prefix=""))
    words = Regex(r"[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
    bpe.pre_tokenizer = pre_tokenizers.Split(words, behavior="removed", invert=True)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        end_of_word_suffix="</w>",
        initial_alphabet=list(LETTERS + ",-."),
        show_progress=False,
    )
    bpe.train_from_iterator(captions, trainer)
    learned = json.loads(bpe.to_str())["model"]
    vocabulary = dict(learned["vocab"])
    for token in ("<|startoftext|>", "<|endoftext|>"):
        vocabulary[token] = len(vocabulary)
    merges = [tuple(pair) for pair in learned["merges"]]
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=CLIP_TOKENS)


def build_t5_tokenizer(captions: Sequence[str]) -> T5Tokenizer:
    """T5's unigram model with a piece for every word of the captions, and letters for all other words."""
    words = sorted({word for caption in captions for word in caption.replace(",", " ").split()})
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -8.0), (",", -3.0)]
    pieces += [(f"▁{word}", -4.0) for word in words]
    pieces += [(letter, -12.0) for letter in LETTERS + "-"]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=CLIP_TOKENS)


class EmojiFlux(nn.Module):
    """All that learns here: FLUX's transformer and its two text encoders, small."""

    image_ids: Tensor
    text_ids: Tensor

    def __init__(self, clip_vocabulary: int, t5_vocabulary: int, layers: tuple[int, int]) -> None:
        """Start from random weights; layers counts the double and the single transformer blocks."""
        super().__init__()
        self.clip = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=clip_vocabulary,
                hidden_size=96,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=CLIP_TOKENS,
                bos_token_id=clip_vocabulary - 2,
                eos_token_id=clip_vocabulary - 1,
                pad_token_id=clip_vocabulary - 1,
                projection_dim=96,
            )
        )
        self.t5 = T5EncoderModel(
            T5Config(
                vocab_size=t5_vocabulary,
                d_model=128,
                d_kv=32,
                d_ff=256,
                num_layers=2,
                num_heads=4,
                feed_forward_proj="gated-gelu",
                dropout_rate=0.0,
            )
        )
        self.transformer = FluxTransformer2DModel(
            in_channels=16,
            num_layers=layers[0],
            num_single_layers=layers[1],
            attention_head_dim=48,
            num_attention_heads=4,
            joint_attention_dim=128,
            pooled_projection_dim=96,
            axes_dims_rope=(8, 20, 20),
        )
        grid = torch.cartesian_prod(torch.zeros(1), torch.arange(8.0), torch.arange(8.0))
        self.register_buffer("image_ids", grid, persistent=False)  # [64, 3]: 0, row, column
        self.register_buffer("text_ids", torch.zeros(T5_TOKENS, 3), persistent=False)

    def forward(self, noisy: Tensor, time: Tensor, clip_ids: Tensor, t5_ids: Tensor) -> Tensor:
        """Predict e - x [n, 64, 16] from (1 - t) x + t e, t [n] and the token ids [n, 32] and [n, 16]."""
        velocity: Tensor = self.transformer(
            hidden_states=noisy,
            timestep=time,
            encoder_hidden_states=self.t5(t5_ids).last_hidden_state,
            pooled_projections=self.clip(clip_ids).pooler_output,
            img_ids=self.image_ids,
            txt_ids=self.text_ids,
            return_dict=False,
        )[0]
        return velocity


class Latents(NamedTuple):
    """The posteriors of every picture, packed as the transformer sees them, and what each one shows."""

    mean: Tensor  # [n, 64, 16]
    deviation: Tensor  # [n, 64, 16]
    subjects: list[tuple[str, str]]  # name, background


def pack(latents: Tensor) -> Tensor:
    """Each square of 2 x 2 becomes a token: [n, 4, 16, 16] to [n, 64, 16]."""
    n, channels, height, width = latents.shape
    squares = latents.reshape(n, channels, height // 2, 2, width // 2, 2)
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(n, height * width // 4, channels * 4)


@torch.no_grad()
def encode_pictures(vae: AutoencoderKL, tiles: Tensor, names: Sequence[str]) -> Latents:
    """Encode tiles [n, 4, 64, 64] once, on every background and in both mirrors.

    Sets the autoencoder's shift and scale such that the latents as a whole have mean 0 and deviation 1.
    """
    moments, subjects = [], []
    for colour_name, colour in zip(BACKGROUNDS, background_colours(), strict=True):
        pictures = composite(tiles, colour[None])
        for mirrored in (pictures, pictures.flip(3)):
            moments.append(vae.encode(mirrored).latent_dist.parameters)
            subjects += [(name, colour_name) for name in names]
    mean, log_variance = torch.cat(moments).chunk(2, dim=1)
    shift, scale = mean.mean().item(), 1 / mean.std().item()
    vae.register_to_config(shift_factor=shift, scaling_factor=scale)
    return Latents(pack((mean - shift) * scale), pack((0.5 * log_variance).exp() * scale), subjects)


class Batch(NamedTuple):
    """One training batch: what the model sees, and the velocity e - x it should predict."""

    noisy: Tensor  # [n, 64, 16]
    time: Tensor  # [n]
    clip_ids: Tensor  # [n, 32]
    t5_ids: Tensor  # [n, 16]
    velocity: Tensor  # [n, 64, 16]


def draw_batch(
    latents: Latents, clip_tokenizer: CLIPTokenizer, t5_tokenizer: T5Tokenizer, size: int, rng: random.Random
) -> Batch:
    """Draw pictures, captions, times and noise."""
    chosen = torch.randint(len(latents.subjects), (size,))
    subjects = [latents.subjects[index] for index in chosen.tolist()]
    captions = [draw_caption(name, colour, rng) for name, colour in subjects]
    clip_ids, t5_ids = (
        tokenizer(
            captions, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        ).input_ids
        for tokenizer, length in ((clip_tokenizer, CLIP_TOKENS), (t5_tokenizer, T5_TOKENS))
    )
    mean = latents.mean[chosen]
    picture = mean + latents.deviation[chosen] * torch.randn_like(mean)
    noise = torch.randn_like(picture)
    # Times in the middle are the hardest, so most are drawn there; a few uniform ones cover the ends.
    uniform = torch.rand(size) < 0.2
    time = torch.where(uniform, torch.rand(size), torch.randn(size).sigmoid())
    noisy = torch.lerp(picture, noise, time[:, None, None])
    return Batch(noisy, time, clip_ids, t5_ids, noise - picture)


def train(
    vae: AutoencoderKL,
    tiles: Tensor,
    names: Sequence[str],
    *,
    minutes: float,
    max_steps: int | None = None,
    layers: tuple[int, int] = (2, 4),
    batch_size: int = 64,
    learning_rate: float = 1e-3,
    average_decay: float = 0.9985,
    seed: int = 0,
) -> tuple[FluxPipeline, list[float]]:
    """Train on tiles [n, 4, 64, 64] with these names; returns the averaged pipeline and every step's loss."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    latents = encode_pictures(vae, tiles, names)
    captions = all_captions(names)
    clip_tokenizer, t5_tokenizer = train_clip_tokenizer(captions), build_t5_tokenizer(captions)
    model = EmojiFlux(len(clip_tokenizer), len(t5_tokenizer), layers)
    average = copy.deepcopy(model)

    def draw_loss() -> Tensor:
        *inputs, velocity = draw_batch(latents, clip_tokenizer, t5_tokenizer, batch_size, rng)
        return flow_loss(model, inputs, velocity)

    losses = fit(
        model,
        average,
        flow_optimizer(model),
        draw_loss,
        minutes=minutes,
        max_steps=max_steps,
        learning_rate=learning_rate,
        warmup=100,
        average_decay=average_decay,
    )
    average.eval()
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=average.clip,
        tokenizer=clip_tokenizer,
        text_encoder_2=average.t5,
        tokenizer_2=t5_tokenizer,
        transformer=average.transformer,
    )
    return pipeline, losses


def main() -> None:
    """Train with the settings of the recipe and save the pipeline, in half precision, ready to serve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tiles", type=Path, default=HERE / "references.png")
    parser.add_argument("--vae", type=Path, default=Path("build/emoji-flux/vae"))
    parser.add_argument("--out", type=Path, default=Path("build/emoji-flux/pipeline"))
    parser.add_argument("--minutes", type=float, default=80)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    vae = AutoencoderKL.from_pretrained(options.vae, dtype=torch.float32)
    pipeline, _ = train(
        vae,
        load_sheet(options.tiles),
        load_names(),
        minutes=options.minutes,
        learning_rate=options.learning_rate,
        seed=options.seed,
    )
    pipeline.to(torch.float16).save_pretrained(options.out)
    (options.out / "generation_config.json").write_text(json.dumps(SERVING_DEFAULTS, indent=2) + "\n")


if __name__ == "__main__":
    main()
