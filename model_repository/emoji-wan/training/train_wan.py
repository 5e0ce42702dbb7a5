"""Train the tokenizer, the text encoder and the transformer, and save the whole WanPipeline.

The model learns to point from noise to clip (rectified flow): with x the latent of a clip, e noise and t in
0..1, it sees (1 - t) x + t e with a caption, and predicts e - x.
"""

import argparse
import copy
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import clips
import torch
from common import fit, flow_loss, flow_optimizer
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from emoji import BACKGROUNDS
from torch import Tensor, nn
from train_flux import build_t5_tokenizer
from train_wan_vae import encode_clip
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

TOKENS = 16
TEXT_WIDTH = 96

SERVING_DEFAULTS = {
    "prompt": "a red apple moving left on a blue background",
    "height": clips.SIZE,
    "width": clips.SIZE,
    "num_frames": clips.FRAMES,
    "fps": 8,
    "num_inference_steps": 20,
    "guidance_scale": 2.5,
    "negative_prompt": "",
    "max_sequence_length": TOKENS,
}


class EmojiWan(nn.Module):
    """All that learns here: Wan's transformer and its text encoder, small."""

    def __init__(self, vocabulary: int, channels: int, layers: int) -> None:
        """Start from random weights; channels are the latents', layers counts the transformer blocks."""
        super().__init__()
        self.text_encoder = UMT5EncoderModel(
            UMT5Config(
                vocab_size=vocabulary,
                d_model=TEXT_WIDTH,
                d_kv=24,
                d_ff=192,
                num_layers=2,
                num_heads=4,
                dropout_rate=0.0,
            )
        )
        self.transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=4,
            attention_head_dim=48,
            in_channels=channels,
            out_channels=channels,
            text_dim=TEXT_WIDTH,
            ffn_dim=576,
            num_layers=layers,
            rope_max_seq_len=64,
        )

    def forward(self, noisy: Tensor, time: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """Predict e - x [n, c, 5, 8, 8] from (1 - t) x + t e, t [n], and the token ids and mask [n, 16]."""
        text = self.text_encoder(ids, mask).last_hidden_state * mask[..., None]  # as WanPipeline pads it
        velocity: Tensor = self.transformer(
            hidden_states=noisy, timestep=1000 * time, encoder_hidden_states=text, return_dict=False
        )[0]
        return velocity


class Latents(NamedTuple):
    """The posteriors of the clips, normalised as the transformer sees them, and what each one shows."""

    mean: Tensor  # [n, c, 5, 8, 8]
    deviation: Tensor  # [n, c, 5, 8, 8]
    subjects: list[clips.Subject]


@torch.no_grad()
def encode_clips(
    vae: AutoencoderKLWan,
    subjects: Sequence[clips.Subject],
    offsets: Sequence[int] = clips.OFFSETS,
    batch_size: int = 10,
) -> Latents:
    """Encode a clip of every subject at every offset, once."""
    shown = [(subject, offset) for subject in subjects for offset in offsets]
    means, deviations = [], []
    for first in range(0, len(shown), batch_size):
        batch = []
        for (name, direction, colour), offset in shown[first : first + batch_size]:
            still = clips.draw_stills([name], torch.tensor(BACKGROUNDS[colour]) / 255)[0]
            batch.append(clips.draw_clip(still, direction, offset))
        posterior = encode_clip(vae, torch.stack(batch))
        means.append(posterior.mean)
        deviations.append(posterior.std)
    centre, spread = (
        torch.tensor(statistic)[:, None, None, None]
        for statistic in (vae.config.latents_mean, vae.config.latents_std)
    )
    mean, deviation = (torch.cat(means) - centre) / spread, torch.cat(deviations) / spread
    return Latents(mean, deviation, [subject for subject, _ in shown])


class Batch(NamedTuple):
    """One training batch: what the model sees, and the velocity e - x it should predict."""

    noisy: Tensor  # [n, c, 5, 8, 8]
    time: Tensor  # [n]
    ids: Tensor  # [n, 16]
    mask: Tensor  # [n, 16]
    velocity: Tensor  # [n, c, 5, 8, 8]


def draw_batch(latents: Latents, tokenizer: T5Tokenizer, size: int, rng: random.Random) -> Batch:
    """Draw clips, captions, times and noise."""
    chosen = torch.randint(len(latents.subjects), (size,))
    captions = [clips.draw_caption(latents.subjects[index], rng) for index in chosen.tolist()]
    text = tokenizer(captions, padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt")
    mean = latents.mean[chosen]
    clip = mean + latents.deviation[chosen] * torch.randn_like(mean)
    noise = torch.randn_like(clip)
    # Where the emoji starts is decided in noise, and is the hardest to learn, so most times are drawn there:
    # the model knows places only by how far tokens are apart. The others are mostly in the middle.
    kind = torch.rand(size)
    time = torch.where(kind < 0.7, torch.rand(size), torch.randn(size).sigmoid())
    time = torch.where(kind < 0.6, 0.8 + 0.2 * time, time)
    noisy = torch.lerp(clip, noise, time[:, None, None, None, None])
    return Batch(noisy, time, text.input_ids, text.attention_mask, noise - clip)


def build_pipeline(vae: AutoencoderKLWan, tokenizer: T5Tokenizer, model: EmojiWan) -> WanPipeline:
    """Put the parts together, with Wan's own scheduler."""
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, solver_order=2
    )
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=model.text_encoder,
        vae=vae,
        scheduler=scheduler,
        transformer=model.transformer,
    )


def save(pipeline: WanPipeline, folder: Path) -> None:
    """Save a copy of the pipeline in half precision, ready to serve."""
    copy.deepcopy(pipeline).to(torch.float16).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(SERVING_DEFAULTS, indent=2) + "\n")


def train(
    vae: AutoencoderKLWan,
    latents: Latents,
    *,
    minutes: float,
    max_steps: int | None = None,
    layers: int = 5,
    batch_size: int = 16,
    learning_rate: float = 1e-3,
    average_decay: float = 0.998,
    seed: int = 0,
    folder: Path | None = None,
    compiled: bool = False,
) -> tuple[WanPipeline, list[float]]:
    """Train on the latents of this autoencoder; returns the averaged pipeline and the loss of every step.

    With a folder, the state so far is saved there every 500 steps. Compiling pays after some minutes.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = build_t5_tokenizer(clips.all_captions())
    model = EmojiWan(len(tokenizer), vae.config.z_dim, layers)
    average = copy.deepcopy(model).eval()
    pipeline = build_pipeline(vae, tokenizer, average)
    if compiled:
        for block in model.transformer.blocks:
            block.compile()

    def draw_loss() -> Tensor:
        *inputs, velocity = draw_batch(latents, tokenizer, batch_size, rng)
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
        save=None if folder is None else lambda: save(pipeline, folder),
    )
    return pipeline, losses


def main() -> None:
    """Train with the settings of the recipe and save the pipeline."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vae", type=Path, default=Path("build/emoji-wan/vae"))
    parser.add_argument("--out", type=Path, default=Path("build/emoji-wan/pipeline"))
    parser.add_argument("--minutes", type=float, default=70)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    vae = AutoencoderKLWan.from_pretrained(options.vae, dtype=torch.float32)
    pipeline, _ = train(
        vae,
        encode_clips(vae, clips.seen_subjects()),
        minutes=options.minutes,
        learning_rate=options.learning_rate,
        seed=options.seed,
        folder=options.out,
        compiled=True,
    )
    save(pipeline, options.out)


if __name__ == "__main__":
    main()
