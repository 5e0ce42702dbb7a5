"""Every family's previews: they come closer to the picture with each step, and leave it as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_backend.previews import preview_steps, run_with_previews
from diffusion_backend.tasks import steps_run
from diffusion_backend.tombstones import Tombstones
from torch import nn

from tests.families.catalogue import FAMILIES
from tests.families.family import Family
from tests.families.four_requests import FourRequests

pytestmark = pytest.mark.parallel

NUMBER = 3  # the request with the most steps


def test_they_are_spread_over_the_steps() -> None:
    assert preview_steps(0, 20) == []
    assert preview_steps(1, 20) == [10]
    assert preview_steps(3, 20) == [5, 10, 15]
    assert preview_steps(3, 4) == [1, 2, 3]
    assert preview_steps(3, 3) == [1, 2]
    assert preview_steps(3, 1) == []


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_is_the_estimate_of_the_finished_latents(
    family: Family, saved: Callable[[Family], Path], tmp_path: Path
) -> None:
    requests = FourRequests(family, saved(family), Tombstones(tmp_path))
    steps = requests.all[NUMBER].num_inference_steps
    shown: list[tuple[int, torch.Tensor]] = []

    def denoiser(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return module(*args, **kwargs)

    final = run_with_previews(
        lambda denoiser, prepare: requests.run(NUMBER, denoiser, prepare),
        denoiser,
        range(1, steps + 1),
        lambda step, preview: shown.append((step, preview.latents)),
    ).latents
    assert torch.equal(final, requests.denoise(NUMBER)), "the previews changed the picture"
    # A strength leaves the first ones out, and pipelines round differently.
    least = steps_run(steps, requests.all[NUMBER].strength)
    assert [step for step, _ in shown] == list(range(1, len(shown) + 1))
    assert len(shown) in (least, min(least + 1, steps))
    distances = [((preview - final).norm() / final.norm()).item() for _, preview in shown]
    print(family.name, [f"{distance:.4f}" for distance in distances])
    # The last step takes the estimate for the result, but for schedulers (DDIM) whose last sigma is not quite 0.
    assert distances[-1] < 1e-3
    assert distances[-2] < distances[0]
