"""Families on disk, made once a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from diffusion_backend.errors import DiffusionError
from diffusion_backend.repository import add

from tests.families.family import Build, Family


@dataclass(frozen=True)
class Added:
    """What ``add`` said to a family: the repository it wrote to, and why it refused if it did."""

    repository: Path
    refusal: str | None


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    """The folder of a family's tiny pipeline."""

    folders: dict[Build, Path] = {}  # families with other tasks share them

    def save(family: Family) -> Path:
        if family.build not in folders:
            folders[family.build] = tmp_path_factory.mktemp("pipeline")
            family.save(folders[family.build])
        return folders[family.build]

    return save


@pytest.fixture(scope="session")
def added(
    saved: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Family], Added]:
    """A repository to which a family was added."""

    @cache
    def try_to_add(family: Family) -> Added:
        repository = tmp_path_factory.mktemp("repository")
        try:
            add(str(saved(family)), family.model, repository)
        except DiffusionError as error:
            return Added(repository, error.message)
        return Added(repository, None)

    return try_to_add
