"""What the builder's options do on a real server: unary models, several instances, warmup, and broken ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from diffusion_backend import conditioning
from diffusion_backend.client import DiffusionClient
from diffusion_backend.healing_report import ReportFile
from diffusion_backend.launcher import Adapter
from diffusion_backend.processes import LaunchError, free_ports
from diffusion_backend.repository import BuildOptions, add
from diffusion_backend.tritonserver import TritonServer
from openai import OpenAI

from tests.running_server import ROOT
from tests.triton_inputs import bytes_input

PIPELINE = ROOT / "model_repository/emoji-flux/pipeline"
PROMPT = "a fox on a blue background"


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server with a unary model of two instances, warmed at a second size and a batch, and a model that streams.

    The second has two instances of VAE decode, as on two GPUs.
    """
    folder = tmp_path_factory.mktemp("unary")
    options = BuildOptions(unary=True, instances=2, warmup_sizes=("128x64",), warmup_batches=(2,))
    add(str(PIPELINE), "unary", folder / "repository", options)
    add(str(PIPELINE), "streaming", folder / "repository", BuildOptions(warmup=False))
    config = folder / "repository/streaming_vae_decode/config.pbtxt"
    config.write_text(config.read_text().replace("count: 1", "count: 2"))
    with TritonServer(folder / "repository", data_dir=folder / "data", exit_timeout=30) as triton:
        yield triton


def test_plain_infer_over_grpc(triton: TritonServer) -> None:
    """One call, many at once, and errors with a real status code."""
    with triton_grpc.InferenceServerClient(triton.grpc_url) as client:

        def picture(seed: int) -> np.ndarray[Any, Any]:
            parameters = {"seed": seed, "num_inference_steps": 3}
            result = client.infer("unary", [bytes_input("prompt", PROMPT)], parameters=parameters)
            assert json.loads(result.as_numpy("info")[0])["seed"] == seed
            pixels: np.ndarray[Any, Any] = result.as_numpy("images").astype(int)
            return pixels

        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(picture, range(8)))
        for seed, pixels in enumerate(together):
            assert np.abs(pixels - picture(seed)).max() <= 1
        with pytest.raises(triton_grpc.InferenceServerException) as caught:
            client.infer("unary", [bytes_input("prompt", PROMPT)], parameters={"seed": -1})
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        with pytest.raises(triton_grpc.InferenceServerException, match="'progress' is true; allowed: false"):
            client.infer("unary", [bytes_input("prompt", PROMPT)], parameters={"progress": True})


def test_plain_infer_over_http(triton: TritonServer) -> None:
    client = triton_http.InferenceServerClient(triton.http_url.removeprefix("http://"))
    prompt = triton_http.InferInput("prompt", [1], "BYTES")
    prompt.set_data_from_numpy(np.array([PROMPT.encode()], dtype=np.object_))
    result = client.infer("unary", [prompt], parameters={"seed": 1, "num_inference_steps": 2})
    assert result.as_numpy("images").shape == (64, 64, 3)
    client.close()


def test_our_client_and_the_adapter_serve_both_kinds(triton: TritonServer) -> None:
    with DiffusionClient(triton.grpc_url) as client:
        assert client.generate("unary", PROMPT, seed=1, num_inference_steps=2).info["seed"] == 1
    adapter = Adapter(
        triton, ReportFile(triton.data_dir / "healing.json"), host="127.0.0.1", port=free_ports(1)[0]
    )
    adapter.start()
    try:
        while not adapter.is_ready():
            assert adapter.process.poll() is None, adapter.process.tail()
        openai = OpenAI(base_url=f"{adapter.url}/v1", api_key="unused", max_retries=0)
        answer = openai.images.generate(
            model="unary", prompt=PROMPT, n=2, extra_body={"num_inference_steps": 2}
        )
        assert answer.data is not None
        assert len(answer.data) == 2
    finally:
        assert adapter.stop()


def test_answers_of_several_vae_decode_instances_stay_in_order(triton: TritonServer) -> None:
    """What one of them answers at once waits for an earlier request that the other works at."""
    warmup = ROOT / "model_repository/emoji-flux_vae_decode/warmup/64x64_lossless.settings"
    large = json.dumps({**json.loads(warmup.read_bytes()[4:]), "width": 128, "height": 128})
    latents = triton_grpc.InferInput("latents", [1, 4, 32, 32], "FP32")
    latents.set_data_from_numpy(np.zeros((1, 4, 32, 32), np.float32))
    settings, describe = bytes_input("settings", large), bytes_input("describe", "")
    for tensor in (settings, describe):
        tensor.set_shape([1, 1])

    def seconds(inputs: list[triton_grpc.InferInput], started: float) -> float:
        client.infer("streaming_vae_decode", inputs)
        return time.monotonic() - started

    shares = []
    with triton_grpc.InferenceServerClient(triton.grpc_url) as client, ThreadPoolExecutor(2) as pool:
        for _ in range(12):
            started = time.monotonic()
            slow = pool.submit(seconds, [latents, settings], started)
            time.sleep(0.01)
            fast = pool.submit(seconds, [describe], started)
            shares.append(fast.result() / slow.result())
    # Out of order it would be 0.2.
    assert statistics.median(shares) > 0.8


