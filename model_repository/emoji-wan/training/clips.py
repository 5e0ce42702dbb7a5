"""The training set: emoji that move left, right, up or down, and the captions that describe the clips.

A clip has 17 frames of 64 x 64 pixels. The emoji, 28 pixels large, moves by 2 pixels a frame. The drawings are
emoji-flux's references.png, and so are the colours: what both models need is in its folder of training scripts.
"""

import random
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

sys.path.append(str(Path(__file__).resolve().parents[2] / "emoji-flux/training"))
import emoji

HERE = Path(__file__).resolve().parent
SIZE = 64
FRAMES = 17
SPEED = 2  # pixels a frame
DRAWING = 32  # with its margin of 2 pixels on every side

NAMES = (
    "ladybug",
    "fox",
    "pig",
    "panda",
    "frog",
    "penguin",
    "whale",
    "crab",
    "cactus",
    "watermelon",
    "doughnut",
    "pizza",
    "grapes",
    "red apple",
    "banana",
    "rocket",
    "car",
    "star",
    "umbrella",
    "globe",
    "basketball",
    "diamond",
    "robot",
    "alien",
)
COLOURS = ("white", "black", "blue", "purple", "gray")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}  # x, y

WITH_BACKGROUND = (
    "a {name} moving {direction} on a {colour} background",
    "{name} moving {direction} on {colour} background",
    "{name} moving {direction}, {colour} background",
    "a {name} moves {direction} on a {colour} background",
)
WITHOUT_BACKGROUND = (
    "{name} moving {direction}",
    "a {name} moving {direction}",
    "a {name} moves {direction}",
)


class Subject(NamedTuple):
    """What a clip shows."""

    name: str
    direction: str
    colour: str

    @property
    def prompt(self) -> str:
        """The caption that says all of it."""
        return WITH_BACKGROUND[0].format(**self._asdict())


# By how many pixels the way of a clip may be off the middle of the frame.
OFFSETS = (-8, -4, 0, 4, 8)


def held_out(name: str) -> str:
    """The one direction that this name never moves in while the model learns."""
    return list(DIRECTIONS)[NAMES.index(name) % len(DIRECTIONS)]


def seen_subjects(names: Sequence[str] = NAMES) -> list[Subject]:
    """Everything that the model learns from."""
    return [
        Subject(name, direction, colour)
        for name in names
        for direction in DIRECTIONS
        for colour in COLOURS
        if direction != held_out(name)
    ]


@cache
def load_tiles() -> dict[str, Tensor]:
    """The drawings by name, [4, 64, 64] in 0..1."""
    return dict(zip(emoji.load_names(), emoji.load_sheet(emoji.HERE / "references.png"), strict=True))


def draw_stills(names: Sequence[str], colour: Tensor) -> Tensor:
    """The emoji of these names at half their size on one colour [3] in 0..1: [n, 3, 32, 32] in -1..1."""
    tiles = torch.stack([load_tiles()[name] for name in names])
    return avg_pool2d(emoji.composite(tiles, colour[None]), 2)


def place(still: Tensor, x: int, y: int) -> Tensor:
    """A frame [3, 64, 64] with the middle of a still [3, 32, 32] at x, y; its corner gives the background."""
    left, top = x - DRAWING // 2, y - DRAWING // 2
    plain = still[:, :1, :1]
    margins = (left, SIZE - DRAWING - left, top, SIZE - DRAWING - top)
    return pad(still - plain, margins) + plain


def draw_clip(still: Tensor, direction: str, offset: int, shown: range = range(FRAMES)) -> Tensor:
    """The clip [3, 17, 64, 64] in -1..1 of a still [3, 32, 32] that moves past the middle at this offset.

    shown picks some of the frames.
    """
    step_x, step_y = DIRECTIONS[direction]
    frames = []
    for index in shown:
        way = SPEED * (index - FRAMES // 2)
        x = SIZE // 2 + step_x * way + (0 if step_x else offset)
        y = SIZE // 2 + step_y * way + (0 if step_y else offset)
        frames.append(place(still, x, y))
    return torch.stack(frames, dim=1)


def draw_caption(subject: Subject, rng: random.Random) -> str:
    """Describe a clip at random; one caption in ten is empty, which guidance needs."""
    if rng.random() < 0.1:
        return ""
    # White is what a prompt without a background gets.
    plain = subject.colour == "white" and rng.random() < 0.6
    return rng.choice(WITHOUT_BACKGROUND if plain else WITH_BACKGROUND).format(**subject._asdict())


def all_captions() -> list[str]:
    """Every caption that draw_caption can give, to make the tokenizer from."""
    return [
        template.format(name=name, direction=direction, colour=colour)
        for name in NAMES
        for direction in DIRECTIONS
        for colour in COLOURS
        for template in WITH_BACKGROUND + WITHOUT_BACKGROUND
    ]
