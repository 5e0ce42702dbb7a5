"""What the three training scripts share: the clock, the learning rate, the moving average, the image loss."""

import math
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn


def training_steps(minutes: float, max_steps: int | None = None) -> Iterator[tuple[int, float]]:
    """Count steps until the time (or max_steps) is used up; yields (step from 0, share of the run done)."""
    start, step = time.monotonic(), 0
    while True:
        done = (time.monotonic() - start) / (60 * minutes)
        if max_steps is not None:
            done = max(done, step / max_steps)
        if done >= 1:
            return
        yield step, done
        step += 1


def set_learning_rate(
    optimizer: torch.optim.Optimizer, peak: float, step: int, done: float, warmup: int
) -> None:
    """Rise linearly for `warmup` steps, then fall by a cosine to 2 % of the peak."""
    rate = peak * min(1.0, (step + 1) / warmup) * (0.51 + 0.49 * math.cos(math.pi * done))
    for group in optimizer.param_groups:
        group["lr"] = rate


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, step: int, decay: float) -> None:
    """Move the average a little towards the model; early on by more, so that it forgets the random start."""
    decay = min(decay, (step + 2) / (step + 11))
    for mean, value in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(value, 1 - decay)


def image_loss(output: Tensor, target: Tensor) -> Tensor:
    """L1 of the pixels plus half the L1 of their differences to the next pixel, which keeps edges sharp.

    Both are [n, 3, h, w] in -1..1.
    """
    loss = (output - target).abs().mean()
    for axis in (2, 3):
        loss = loss + 0.5 * (output.diff(dim=axis) - target.diff(dim=axis)).abs().mean()
    return loss