def test_every_instance_was_warmed(triton: TritonServer) -> None:
    """Two instances of denoise, each with two sizes and their batches; encode with one request and with two."""
    with triton_grpc.InferenceServerClient(triton.grpc_url) as client:
        statistics = client.get_inference_statistics("unary_vae_decode").model_stats[0]
        # lossless and high, at two sizes, by one and by two requests: before any request of ours.
        assert statistics.inference_stats.success.count >= 2 * 2 * (1 + 2)
        assert client.get_model_config("unary_denoise").config.instance_group[0].count == 2


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose copies are broken by the tests."""
    repository = tmp_path_factory.mktemp("sound") / "repository"
    add(str(PIPELINE), "broken", repository)
    return repository


def test_broken_warmups_stop_the_server_and_name_the_samples(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "repository")
    samples = {
        "broken_encode/warmup/default.prompt": "default",
        "broken_denoise/warmup/64x64.conditioning": "64x64",
        "broken_vae_decode/warmup/64x64_high.settings": "64x64_high",
    }
    paths = {tmp_path / "repository" / file: sample for file, sample in samples.items()}
    for path in paths:
        path.write_bytes(path.read_bytes()[:4] + b"\xff" * (path.stat().st_size - 4))
    told = failure_of(tmp_path)
    for path, sample in paths.items():
        assert re.search(f"warmup sample '{sample}' \\(.*{path.name}.*\\) cannot be used: ", told)


def test_a_warmup_whose_file_is_gone_names_the_file(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "repository")
    (tmp_path / "repository/broken_encode/warmup/default.prompt").unlink()
    assert "default.prompt" in failure_of(tmp_path)


def test_a_warmup_that_fails_while_it_runs_tells_why(sound: Path, tmp_path: Path) -> None:
    """The file is as it should be, but for another model: found only by running it."""
    shutil.copytree(sound, tmp_path / "repository")
    path = tmp_path / "repository/broken_denoise/warmup/64x64.conditioning"
    recorded = conditioning.unpack(path.read_bytes())
    blob = conditioning.pack(replace(recorded, calls=recorded.calls[:-1]))
    config = path.parents[1] / "config.pbtxt"
    config.write_text(config.read_text().replace(f"[ {path.stat().st_size} ]", f"[ {len(blob)} ]"))
    path.write_bytes(blob)
    # Also where tritonserver itself crashes at it, as 2.51 does now and then.
    assert "'conditioning'" in failure_of(tmp_path)


def failure_of(folder: Path) -> str:
    """What a person sees of a server that cannot start."""
    triton = TritonServer(folder / "repository", data_dir=folder / "data", exit_timeout=30)
    triton.start()
    try:
        with pytest.raises(LaunchError) as caught:
            triton.wait_ready(120)
        return str(caught.value)
    finally:
        triton.stop()


def test_stages_load_the_commit_that_was_added(tmp_path: Path) -> None:
    """From a cache of the hub's, in which the model has a newer commit without weights by now."""
    model = tmp_path / "home/hub/models--org--emoji"
    shutil.copytree(PIPELINE, model / "snapshots" / ("1" * 40))
    (model / "refs").mkdir()
    (model / "refs/main").write_text("1" * 40)
    hub = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}

    def add_again() -> subprocess.CompletedProcess[str]:
        # A process of its own: the hub's client reads its environment when it is imported.
        command = [
            str(Path(sys.executable).with_name("triton-diffusion")),
            "add",
            "org/emoji",
            "--name",
            "hub",
        ]
        return subprocess.run(
            [*command, "--no-warmup", "--repository", str(tmp_path / "repository")],
            env={**os.environ, **hub},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    assert add_again().returncode == 0
    shutil.copytree(
        PIPELINE, model / "snapshots" / ("2" * 40), ignore=shutil.ignore_patterns("*.safetensors")
    )
    (model / "refs/main").write_text("2" * 40)
    assert "it has no weights" in add_again().stderr
    triton = TritonServer(
        tmp_path / "repository", data_dir=tmp_path / "data", exit_timeout=30, environment=hub
    )
    with triton, DiffusionClient(triton.grpc_url) as client:
        assert client.limits("hub").source_revision == "1" * 40
        assert client.generate("hub", PROMPT, num_inference_steps=2).images.shape == (64, 64, 3)


def test_weights_that_are_gone_are_named(tmp_path: Path) -> None:
    shutil.copytree(PIPELINE, tmp_path / "pipeline")
    add(str(tmp_path / "pipeline"), "gone", tmp_path / "repository")
    (tmp_path / "pipeline/transformer/diffusion_pytorch_model.safetensors").unlink()
    triton = TritonServer(tmp_path / "repository", data_dir=tmp_path / "data", exit_timeout=30)
    triton.start()
    try:
        with pytest.raises(LaunchError, match=r"gone_denoise.*transformer: it has no weights"):
            triton.wait_ready(120)
    finally:
        triton.stop()
