"""What becomes of a generation that the model server lost; the real thing is in tests/launcher/test_healing.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusion_backend.client import Generation
from diffusion_backend.errors import DiffusionError, Status, invalid
from diffusion_backend.healing_report import ReportFile
from openai_adapter.errors import ApiError
from openai_adapter.metrics import Metrics
from openai_adapter.recovery import Recovery
from openai_adapter.registry import Model, Registry
from openai_adapter.triton import Triton
from test_registry import LIMITS

from openai_adapter import Settings, recovery, triton

LOST = DiffusionError("Stub process 'one_encode_0_0' is not healthy.", status=Status.UNAVAILABLE)
UNKNOWN = DiffusionError(
    "Request for unknown model: 'one' has no available versions", status=Status.INVALID_ARG
)
REFUSED = invalid("seed", "'seed' is -1")
BUSY = DiffusionError("the server is busy", code="queue_full", status=Status.UNAVAILABLE)

Behaviour = Generation | Exception | float


def picture(number: int) -> Generation:
    return Generation(np.zeros((8, 8, 3), np.uint8), {"number": number})


class Scene:
    """A registry with one model, and attempts that answer, fail, or are silent for so many seconds, as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *behaviours: list[Behaviour]) -> None:
        monkeypatch.setattr(recovery, "NOTICE_SECONDS", 0.0)
        monkeypatch.setattr(recovery, "_LOOK_SECONDS", 0.01)
        self.registry = Registry()
        self.registry.models = {"one": Model("one", LIMITS, ready=True, stages={"one_denoise": None})}
        self.registry.contacted = True
        self.metrics = Metrics()
        model_server = Triton(Settings(), self.registry)
        monkeypatch.setattr(model_server, "is_proven", lambda name, _moment: name in self.registry.models)
        self.recovery = Recovery(model_server, self.registry, self.metrics)
        self.behaviours = list(behaviours)
        self.started = 0

    def attempt(self) -> Coroutine[Any, Any, Generation]:
        self.started += 1
        return self._behave(self.behaviours[self.started - 1])

    async def _behave(self, steps: list[Behaviour]) -> Generation:
        for step in steps:
            if isinstance(step, float):
                await asyncio.sleep(step)
            elif isinstance(step, Exception):
                raise step
            else:
                return step
        raise AssertionError("an attempt without an end")

    def run(self, then: Callable[[], None] = lambda: None) -> Generation:
        """One generation; ``then`` happens a moment after its start."""

        async def generate() -> Generation:
            asyncio.get_running_loop().call_later(0.05, then)
            return await asyncio.wait_for(self.recovery.run("one", self.attempt), 5)

        return asyncio.run(generate())

    def lose(self) -> None:
        self.registry.report_loss("one_denoise")

    def outcomes(self) -> dict[str, float | None]:
        get = self.metrics.registry.get_sample_value
        name = "openai_adapter_interruptions_total"
        return {outcome: get(name, {"outcome": outcome}) for outcome in ("recovered", "failed")}


@pytest.mark.parametrize("error", [REFUSED, BUSY, ValueError("ours")])
def test_what_is_no_loss_is_raised_at_once(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    scene = Scene(monkeypatch, [error])
    with pytest.raises(type(error)) as caught:
        scene.run()
    assert caught.value is error
    assert scene.outcomes() == {"recovered": None, "failed": None}


def test_a_lost_generation_is_made_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, [LOST], [picture(2)])
    assert scene.run().info == {"number": 2}
    assert scene.outcomes() == {"recovered": 1, "failed": None}


def test_one_that_is_never_answered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, [100.0], [picture(2)])
    assert scene.run(scene.lose).info == {"number": 2}


def test_one_that_another_instance_makes_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, [0.2, picture(1)], [100.0])
    assert scene.run(scene.lose).info == {"number": 1}
    assert scene.started == 2


def test_twice_lost_is_a_clean_503(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, [LOST], [LOST])
    with pytest.raises(ApiError) as caught:
        scene.run()
    assert (caught.value.status, caught.value.code) == (503, "generation_interrupted")
    assert caught.value.headers["x-should-retry"] == "false"
    assert "one_encode" not in caught.value.message
    assert scene.outcomes() == {"recovered": None, "failed": 1}


def test_a_model_that_is_not_healed_is_a_clean_503(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, [LOST])
    monkeypatch.setattr(recovery, "RECOVERY_SECONDS", 0.1)
    monkeypatch.setattr(scene.recovery._triton, "is_proven", lambda *_: False)
    with pytest.raises(ApiError) as caught:
        scene.run()
    assert caught.value.code == "generation_interrupted"
    assert caught.value.headers["Retry-After"]
    assert "x-should-retry" not in caught.value.headers
    assert scene.started == 1


def test_a_model_that_is_unloaded_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, [0.1, UNKNOWN])
    with pytest.raises(ApiError) as caught:
        scene.run(lambda: scene.registry.models.clear())
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def test_losses_of_other_models_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, [0.2, picture(1)])
    assert scene.run(lambda: scene.registry.report_loss("two_denoise")).info == {"number": 1}
    assert scene.started == 1


def test_a_picture_made_while_the_model_heals_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encode process dies; what had passed it goes on in denoise, and ends before the model is well."""
    scene = Scene(monkeypatch, [0.2, picture(1)])
    monkeypatch.setattr(scene.recovery._triton, "is_proven", lambda _name, _moment: False)
    assert scene.run(then=scene.lose).info["number"] == 1
    assert scene.started == 1
    assert scene.outcomes() == {"recovered": 1, "failed": None}


def test_a_failure_does_not_end_the_reading_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "REPORT_SECONDS", 0.01)
    file = ReportFile(tmp_path / "report.json")
    registry, lost = Registry(), list[str]()

    def report_loss(part: str) -> None:
        lost.append(part)
        raise RuntimeError

    monkeypatch.setattr(registry, "report_loss", report_loss)

    async def scene() -> None:
        async with asyncio.timeout(10), Triton(Settings(healing_report=file.path), registry):
            for number, part in enumerate(("one", "two"), 1):
                file.set_ailing({part: "it died"})
                while len(lost) < number:
                    await asyncio.sleep(0.01)

    asyncio.run(scene())
    assert lost == ["one", "two"]
