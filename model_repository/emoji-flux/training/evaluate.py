"""Does the model draw what it is asked for? Two questions about every generated picture:

name: is the nearest emoji of the training set, among all of them in either mirror, the one the prompt names?
Near means close in the latent space of the model's own autoencoder.

background: is the colour of the picture's border, of the nine background colours, nearest to the one asked?
"""

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FluxPipeline
from emoji import BACKGROUNDS, HERE, background_colours, composite, load_names, load_sheet
from torch import Tensor

FIRST_SEED = 50_000


@dataclass
class Score:
    """How many pictures were right, and what the wrong ones showed."""

    right: int = 0
    total: int = 0
    mistakes: list[str] = field(default_factory=list)

    def add(self, wanted: Sequence[str], seen: Sequence[str], prompts: Sequence[str]) -> None:
        """Compare what was asked for with what the pictures show."""
        for want, see, prompt in zip(wanted, seen, prompts, strict=True):
            self.total += 1
            if want == see:
                self.right += 1
            else:
                self.mistakes.append(f"{prompt}: {see}")

    @property
    def share(self) -> float:
        """The share that is right, 0..1."""
        return self.right / self.total

    def __str__(self) -> str:
        """As 148/148, then the mistakes."""
        return "\n  ".join([f"{self.right}/{self.total} ({100 * self.share:.1f} %)", *self.mistakes])


def load_pipeline(folder: Path) -> tuple[FluxPipeline, dict[str, Any]]:
    """Load a pipeline, in single precision as a CPU prefers, and its serving defaults."""
    pipeline = FluxPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline, json.loads((folder / "generation_config.json").read_text())


def generate(
    pipeline: FluxPipeline, defaults: Mapping[str, Any], prompts: Sequence[str], first_seed: int
) -> Tensor:
    """Draw each prompt with a seed of its own: [n, 3, 64, 64] in 0..1."""
    pictures: Tensor = pipeline(
        list(prompts),
        height=defaults["height"],
        width=defaults["width"],
        num_inference_steps=defaults["num_inference_steps"],
        true_cfg_scale=defaults["guidance_scale"],
        negative_prompt=[defaults["negative_prompt"]] * len(prompts),
        max_sequence_length=defaults["max_sequence_length"],
        generator=[torch.Generator().manual_seed(first_seed + index) for index in range(len(prompts))],
        output_type="pt",
    ).images
    return pictures


@torch.no_grad()
def recognise_names(
    vae: AutoencoderKL, pictures: Tensor, colours: Sequence[str], tiles: Tensor, names: Sequence[str]
) -> list[str]:
    """The name of the emoji nearest to each picture [n, 3, 64, 64], tiles being laid on the same colour."""

    def encode(batch: Tensor) -> Tensor:
        latents: Tensor = vae.encode(batch).latent_dist.mean
        return latents.flatten(1)

    references = {}
    for colour in set(colours):
        tinted = composite(tiles, torch.tensor([BACKGROUNDS[colour]]) / 255)
        references[colour] = torch.cat([encode(tinted), encode(tinted.flip(3))])
    seen = []
    for latent, colour in zip(encode(pictures * 2 - 1), colours, strict=True):
        nearest = int(torch.cdist(latent[None], references[colour]).argmin())
        seen.append(names[nearest % len(names)])
    return seen


def recognise_backgrounds(pictures: Tensor) -> list[str]:
    """The background colour nearest to the border, two pixels wide, of each picture [n, 3, 64, 64]."""
    border = torch.ones(pictures.shape[2:], dtype=torch.bool)
    border[2:-2, 2:-2] = False
    # The median: a drawing that reaches over the edge somewhere does not change it.
    colours = pictures[:, :, border].median(dim=2).values
    nearest = torch.cdist(colours, background_colours()).argmin(1)
    return [list(BACKGROUNDS)[index] for index in nearest.tolist()]


def evaluate(
    pipeline: FluxPipeline,
    defaults: Mapping[str, Any],
    *,
    colours: Sequence[str],
    seeds: int,
    first_seed: int = FIRST_SEED,
) -> tuple[Score, Score]:
    """Draw every name `seeds` times on random ones of the colours; returns the name and background scores."""
    names, tiles = load_names(), load_sheet(HERE / "references.png")
    rng = random.Random(first_seed)
    name_score, background_score = Score(), Score()
    for turn in range(seeds):
        wanted = rng.choices(colours, k=len(names))
        prompts = [f"a {name} on a {colour} background" for name, colour in zip(names, wanted, strict=True)]
        pictures = generate(pipeline, defaults, prompts, first_seed + 1000 * turn)
        name_score.add(names, recognise_names(pipeline.vae, pictures, wanted, tiles, names), prompts)
        background_score.add(wanted, recognise_backgrounds(pictures), prompts)
    return name_score, background_score


def main() -> None:
    """Score every name on white, then on random other backgrounds; print the scores and the mistakes."""
    parser = argparse.ArgumentParser(description="Score a pipeline on every name of the training set.")
    parser.add_argument("--pipeline", type=Path, default=HERE.parent / "pipeline")
    parser.add_argument("--seeds", type=int, default=2, help="pictures per name and kind of background")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    options = parser.parse_args()

    pipeline, defaults = load_pipeline(options.pipeline)
    other_colours = [colour for colour in BACKGROUNDS if colour != "white"]
    for title, colours in (("white", ["white"]), ("other colours", other_colours)):
        names, backgrounds = evaluate(
            pipeline, defaults, colours=colours, seeds=options.seeds, first_seed=options.first_seed
        )
        print(f"on {title}: names {names}")
        print(f"on {title}: backgrounds {backgrounds}")


if __name__ == "__main__":
    main()
