"""Does the model show what it is asked for? Three questions about every generated clip:

direction: does the drawing, which is all that differs from the background, move the way the prompt says?
name: is the drawing in the middle frame nearest, in pixels, to the emoji that the prompt names?
background: is the colour of the border, of emoji-flux's nine background colours, nearest to the one asked?

They are asked of the motions that each name was trained on, and of the one that it was not.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import clips
import torch
from diffusers import WanPipeline
from evaluate import Score, recognise_backgrounds
from torch import Tensor

FIRST_SEED = 50_000
BATCH = 8
DIFFERENT = 0.12  # from the background, in 0..1, in at least one of red, green and blue
REACH = 3  # pixels by which a drawing is moved about to find where it fits best


def load_pipeline(folder: Path) -> tuple[WanPipeline, dict[str, Any]]:
    """Load a pipeline, in single precision as a CPU prefers, and its serving defaults."""
    pipeline = WanPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline, json.loads((folder / "generation_config.json").read_text())


def generate(
    pipeline: WanPipeline, defaults: Mapping[str, Any], prompts: Sequence[str], first_seed: int
) -> Tensor:
    """Make a clip of each prompt with a seed of its own: [n, 17, 3, 64, 64] in 0..1."""
    made = [
        pipeline(
            list(prompts[first : first + BATCH]),
            height=defaults["height"],
            width=defaults["width"],
            num_frames=defaults["num_frames"],
            num_inference_steps=defaults["num_inference_steps"],
            guidance_scale=defaults["guidance_scale"],
            negative_prompt=defaults["negative_prompt"],
            max_sequence_length=defaults["max_sequence_length"],
            generator=[
                torch.Generator().manual_seed(first_seed + index)
                for index in range(first, min(first + BATCH, len(prompts)))
            ],
            output_type="pt",
        ).frames
        for first in range(0, len(prompts), BATCH)
    ]
    return torch.cat(made)


def measure_background(frames: Tensor) -> Tensor:
    """The median colour [3] of the border, two pixels wide, of frames [n, 3, 64, 64]."""
    border = torch.ones(frames.shape[2:], dtype=torch.bool)
    border[2:-2, 2:-2] = False
    return frames[:, :, border].transpose(1, 2).flatten(0, 1).median(dim=0).values


def find_centres(frames: Tensor, background: Tensor) -> Tensor:
    """The middle x, y [n, 2] of what differs from the background [3], for frames [n, 3, h, w] in 0..1.

    Where nothing does, the middle of the frame.
    """
    mask = ((frames - background[:, None, None]).abs().amax(1) > DIFFERENT).float()
    pixels = mask.sum((1, 2)).clamp(min=1)
    centres = []
    for axis in (2, 1):
        middle = (frames.shape[axis + 1] - 1) / 2
        places = torch.arange(frames.shape[axis + 1]) - middle
        centres.append((mask.sum(3 - axis) * places).sum(1) / pixels + middle)
    return torch.stack(centres, dim=1)


def recognise_direction(clip: Tensor) -> str:
    """The direction in which the drawing of a clip [17, 3, 64, 64] in 0..1 moves most."""
    track = find_centres(clip, measure_background(clip))
    x, y = (track[-4:].mean(0) - track[:4].mean(0)).tolist()
    if abs(x) > abs(y):
        return "left" if x < 0 else "right"
    return "up" if y < 0 else "down"


def recognise_name(frame: Tensor) -> str:
    """The name of the drawing that fits a frame [3, 64, 64] in 0..1 best, laid on the frame's background."""
    background = measure_background(frame[None])
    stills = (clips.draw_stills(clips.NAMES, background) + 1) / 2
    centre = find_centres(frame[None], background)[0]
    # Where the middle of each drawing should be for its own centre to fall on the frame's.
    places = (centre - find_centres(stills, background) + (clips.DRAWING - 1) / 2 + 0.5).round().int()
    distances = {}
    for name, still, (x, y) in zip(clips.NAMES, stills, places.tolist(), strict=True):
        distances[name] = min(
            float((clips.place(still, x + right, y + down) - frame).pow(2).mean())
            for right in range(-REACH, REACH + 1)
            for down in range(-REACH, REACH + 1)
        )
    return min(distances, key=lambda name: distances[name])


def score_clips(subjects: Sequence[clips.Subject], made: Tensor) -> dict[str, Score]:
    """Ask the three questions about clips [n, 17, 3, 64, 64] of these subjects."""
    prompts = [subject.prompt for subject in subjects]
    middles = made[:, clips.FRAMES // 2]
    scores = {"direction": Score(), "name": Score(), "background": Score()}
    scores["direction"].add(
        [subject.direction for subject in subjects], [recognise_direction(clip) for clip in made], prompts
    )
    scores["name"].add([subject.name for subject in subjects], list(map(recognise_name, middles)), prompts)
    scores["background"].add(
        [subject.colour for subject in subjects], recognise_backgrounds(middles), prompts
    )
    return scores


def choose_subjects(*, seen: bool, seeds: int) -> list[clips.Subject]:
    """Every name in its held-out direction, or in one of the others, `seeds` times, the colours in turn."""
    chosen = []
    for turn in range(seeds):
        for index, name in enumerate(clips.NAMES):
            others = [direction for direction in clips.DIRECTIONS if direction != clips.held_out(name)]
            direction = others[(index + turn) % len(others)] if seen else clips.held_out(name)
            chosen.append(clips.Subject(name, direction, clips.COLOURS[(index + turn) % len(clips.COLOURS)]))
    return chosen


def main() -> None:
    """Score motions that the names were not trained on, then ones that they were; print and write it."""
    parser = argparse.ArgumentParser(description="Score a pipeline on every name of the training set.")
    parser.add_argument("--pipeline", type=Path, default=clips.HERE.parent / "pipeline")
    parser.add_argument("--seeds", type=int, default=2, help="clips per name and kind of motion")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--out", type=Path, default=Path("build/emoji-wan/score.json"))
    options = parser.parse_args()

    pipeline, defaults = load_pipeline(options.pipeline)
    figures = {}
    for title, seen in (("held-out motions", False), ("seen motions", True)):
        subjects = choose_subjects(seen=seen, seeds=options.seeds)
        made = generate(pipeline, defaults, [subject.prompt for subject in subjects], options.first_seed)
        scores = score_clips(subjects, made)
        for question, score in scores.items():
            print(f"{title}: {question} {score}", flush=True)
        figures[title] = {question: [score.right, score.total] for question, score in scores.items()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
