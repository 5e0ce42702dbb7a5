"""What the training scripts of both models share: the loop, the moving average, the losses."""

import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


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


def fit(
    model: nn.Module,
    average: nn.Module,
    optimizer: torch.optim.Optimizer,
    draw_loss: Callable[[], Tensor],
    *,
    minutes: float,
    max_steps: int | None,
    learning_rate: float,
    warmup: int,
    average_decay: float,
    save: Callable[[], object] | None = None,
    save_every: int = 500,
) -> list[float]:
    """Train on the loss of one batch after the other; returns them. `save` is called every so many steps."""
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    losses: list[float] = []
    for step, done in training_steps(minutes, max_steps):
        set_learning_rate(optimizer, learning_rate, step, done, warmup)
        loss = draw_loss()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        update_average(average, model, step, average_decay)
        losses.append(loss.item())
        if step % 100 == 0:
            recent = losses[-100:]
            print(f"step {step:5d}  {100 * done:3.0f} %  loss {sum(recent) / len(recent):.4f}", flush=True)
        if save is not None and (step + 1) % save_every == 0:
            save()
    return losses


def flow_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """For all of a model that learns a flow; norms and biases do not decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
    )


def mixed_precision() -> torch.autocast:
    """bfloat16 for what gains from it, where this CPU has units for it: emulated it is slower than float32."""
    able = torch.cpu.get_capabilities()
    has_units = able.get("amx_bf16", False) or able.get("avx512_bf16", False)
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_units)


def flow_loss(model: nn.Module, inputs: Sequence[Tensor], velocity: Tensor) -> Tensor:
    """How far the velocity that the model predicts is off: the mean squared error."""
    # The fused attention's backward pass is slower than plain matrix products on a CPU.
    with sdpa_kernel(SDPBackend.MATH), mixed_precision():
        predicted = model(*inputs)
    loss: Tensor = (predicted.float() - velocity).pow(2).mean()
    return loss


def image_loss(output: Tensor, target: Tensor) -> Tensor:
    """L1 of the pixels plus half the L1 of their differences to the next pixel, which keeps edges sharp.

    Both are [n, 3, h, w] in -1..1.
    """
    loss = (output - target).abs().mean()
    for axis in (2, 3):
        loss = loss + 0.5 * (output.diff(dim=axis) - target.diff(dim=axis)).abs().mean()
    return loss
