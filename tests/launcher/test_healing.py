"""Parts of a serving server are killed under the load of 8 clients; models come and go while others serve."""

from __future__ import annotations

import base64
import io
import itertools
import os
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
import pytest
from diffusion_backend.client import ADMIN_KEY_METADATA
from diffusion_backend.guard import group_members
from PIL import Image
from serving import Launched, launch
from tritonclient.grpc import InferenceServerClient
from waiting import wait_for

MODEL, TWIN = "emoji-flux", "twin"
CLIENTS = 8
SEEDS = 4
UNAVAILABLE_CODES = {"model_not_ready", "not_ready", "generation_interrupted"}
Pixels = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def serving(model_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """Two models of the same weights; the second has two instances of its denoise stage."""
    folder = tmp_path_factory.mktemp("healing")
    repository = folder / "repository"
    shutil.copytree(model_repository, repository, ignore=shutil.ignore_patterns("training", "__pycache__"))
    for original in list(repository.glob(f"{MODEL}*")):
        copy = repository / original.name.replace(MODEL, TWIN)
        if original.is_dir():
            shutil.copytree(original, copy)
            config = copy / "config.pbtxt"
            config.write_text(config.read_text().replace(MODEL, TWIN))
    config = repository / f"{TWIN}_denoise" / "config.pbtxt"
    config.write_text(config.read_text().replace("count: 1", "count: 2"))
    with launch(repository, folder) as launched:
        yield launched


@dataclass
class Load:
    """Clients that ask for pictures, each as soon as it has the last one."""

    url: str
    model: str
    pictures: list[tuple[int, Pixels]] = field(default_factory=list)
    failures: list[httpx.Response] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(CLIENTS)]
        for thread in self._threads:
            thread.start()
        wait_for(lambda: len(self.pictures) >= CLIENTS, 60)
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, first_seed: int) -> None:
        for number in itertools.count(first_seed):
            if self._done.is_set():
                return
            response = ask(self.url, self.model, number % SEEDS)
            if response.status_code == 200:
                self.pictures.append((number % SEEDS, pixels(response)))
            else:
                self.failures.append(response)
                time.sleep(0.5)  # less than Retry-After asks for

    def assert_well(self, expected: list[Pixels]) -> None:
        """Whatever failed failed in the one clear way, and whatever did not is the right picture."""
        for response in self.failures:
            assert response.status_code == 503
            assert response.headers["retry-after"]
            assert response.json()["error"]["code"] in UNAVAILABLE_CODES
            assert "/" not in response.json()["error"]["message"]
        for seed, picture in self.pictures:
            assert np.abs(picture - expected[seed]).max() <= 1


def ask(url: str, model: str, seed: int) -> httpx.Response:
    body = {"model": model, "prompt": "a fox", "seed": seed, "num_inference_steps": 8}
    return httpx.post(f"{url}/v1/images/generations", json=body, timeout=180)


def pixels(response: httpx.Response) -> Pixels:
    assert response.status_code == 200, response.text
    file = base64.b64decode(response.json()["data"][0]["b64_json"])
    return np.asarray(Image.open(io.BytesIO(file))).astype(int)


@pytest.fixture(scope="module")
def expected(serving: Launched) -> list[Pixels]:
    """The pictures, made before anything died."""
    return [pixels(ask(serving.url, MODEL, seed)) for seed in range(SEEDS)]


def is_healthy(serving: Launched) -> bool:
    return httpx.get(f"{serving.url}/health", timeout=30).status_code == 200


def admin_key(serving: Launched) -> dict[str, str]:
    return {ADMIN_KEY_METADATA: (serving.data_dir / "admin-key").read_text().strip()}


def restarts(serving: Launched) -> dict[str, float]:
    text = httpx.get(f"{serving.url}/metrics").text
    found = re.findall(r'^triton_diffusion_restarts_total\{part="([^"]+)".*\} (\S+)$', text, re.MULTILINE)
    return {part: sum(float(count) for name, count in found if name == part) for part, _ in found}


def kill_under_load(
    serving: Launched, pid: int, part: str, expected: list[Pixels], model: str = MODEL
) -> None:
    """Kill a process, wait until the server is well, and check what the clients saw."""
    count = restarts(serving).get(part, 0)
    with Load(serving.url, model) as load:
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        wait_for(lambda: not is_healthy(serving), 10)
        noticed = time.monotonic() - killed
        wait_for(lambda: is_healthy(serving), 120)
        healthy = time.monotonic() - killed
        done = len(load.pictures)
        wait_for(lambda: len(load.pictures) >= done + CLIENTS, 60)
    codes = Counter(response.json()["error"]["code"] for response in load.failures)
    print(
        f"{part} killed: noticed after {noticed:.1f} s, healthy after {healthy:.1f} s; "
        f"{len(load.pictures)} pictures, {dict(codes)} refused"
    )
    load.assert_well(expected)
    assert noticed < 5
    assert restarts(serving)[part] == count + 1
    assert [pixels(ask(serving.url, model, seed)).tolist() for seed in range(SEEDS)] == [
        picture.tolist() for picture in expected
    ]


def kill_stub(serving: Launched, stage: str, expected: list[Pixels], model: str = MODEL) -> None:
    before = serving.stubs(stage)
    kill_under_load(serving, before[0], stage, expected, model)
    assert len(set(serving.stubs(stage)) - set(before)) == len(before)
    wait_for(lambda: {region.name for region in serving.regions()} == serving.regions_in_use())


