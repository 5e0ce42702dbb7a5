"""Previews: what the final latents would be if a run ended now, as ``vae.decode`` would take them.

A trajectory is made in the same way, from the latents that each step leads to.

At a preview's step the scheduler's arguments say what it takes the finished picture to be (the estimate of x0, which
is sharp long before the noisy latents are). The rest is the pipeline's own: it is called once more, with a denoiser
that computes nothing and a scheduler that returns the estimate, and does with it whatever it does with its final
latents (unpacking, un-normalizing, ...) on the way to ``vae.decode``.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Collection
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.schedulers.scheduling_utils import SchedulerOutput
from torch import nn

from diffusion_backend import rows
from diffusion_backend.rows import Denoiser
from diffusion_backend.seams import Denoised, Prepare

logger = logging.getLogger(__name__)

# One run of the pipeline's loop: with this denoiser, on a private copy that was prepared like this.
Run = Callable[[Denoiser, Prepare], Denoised]
Estimate = Callable[[Any, torch.Tensor, Any, torch.Tensor], torch.Tensor]


def run_with_previews(
    run: Run,
    denoiser: Denoiser,
    steps: Collection[int],
    show: Callable[[int, Denoised], None],
    *,
    trajectory: bool = False,
    prepare: Prepare | None = None,
) -> Denoised:
    """What ``run`` makes; on the way ``show(step, preview)`` is called after each of ``steps``.

    A preview that cannot be made is logged and left out: the picture does not depend on it. With ``trajectory`` they
    are of the latents themselves, noise and all, not of their estimate, and none is left out. ``prepare`` gets the
    private copy that makes the picture, not those of the previews.
    """
    last: Any = None

    def remembering(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal last
        last = denoiser(module, args, kwargs)
        return last

    def preview(step: int, latents: torch.Tensor) -> None:
        try:
            with rows.own_random_state():
                made = run(lambda *_: last, lambda pipe: _finish(pipe, latents))
            show(step, made)
        except Exception:
            if trajectory:
                raise
            logger.exception("no preview of step %d", step)

    def watch(pipe: DiffusionPipeline) -> None:
        _watch(pipe, steps, preview, trajectory=trajectory)
        if prepare is not None:
            prepare(pipe)

    return run(remembering, watch)


def preview_steps(count: int, num_inference_steps: int) -> list[int]:
    """After which steps (from 1) the previews are made: evenly spread, none after the last one.

    Fewer than ``count`` where there are not that many steps before the last.
    """
    spread = {round(number * num_inference_steps / (count + 1)) for number in range(1, count + 1)}
    return sorted(spread - {0, num_inference_steps})


def steps_once(scheduler: Any) -> bool:
    """Whether ``scheduler`` takes one step a timestep: solvers of second order take two."""
    return getattr(scheduler, "order", 1) == 1


def estimate_of(scheduler: Any) -> Estimate | None:
    """How to tell the finished latents before a step of ``scheduler``: (scheduler, model_output, timestep, sample).

    None for schedulers whose steps are not known here. Sources: the ``step`` of diffusers' schedulers; Karras et al.
    2022, https://arxiv.org/abs/2206.00364; Salimans and Ho 2022 (v-prediction), https://arxiv.org/abs/2202.00512;
    Lipman et al. 2023 (flow matching), https://arxiv.org/abs/2210.02747.
    """
    if hasattr(scheduler, "precondition_outputs") or not steps_once(scheduler):
        return None
    if hasattr(scheduler, "convert_model_output"):  # the multistep solvers: DPM++, UniPC, ...
        config = scheduler.config
        predicts = config.get("predict_x0") or "++" in (config.get("algorithm_type") or "")
        return _by_conversion if predicts else None
    if hasattr(scheduler, "sigmas") and hasattr(scheduler, "step_index"):
        return _by_sigma
    return _by_alpha if hasattr(scheduler, "alphas_cumprod") else None


def _watch(
    pipe: DiffusionPipeline,
    steps: Collection[int],
    show: Callable[[int, torch.Tensor], None],
    *,
    trajectory: bool,
) -> None:
    """Have ``show(step, latents)`` called after ``steps`` of the run for which ``pipe`` is the private copy."""
    scheduler = pipe.scheduler
    take_step = scheduler.step
    signature = inspect.signature(take_step)
    estimate = None if trajectory else estimate_of(scheduler)
    done = 0

    @functools.wraps(take_step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        done += 1
        if done not in steps:
            return take_step(*args, **kwargs)
        latents: torch.Tensor | None = None
        if estimate is not None:
            try:
                given = signature.bind(*args, **kwargs).arguments
                latents = estimate(scheduler, given["model_output"], given["timestep"], given["sample"])
            except Exception:
                logger.exception("no preview of step %d", done)
        result = take_step(*args, **kwargs)
        if trajectory:
            latents = result[0]
        if latents is not None:
            show(done, latents)
        return result

    scheduler.step = watched


def _finish(pipe: DiffusionPipeline, latents: torch.Tensor) -> None:
    """Make ``pipe``, a private copy, take ``latents`` for what its first step leads to, and go on to its end."""

    @functools.wraps(pipe.scheduler.step)
    def lead_to_them(*_args: Any, return_dict: bool = True, **_kwargs: Any) -> Any:
        if isinstance(getattr(type(pipe), "interrupt", None), property):
            pipe._interrupt = True  # the steps that are left are skipped
        return SchedulerOutput(prev_sample=latents) if return_dict else (latents,)

    pipe.scheduler.step = lead_to_them


def _by_conversion(scheduler: Any, output: torch.Tensor, timestep: Any, sample: torch.Tensor) -> torch.Tensor:
    if scheduler.step_index is None:
        scheduler._init_step_index(timestep)
    x0: torch.Tensor = scheduler.convert_model_output(output, sample=sample)
    return x0


def _by_sigma(scheduler: Any, output: torch.Tensor, timestep: Any, sample: torch.Tensor) -> torch.Tensor:
    if scheduler.step_index is None:
        scheduler._init_step_index(timestep)
    sigma = scheduler.sigmas[scheduler.step_index].to(sample.device, torch.float32)
    prediction = scheduler.config.get("prediction_type", "epsilon")
    v, x = output.float(), sample.float()
    if prediction == "sample":
        x0 = v
    elif prediction == "v_prediction":
        x0 = x / (sigma**2 + 1) - v * sigma / (sigma**2 + 1).sqrt()
    else:  # epsilon, and the velocity of flow matching
        x0 = x - sigma * v
    return x0.to(sample.dtype)


def _by_alpha(scheduler: Any, output: torch.Tensor, timestep: Any, sample: torch.Tensor) -> torch.Tensor:
    alpha = scheduler.alphas_cumprod[int(timestep)].to(sample.device, torch.float32)
    prediction = scheduler.config.get("prediction_type", "epsilon")
    v, x = output.float(), sample.float()
    if prediction == "sample":
        x0 = v
    elif prediction == "v_prediction":
        x0 = alpha.sqrt() * x - (1 - alpha).sqrt() * v
    else:
        x0 = (x - (1 - alpha).sqrt() * v) / alpha.sqrt()
    return x0.to(sample.dtype)
