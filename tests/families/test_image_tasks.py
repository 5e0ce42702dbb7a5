"""Every task that takes images: three stages equal the own class of diffusers, bit for bit; batches do, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from diffusion_backend import loading, seams
from diffusion_backend.loading import Stage
from diffusion_backend.task_pipelines import pipelines_by_task
from diffusion_backend.tasks import IMAGE_TO_IMAGE, INPAINTING
from diffusion_backend.tombstones import Tombstones

from tests.families import table
from tests.families.catalogue import IMAGE_TASKS
from tests.families.dit import z_image
from tests.families.family import Family
from tests.families.flux import flux_dev
from tests.families.four_requests import FourRequests
from tests.families.stable_diffusion import sd15
from tests.families.test_batching import compare_both_ways
from tests.families.test_parity import check
from tests.families.three_stages import CPU

pytestmark = pytest.mark.parallel

Saved = Callable[[Family], Path]
of_each_task = pytest.mark.parametrize(
    "family", IMAGE_TASKS, ids=lambda family: f"{family.name}, {family.task}, {family.images}"
)


@dataclass
class Shown:
    """What the tests have shown: which tasks are bit-identical, and the largest difference of each one's batches."""

    identical: set[Family] = field(default_factory=set)
    differences: dict[Family, float] = field(default_factory=dict)


@pytest.fixture(scope="module")
def shown() -> Iterator[Shown]:
    """All of it rewrites the file, if that is asked for."""
    shown = Shown()
    yield shown
    if table.UPDATE and shown.identical == set(shown.differences) == set(IMAGE_TASKS):
        table.write(tasks=[table.task_row(family, shown.differences[family]) for family in IMAGE_TASKS])


@of_each_task
def test_three_stages_equal_the_class_of_the_task(family: Family, saved: Saved, shown: Shown) -> None:
    made = check(family, saved(family))
    assert "vae.encode" in made.recorded
    shown.identical.add(family)


@of_each_task
def test_rows_of_a_batch_are_what_they_are_alone(
    family: Family, saved: Saved, tmp_path: Path, shown: Shown
) -> None:
    shown.differences[family] = compare_both_ways(family, saved(family), tmp_path)
    at_load = FourRequests(family, saved(family), Tombstones(tmp_path)).check()
    assert at_load.joined
    assert at_load.passed


@pytest.mark.parametrize("family", [sd15, flux_dev, z_image], ids=lambda family: family.name)
@pytest.mark.parametrize("stage", Stage)
def test_all_tasks_have_the_same_weights(family: Family, stage: Stage, saved: Saved) -> None:
    pipeline = loading.open_pipeline(str(saved(family)))
    pipe, _ = loading.load_stage(
        pipeline,
        stage,
        device=CPU,
        dtype=torch.float32,
        methods=seams.STAND_IN_METHODS,
        takes_image=True,
    )
    own = loading.modules_of(pipe, stage)
    assert own
    by_task = pipelines_by_task(pipe)
    assert {IMAGE_TO_IMAGE, INPAINTING} < set(by_task)
    for other in by_task.values():
        assert all(getattr(other, name) is module for name, module in own.items())


@pytest.mark.skipif(table.UPDATE, reason="it is being written")
def test_the_table_is_of_these_tasks() -> None:
    _, rows = table.read()
    assert [table.without_figure(row) for row in rows] == [
        table.without_figure(table.task_row(family, 0.0)) for family in IMAGE_TASKS
    ]
