"""Every family through the step engine: four different requests that arrive at different steps, each against itself
alone. Run with -s to see each family's largest difference and the batches that it ran in."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusion_backend import loading
from diffusion_backend.loading import Stage
from diffusion_backend.tombstones import Tombstones

from tests.families.catalogue import FAMILIES
from tests.families.family import Family
from tests.families.four_requests import PROMPTS, FourRequests

pytestmark = pytest.mark.parallel

# float32 rounds differently in a batch, and each step carries that on. The second one is for the random weights of a
# family (PixArt) whose latents grow into the thousands, where two neighbouring float32 are 1.2e-4 apart.
TOLERANCE = 1e-4
RELATIVE_TOLERANCE = 1e-6


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_rows_of_a_batch_are_what_they_are_alone(
    family: Family, saved: Callable[[Family], Path], tmp_path: Path
) -> None:
    compare_both_ways(family, saved(family), tmp_path)


def compare_both_ways(family: Family, folder: Path, tombstones: Path) -> float:
    """The largest difference between four requests alone and together, which is no more than rounding."""
    requests = FourRequests(family, folder, Tombstones(tombstones))
    alone, batches, difference, is_close = _run_both_ways(requests)
    if not is_close:
        # How much float32 rounds is the CPU's matter (SDXL: 1.6e-6 of the largest on one with AMX). A row that another
        # one leaks into is as far off in float64; rounding is not.
        in_float64 = FourRequests(family, folder, Tombstones(tombstones), torch.float64)
        is_close = _run_both_ways(in_float64)[-1]
    assert is_close
    assert max(batches) > batches[0], "nothing was joined"
    for one, other in itertools.combinations(alone, 2):
        assert one.shape != other.shape or not torch.allclose(one, other, atol=0.01), "they must differ"
    return difference


def _run_both_ways(requests: FourRequests) -> tuple[list[torch.Tensor], list[int], float, bool]:
    """The latents of each request alone, the rows of the forwards of all together, and how far those are off.

    And whether that is close enough.
    """
    alone = [requests.denoise(number) for number in range(len(PROMPTS))]
    together, batches = requests.denoise_together()
    difference = max((one - other).abs().max().item() for one, other in zip(alone, together, strict=True))
    largest = max(one.abs().max().item() for one in alone)
    print(f"{requests.name}: {difference:.1e} of {largest:.1e}, forwards of {batches} rows")
    return alone, batches, difference, difference <= max(TOLERANCE, RELATIVE_TOLERANCE * largest)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_check_at_load_passes(family: Family, saved: Callable[[Family], Path], tmp_path: Path) -> None:
    check = FourRequests(family, saved(family), Tombstones(tmp_path)).check()
    assert check.joined
    assert check.passed
    assert check.difference < 1e-5


def test_the_check_at_load_finds_rows_that_mix(
    saved: Callable[[Family], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (family,) = (family for family in FAMILIES if family.name == "FLUX.1 dev")
    requests = FourRequests(family, saved(family), Tombstones(tmp_path))
    (denoiser,) = loading.modules_of(requests.pipe, Stage.DENOISE).values()
    forward = type(denoiser).forward

    def mixing(self: torch.nn.Module, *args: object, **kwargs: object) -> tuple[torch.Tensor]:
        (output,) = forward(self, *args, **kwargs)
        return (output + 0.1 * output.mean(0, keepdim=True),)

    monkeypatch.setattr(type(denoiser), "forward", mixing)
    check = requests.check()
    assert check.joined
    assert not check.passed