def served(serving: Launched) -> set[str]:
    return {card["id"] for card in httpx.get(f"{serving.url}/v1/models").json()["data"]}


def test_a_model_is_unloaded_while_another_serves(serving: Launched, expected: list[Pixels]) -> None:
    with InferenceServerClient(serving.grpc_url) as client, Load(serving.url, MODEL) as load:
        client.unload_model(TWIN, headers=admin_key(serving), unload_dependents=True)
        wait_for(lambda: served(serving) == {MODEL})
        assert is_healthy(serving)
        refused = ask(serving.url, TWIN, 0)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        wait_for(lambda: serving.stubs(f"{TWIN}_encode") == [])
        assert is_healthy(serving)
    assert load.failures == []
    load.assert_well(expected)


@pytest.mark.parametrize(
    "stage",
    ["denoise", *(pytest.param(stage, marks=pytest.mark.long) for stage in ("encode", "vae_decode"))],
)
def test_a_killed_stage(serving: Launched, expected: list[Pixels], stage: str) -> None:
    kill_stub(serving, f"{MODEL}_{stage}", expected)


def test_a_killed_tritonserver(serving: Launched, expected: list[Pixels]) -> None:
    triton, regions = serving.triton_pid(), set(serving.regions())
    kill_under_load(serving, triton, "tritonserver", expected)
    assert group_members(triton) == []
    assert not regions & set(serving.regions())
    # What was unloaded on purpose stays so.
    assert served(serving) == {MODEL}
    log = serving.triton_log()
    assert f"loading: {MODEL}_denoise:1" in log
    assert f"loading: {TWIN}" not in log


def test_a_model_is_loaded_while_another_serves(serving: Launched, expected: list[Pixels]) -> None:
    with InferenceServerClient(serving.grpc_url) as client, Load(serving.url, MODEL) as load:
        client.load_model(TWIN, headers=admin_key(serving))
        wait_for(lambda: served(serving) == {MODEL, TWIN})
        wait_for(lambda: is_healthy(serving))
        assert np.array_equal(pixels(ask(serving.url, TWIN, 0)), expected[0])
    assert load.failures == []
    load.assert_well(expected)


@pytest.mark.long
def test_one_of_two_instances(serving: Launched, expected: list[Pixels]) -> None:
    kill_stub(serving, f"{TWIN}_denoise", expected, TWIN)


@pytest.mark.long
def test_a_model_whose_weights_are_gone(serving: Launched, expected: list[Pixels]) -> None:
    """It is tried again and again, and nobody else notices."""
    stage = f"{TWIN}_vae_decode"
    weights = serving.folder / "repository" / TWIN / "pipeline" / "vae"
    aside = weights.with_name("aside")
    triton, others = serving.triton_pid(), serving.stubs(f"{MODEL}_vae_decode")
    with Load(serving.url, MODEL) as load:
        weights.rename(aside)
        try:
            os.kill(serving.stubs(stage)[0], signal.SIGKILL)
            hopeless = f"{stage}: it cannot be loaded again"
            wait_for(lambda: hopeless in httpx.get(f"{serving.url}/health").text, 150)
            done = len(load.pictures)
            wait_for(lambda: len(load.pictures) >= done + CLIENTS, 60)
            assert httpx.get(f"{serving.url}/health").status_code == 503
            assert ask(serving.url, TWIN, 0).json()["error"]["code"] == "model_not_ready"
        finally:
            aside.rename(weights)
        wait_for(lambda: is_healthy(serving), 150)
    assert load.failures == []
    load.assert_well(expected)
    assert (serving.triton_pid(), serving.stubs(f"{MODEL}_vae_decode")) == (triton, others)
    assert np.array_equal(pixels(ask(serving.url, TWIN, 0)), expected[0])


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_many_deaths(serving: Launched, expected: list[Pixels]) -> None:
    """Each waits longer for its next load, and no picture is lost."""
    for stage in [f"{MODEL}_{name}" for name in ("encode", "denoise", "vae_decode")] * 5:
        kill_stub(serving, stage, expected)
    for _ in range(3):
        kill_under_load(serving, serving.triton_pid(), "tritonserver", expected)


@pytest.mark.long
def test_a_model_that_lost_requests_can_be_unloaded(serving: Launched, expected: list[Pixels]) -> None:
    """Triton waits for them for ever, and keeps all stages of their ensemble."""
    wait_for(lambda: len(serving.stubs(f"{TWIN}_denoise")) == 2, 90)  # one more, after the test before
    kill_stub(serving, f"{TWIN}_denoise", expected, TWIN)
    with InferenceServerClient(serving.grpc_url) as client:
        client.unload_model(TWIN, headers=admin_key(serving), unload_dependents=True)
        stages = [f"{TWIN}_{stage}" for stage in ("encode", "denoise", "vae_decode")]
        wait_for(lambda: not any(serving.stubs(stage) for stage in stages), 90)
        client.load_model(TWIN, headers=admin_key(serving))
    wait_for(lambda: ask(serving.url, TWIN, 0).status_code == 200)


def test_it_still_stops_and_leaves_nothing(serving: Launched) -> None:
    groups = serving.groups()
    serving.process.send_signal(signal.SIGINT)
    code = serving.process.wait(100)
    # Triton may wait for requests that it lost with the stages above: then it is killed, and that is said.
    assert code == int("tritonserver was killed 10 s after" in serving.output()), serving.output()
    serving.assert_nothing_is_left(groups)
