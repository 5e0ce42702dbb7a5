"""What the launcher does when a part dies, on a real tritonserver with stages that load in no time."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from diffusion_backend import deaths, healing, stub_watcher
from diffusion_backend.client import ADMIN_KEY_METADATA
from diffusion_backend.deaths import WINDOW_SECONDS, Deaths, back_off
from diffusion_backend.guard import SHARED_MEMORY, group_members
from diffusion_backend.healing import MAX_DEATHS, Healer
from diffusion_backend.healing_report import HealingReport, ReportFile, read_report
from diffusion_backend.launcher import ServeOptions, Server
from diffusion_backend.model_control import ModelControl
from diffusion_backend.processes import LaunchError, free_ports
from diffusion_backend.stub_watcher import MAX_FAILURES, find_stubs
from diffusion_backend.tritonserver import TritonPorts
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException
from waiting import wait_for

# A stage that cannot be loaded while there is a file "broken" in its folder, and takes its time.
MODEL_PY = """
import time
from pathlib import Path
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        if (Path(args["model_repository"]) / "broken").exists():
            raise RuntimeError("the weights are gone")
    def execute(self, requests):
        time.sleep(1)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]) for x in map(self.x, requests)]
    def x(self, request):
        return pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
"""
EXIT_SECONDS = 5
TENSOR = "data_type: TYPE_FP32 dims: [1]"
TENSORS = f'input [{{ name: "x" {TENSOR} }}] output [{{ name: "y" {TENSOR} }}]'


def _write_model(repository: Path, name: str, instances: int) -> None:
    maps = 'input_map { key: "x" value: "x" } output_map { key: "y" value: "y" }'
    step = f'step [{{ model_name: "{name}_stage" model_version: -1 {maps} }}]'
    files = {
        f"{name}/config.pbtxt": f'platform: "ensemble" {TENSORS} ensemble_scheduling {{ {step} }}',
        f"{name}/1/.gitkeep": "",
        f"{name}_stage/config.pbtxt": (
            f'backend: "python" {TENSORS} instance_group [{{ count: {instances} kind: KIND_CPU }}]'
            f'parameters {{ key: "ensemble" value: {{ string_value: "{name}" }} }}'
        ),
        f"{name}_stage/1/model.py": MODEL_PY,
    }
    for path, text in files.items():
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text(text)


@dataclass
class Watched:
    """A server that is healed, and what the operator was told."""

    server: Server
    healer: Healer
    said: list[str]

    def stubs(self, model: str) -> set[int]:
        stubs = find_stubs(self.server.triton.process.pid)
        return {pid for pid, stub in stubs.items() if stub.model == model}

    def heal(self, until: Callable[[], bool], seconds: float = 60) -> None:
        """Tick until it is so."""

        def ticked() -> bool:
            self.healer.tick()
            return until()

        wait_for(ticked, seconds)

    def heal_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.heal(lambda: time.monotonic() > end)

    def report(self) -> HealingReport:
        return read_report(self.server.report.path)

    def has_said(self, words: str) -> bool:
        return any(words in line for line in self.said)

    def kill(self, model: str) -> None:
        """Kill one of its stubs."""
        os.kill(min(self.stubs(model)), signal.SIGKILL)

    def file(self, name: str) -> Path:
        return self.server.triton.repository / name

    def break_for_good(self) -> None:
        """The first model cannot be loaded again; the second one serves."""
        self.file("one_stage/broken").touch()
        self.kill("one_stage")
        failures = ("one_stage", "loading failed")
        self.heal(lambda: self.report().restarts.get(failures, 0) > MAX_FAILURES)
        assert self.report().ailing == {"one_stage": "it cannot be loaded again"}
        said = len(self.said)
        self.heal(lambda: len(self.said) > said)  # no load is under way now
        assert self.has_said("the weights are gone")

    def mend(self) -> None:
        self.file("one_stage/broken").unlink()

    def control(self) -> ModelControl:
        return ModelControl(self.server.triton.grpc_url, self.server.triton.admin_key)

    def client(self) -> InferenceServerClient:
        return InferenceServerClient(self.server.triton.grpc_url)

    def key(self) -> dict[str, str]:
        return {ADMIN_KEY_METADATA: self.server.triton.admin_key}


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """Two models; ``two_stage`` has two instances."""
    monkeypatch.setattr(deaths, "BACK_OFF_SECONDS", (0.0,))
    monkeypatch.setattr(stub_watcher, "_RETRY_SECONDS", (*[0.0] * MAX_FAILURES, 0.5))
    repository = tmp_path / "repository"
    _write_model(repository, "one", 1)
    _write_model(repository, "two", 2)
    http, grpc, metrics, port = free_ports(4)
    ports = TritonPorts(http=http, grpc=grpc, metrics=metrics)
    server = Server(
        ServeOptions(repository, tmp_path / "data", "127.0.0.1", port, ports, exit_timeout=EXIT_SECONDS)
    )
    server.start()
    said: list[str] = []
    healer = Healer(server, said.append)
    try:
        server.triton.wait_ready(60)
        healer.tick()
        yield Watched(server, healer, said)
    finally:
        healer.close()
        server.stop()


@pytest.mark.parametrize("model", ["one_stage", "two_stage"])
def test_a_dead_stub_has_its_stage_loaded_again(watched: Watched, model: str) -> None:
    before = watched.stubs(model)
    others = {pid for pid in find_stubs(watched.server.triton.process.pid) if pid not in before}
    os.kill(min(before), signal.SIGKILL)
    watched.heal(lambda: model in watched.report().ailing)
    watched.heal(lambda: any("serves again" in line for line in watched.said))
    # All of its instances are new, and nobody else's.
    wait_for(lambda: len(watched.stubs(model)) == len(before))
    assert not watched.stubs(model) & before
    assert others <= find_stubs(watched.server.triton.process.pid).keys()
    assert watched.report() == HealingReport({}, {(model, "a process died"): 1})
    # It still goes when its ensemble is unloaded with its stages.
    with watched.client() as client:
        client.unload_model(model.removesuffix("_stage"), headers=watched.key(), unload_dependents=True)
    watched.heal(lambda: not watched.stubs(model))


def test_the_other_instance_may_finish_and_ends(watched: Watched) -> None:
    """Triton itself would keep it: it takes the request of the dead one for running."""
    before = watched.stubs("two_stage")
    tensor = InferInput("x", [1], "FP32")
    tensor.set_data_from_numpy(np.zeros(1, np.float32))

    def infer() -> str:
        with watched.client() as client:
            try:
                client.infer("two_stage", [tensor], client_timeout=30)
            except InferenceServerException as error:
                return str(error)
        return "done"

    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(infer) for _ in range(2)]
        time.sleep(0.3)
        dead, other = sorted(before)
        region = find_stubs(watched.server.triton.process.pid)[dead].region
        os.kill(dead, signal.SIGKILL)
        watched.heal(lambda: any("serves again" in line for line in watched.said))
        results = [answer.result() for answer in answers]
    assert "done" in results
    assert any("is not healthy" in result for result in results)
    assert other in watched.stubs("two_stage")
    assert not (SHARED_MEMORY / region).exists()
    watched.heal(lambda: other not in watched.stubs("two_stage"), EXIT_SECONDS + 5)
    watched.heal_for(1)
    assert len(watched.stubs("two_stage")) == 2
    assert watched.report() == HealingReport({}, {("two_stage", "a process died"): 1})


def test_a_model_unloaded_on_purpose_stays_so(watched: Watched) -> None:
    client = watched.client()
    client.unload_model("one", headers=watched.key(), unload_dependents=True)
    watched.heal_for(3)
    assert not watched.stubs("one_stage")
    # Also when tritonserver has to be started again.
    os.kill(watched.server.triton.process.pid, signal.SIGKILL)
    watched.heal(lambda: any("serves again" in line for line in watched.said))
    assert not watched.stubs("one_stage")
    assert len(watched.stubs("two_stage")) == 2
    client.load_model("one", headers=watched.key())
    assert len(watched.stubs("one_stage")) == 1
    client.unload_model("two", headers=watched.key(), unload_dependents=True)
    watched.heal(lambda: not watched.stubs("two_stage"))
    client.close()
    assert watched.report().restarts == {("tritonserver", "killed by SIGKILL"): 1}


def test_a_model_that_an_operator_loads_anew_is_left_to_him(watched: Watched) -> None:
    before = watched.stubs("two_stage")
    watched.control().reload("two_stage")
    watched.heal(lambda: not watched.stubs("two_stage") & before)  # the old ones end one after another
    watched.heal_for(1)
    assert len(watched.stubs("two_stage")) == 2
    assert (watched.said, watched.report().restarts) == ([], {})


def test_a_killed_tritonserver_leaves_nothing_and_comes_back(watched: Watched) -> None:
    triton = watched.server.triton
    dead, regions = triton.process.pid, set(SHARED_MEMORY.glob(f"{triton.regions}*"))
    key = triton.admin_key
    os.kill(dead, signal.SIGKILL)
    watched.heal(lambda: "tritonserver" in watched.report().ailing)
    watched.heal(lambda: watched.report().ailing == {})
    assert group_members(dead) == []
    assert not regions & set(SHARED_MEMORY.glob(f"{triton.regions}*"))
    assert triton.admin_key == key
    assert "tritonserver ended (killed by SIGKILL)" in watched.said[0]


def test_a_dead_adapter_is_started_again(watched: Watched) -> None:
    adapter = watched.server.adapter
    dead = adapter.process.pid
    os.kill(dead, signal.SIGKILL)
    watched.heal(lambda: adapter.process.pid != dead)
    assert watched.report().restarts == {("adapter", "killed by SIGKILL"): 1}


def test_a_stage_that_does_not_load_again_is_tried_on_while_another_model_serves(watched: Watched) -> None:
    triton, others = watched.server.triton.process.pid, watched.stubs("two_stage")
    watched.break_for_good()
    watched.mend()
    watched.heal(lambda: watched.has_said("one_stage serves again"))
    assert watched.report().ailing == {}
    assert len(watched.stubs("one_stage")) == 1
    assert watched.server.triton.process.pid == triton
    assert watched.stubs("two_stage") == others


@pytest.mark.parametrize("with_stages", [True, False])
def test_what_cannot_be_loaded_is_unloaded_with_its_ensemble(watched: Watched, with_stages: bool) -> None:
    """Triton alone would leave it: one that a reload has loaded by itself is no ensemble's.

    While a stage is being loaded, Triton loads its ensemble again that was unloaded without it.
    """
    watched.break_for_good()
    with watched.client() as client:
        client.unload_model("one", headers=watched.key(), unload_dependents=with_stages)
        watched.heal(lambda: watched.report().ailing == {})
        assert watched.has_said("one_stage is not loaded any more")
        said = len(watched.said)
        watched.heal_for(3)
        assert len(watched.said) == said
        assert watched.control().states()["one_stage"] != "READY"
        watched.mend()
        client.load_model("one", headers=watched.key())
    watched.heal_for(1)
    assert len(watched.stubs("one_stage")) == 1
    assert len(watched.said) == said


def test_tritonserver_is_started_anew_when_nothing_serves_any_more(watched: Watched) -> None:
    triton = watched.server.triton
    before = triton.process.pid
    watched.break_for_good()
    watched.file("two_stage/broken").touch()
    watched.kill("two_stage")
    watched.heal(lambda: watched.has_said("two_stage could not be loaded again"))
    assert triton.process.pid == before
    watched.heal(lambda: "tritonserver" in watched.report().ailing)
    watched.mend()
    watched.file("two_stage/broken").unlink()
    watched.heal(lambda: watched.has_said("tritonserver serves again"))
    assert triton.process.pid != before
    assert (len(watched.stubs("one_stage")), len(watched.stubs("two_stage"))) == (1, 2)


def test_tritonserver_starts_again_without_what_cannot_be_loaded(watched: Watched) -> None:
    watched.break_for_good()
    for deaths_so_far in range(2):
        os.kill(watched.server.triton.process.pid, signal.SIGKILL)
        watched.heal(lambda: "tritonserver" in watched.report().ailing)
        watched.heal(lambda: "one" in watched.report().ailing)
        assert watched.report().restarts["tritonserver", "killed by SIGKILL"] == deaths_so_far + 1
        assert len(watched.stubs("two_stage")) == 2
        watched.heal(lambda: watched.said[-1].startswith("one could not be loaded again"))
    watched.mend()
    watched.heal(lambda: watched.report().ailing == {})
    assert len(watched.stubs("one_stage")) == 1
    assert watched.control().states()["one"] == "READY"


def test_tritonserver_starts_again_without_what_was_removed(watched: Watched) -> None:
    watched.heal_for(healing._MODELS_SECONDS + 0.5)
    for model in ("one", "one_stage"):
        shutil.rmtree(watched.file(model))
    os.kill(watched.server.triton.process.pid, signal.SIGKILL)
    watched.heal(lambda: watched.has_said("serves again"))
    assert len(watched.stubs("two_stage")) == 2
    assert watched.report().restarts == {("tritonserver", "killed by SIGKILL"): 1}


def test_a_stage_without_its_code_keeps_nobody_waiting(watched: Watched) -> None:
    """Triton would load it for ever, and nothing else meanwhile."""
    code = watched.file("one_stage/1/model.py")
    code.rename(code.with_name("aside"))
    watched.kill("one_stage")
    watched.heal(lambda: watched.has_said("has no model.py"))
    watched.kill("two_stage")
    watched.heal(lambda: watched.has_said("two_stage serves again"))
    code.with_name("aside").rename(code)
    watched.heal(lambda: watched.has_said("one_stage serves again"))


def test_what_died_before_the_first_look_is_found(watched: Watched) -> None:
    for model in ("one_stage", "two_stage"):
        watched.kill(model)
    wait_for(lambda: (len(watched.stubs("one_stage")), len(watched.stubs("two_stage"))) == (0, 1))
    said: list[str] = []
    healer = Healer(watched.server, said.append)
    late = Watched(watched.server, healer, said)
    try:
        late.heal(lambda: {"one_stage", "two_stage"} <= {line.split()[0] for line in late.said})
        late.heal(lambda: late.report().ailing == {})
        assert len(late.stubs("one_stage")) == 1
        wait_for(lambda: len(late.stubs("two_stage")) == 2)
    finally:
        healer.close()


def test_a_stage_that_dies_again_and_again_waits_longer(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deaths, "BACK_OFF_SECONDS", (0.0, 2.0))
    for number in range(1, MAX_FAILURES + 3):
        watched.kill("one_stage")
        killed = time.monotonic()
        watched.heal(lambda: "one_stage" in watched.report().ailing)
        assert time.monotonic() - killed < 1
        serves = "one_stage serves again"
        watched.heal(lambda: sum(serves in line for line in watched.said) == number)  # noqa: B023
        assert (time.monotonic() - killed > 2) == (number > 1)
    assert watched.has_said("loading it again in 2 s")
    assert watched.report().restarts == {("one_stage", "a process died"): MAX_FAILURES + 2}


def test_what_dies_again_and_again_is_given_up_with_its_reason(watched: Watched) -> None:
    watched.file("one_stage/broken").touch()
    os.kill(watched.server.triton.process.pid, signal.SIGKILL)
    with pytest.raises(LaunchError, match="the weights are gone") as caught:
        watched.heal(lambda: False)
    assert f"it died {MAX_DEATHS + 1} times in 10 minutes" in str(caught.value)


def test_waits_grow_and_old_deaths_do_not_count() -> None:
    part = Deaths()
    numbers = [part.note(float(now)) for now in range(len(deaths.BACK_OFF_SECONDS) + 1)]
    assert [back_off(number) for number in numbers] == [
        *deaths.BACK_OFF_SECONDS,
        deaths.BACK_OFF_SECONDS[-1],
    ]
    assert part.note(WINDOW_SECONDS + len(deaths.BACK_OFF_SECONDS)) == 2


def test_the_report_is_read_back_and_may_be_missing(tmp_path: Path) -> None:
    file = ReportFile(tmp_path / "report.json")
    assert read_report(file.path) == HealingReport()
    file.set_ailing({"one": "it died"})
    file.count("one", "died")
    file.count("one", "died")
    assert read_report(file.path) == HealingReport({"one": "it died"}, {("one", "died"): 2})
    (tmp_path / "report.new").mkdir()  # in the way of the next one
    file.set_ailing({})
    assert read_report(file.path).ailing == {"one": "it died"}
    (tmp_path / "report.new").rmdir()
    file.set_ailing({})
    assert read_report(file.path).ailing == {}
    file.path.write_text("{")
    assert read_report(file.path) == HealingReport()
    file.remove()
    file.remove()
