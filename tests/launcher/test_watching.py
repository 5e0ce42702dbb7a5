"""What the launcher does when a part dies, on a real tritonserver with stages that load in no time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from diffusion_backend import healing, stub_watcher
from diffusion_backend.guard import SHARED_MEMORY, group_members
from diffusion_backend.healing import MAX_DEATHS, Deaths, Healer
from diffusion_backend.healing_report import HealingReport, ReportFile, read_report
from diffusion_backend.launcher import ServeOptions, Server
from diffusion_backend.model_control import ModelControl
from diffusion_backend.processes import LaunchError, free_ports
from diffusion_backend.stub_watcher import find_stubs
from diffusion_backend.tritonserver import ADMIN_KEY_HEADER, TritonPorts
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException
from waiting import wait_for

# A stage that cannot be loaded while there is a file "broken" in the repository, and takes its time.
MODEL_PY = """
import time
from pathlib import Path
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        if (Path(args["model_repository"]).parent / "broken").exists():
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

    def control(self) -> ModelControl:
        return ModelControl(self.server.triton.grpc_url, self.server.triton.admin_key)

    def client(self) -> InferenceServerClient:
        return InferenceServerClient(self.server.triton.grpc_url)

    def key(self) -> dict[str, str]:
        return {f"triton-grpc-protocol-{ADMIN_KEY_HEADER}": self.server.triton.admin_key}


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """Two models; ``two_stage`` has two instances."""
    monkeypatch.setattr(healing, "_BACK_OFF_SECONDS", (0.0,))
    monkeypatch.setattr(stub_watcher, "_RETRY_SECONDS", (0.0,) * stub_watcher.MAX_RELOADS)
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


def test_a_stage_that_does_not_load_again_has_tritonserver_started_anew(watched: Watched) -> None:
    triton = watched.server.triton
    before = triton.process.pid
    (triton.repository / "broken").touch()
    os.kill(min(watched.stubs("one_stage")), signal.SIGKILL)
    watched.heal(lambda: any("could not be loaded again" in line for line in watched.said))
    assert triton.process.pid == before
    watched.heal(lambda: "tritonserver" in watched.report().ailing)
    (triton.repository / "broken").unlink()
    watched.heal(lambda: any("tritonserver serves again" in line for line in watched.said))
    assert triton.process.pid != before
    assert "the weights are gone" in "\n".join(watched.said)
    assert watched.report().restarts[("one_stage", "loading failed")] == stub_watcher.MAX_RELOADS - 1


def test_what_dies_again_and_again_is_given_up_with_its_reason(watched: Watched) -> None:
    (watched.server.triton.repository / "broken").touch()
    os.kill(watched.server.triton.process.pid, signal.SIGKILL)
    with pytest.raises(LaunchError, match="the weights are gone") as caught:
        watched.heal(lambda: False)
    assert f"it died {MAX_DEATHS + 1} times in 10 minutes" in str(caught.value)


def test_waits_grow_and_old_deaths_do_not_count() -> None:
    deaths = Deaths()
    waits = [deaths.back_off(float(now)) for now in range(MAX_DEATHS + 1)]
    assert waits == [*healing._BACK_OFF_SECONDS, None]
    assert deaths.back_off(healing.DEATHS_WINDOW_SECONDS + MAX_DEATHS) == 1.0


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
