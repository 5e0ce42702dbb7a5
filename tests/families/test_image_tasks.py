"""Every task that takes images: three stages equal the own class of diffusers, bit for bit; batches do, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from diffusion_backend.tombstones import Tombstones

from tests.families import table
from tests.families.catalogue import IMAGE_TASKS
from tests.families.family import Family
from tests.families.four_requests import FourRequests
from tests.families.test_batching import compare_both_ways
from tests.families.test_parity import check

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


@pytest.mark.skipif(table.UPDATE, reason="it is being written")
def test_the_table_is_of_these_tasks() -> None:
    _, rows = table.read()
    assert [table.without_figure(row) for row in rows] == [
        table.without_figure(table.task_row(family, 0.0)) for family in IMAGE_TASKS
    ]
