"""The real thing, started once per test run: tritonserver with the stage models, and the adapter."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from diffusion_backend.stages.common import tune_process

from tests.running_server import ROOT, RunningServer, running_server

# As the stages do: the tests' own threads must not keep a core from the server's processes.
tune_process()
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each test of several that run at a time has a core

# An operator's own, beside ours: it is loaded, and no model of the OpenAI API.
FOREIGN_ENSEMBLE = """
platform: "ensemble"
input [ { name: "prompt" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "conditioning" data_type: TYPE_UINT8 dims: [ -1 ] } ]
ensemble_scheduling { step [ {
  model_name: "emoji-flux_encode"
  model_version: -1
  input_map { key: "prompt" value: "prompt" }
  output_map { key: "conditioning" value: "conditioning" }
} ] }
parameters { key: "owner" value: { string_value: "somebody" } }
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several run at a time: one process has all of a family, which it saves and adds once, or of a module."""
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        group = getattr(parameters.get("family"), "name", item.path.stem)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def model_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model repository that the server under test serves: emoji-flux, and somebody's own ensemble.

    Copied, so that models which were added to the checkout's do not count.
    """
    repository = tmp_path_factory.mktemp("models") / "model_repository"
    for folder in (ROOT / "model_repository").glob("emoji-flux*"):
        shutil.copytree(folder, repository / folder.name, ignore=shutil.ignore_patterns("training"))
    (repository / "of_somebody/1").mkdir(parents=True)
    (repository / "of_somebody/config.pbtxt").write_text(FOREIGN_ENSEMBLE)
    return repository


@pytest.fixture(scope="session")
def server(model_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A running server, ready: tritonserver and adapter on free ports."""
    with running_server(model_repository, tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Keep to two cores, and to the same random numbers in every run."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say again which checks of ``./test`` failed: its output ends with pytest's summary."""
    if failed := os.environ.get("FAILED_CHECKS"):
        terminalreporter.write_line(f"FAILED before the tests, see above: {failed}", red=True)
