"""The VAE decode tiers on the real server: which path runs, and what it makes."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
from diffusers import DiffusionPipeline
from diffusion_backend import seams
from diffusion_backend.client import CHANNEL_ARGS, DiffusionClient, vae_decode_model
from diffusion_backend.errors import DiffusionError
from diffusion_backend.fast_layers import kernels_for
from diffusion_backend.fast_path import fast_dtype
from diffusion_backend.processes import LaunchError
from diffusion_backend.quality import TIERS, Tier
from diffusion_backend.repository import BuildOptions, add
from diffusion_backend.settings import resolve
from diffusion_backend.tritonserver import TritonServer

from tests import triton_metrics
from tests.running_server import ROOT, RunningServer

MODEL = "emoji-flux"
PROMPT = "a fox on a blue background"
SIZES = (
    (16, 16),
    (16, 24),
    (8, 32),
    (8, 8),
)  # of latents: height, width; the last is less than half the default
PIXELS = 4  # a latent's side
CONCURRENT = 200


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Any:
    with DiffusionClient(server.grpc_url) as client:
        yield client


@pytest.fixture(scope="module")
def pipe() -> Any:
    """Plain diffusers."""
    pipe = DiffusionPipeline.from_pretrained(
        ROOT / "model_repository/emoji-flux/pipeline", dtype=torch.float32
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def decode_inputs(latents: np.ndarray[Any, Any], quality: str) -> list[Any]:
    """The inputs of vae_decode."""
    path = ROOT / f"model_repository/{MODEL}_vae_decode/warmup/64x64_lossless.settings"
    height, width = latents.shape[-2:]
    settings = {
        **json.loads(path.read_bytes()[4:]),
        "quality": quality,
        "width": width * PIXELS,
        "height": height * PIXELS,
    }
    tensors = [
        triton_grpc.InferInput("latents", list(latents.shape), "FP32"),
        triton_grpc.InferInput("settings", [1, 1], "BYTES"),
    ]
    tensors[0].set_data_from_numpy(latents)
    tensors[1].set_data_from_numpy(np.array([[json.dumps(settings).encode()]], dtype=np.object_))
    return tensors


def diffusers_picture(pipe: Any, latents: torch.Tensor) -> np.ndarray[Any, Any]:
    """As a pipeline ends: uint8 [H, W, 3]."""
    with torch.no_grad():
        decoded = pipe.vae.decode(latents, return_dict=False)[0]
    return np.asarray(pipe.image_processor.postprocess(decoded, output_type="pil")[0])


async def decode_all(
    url: str, works: list[tuple[np.ndarray[Any, Any], str]], at_once: int
) -> list[tuple[np.ndarray[Any, Any], str]]:
    """The picture of each, and the path that made it."""
    turns = asyncio.Semaphore(at_once)
    async with triton_grpc_aio.InferenceServerClient(url, channel_args=CHANNEL_ARGS) as client:

        async def one(latents: np.ndarray[Any, Any], quality: str) -> tuple[np.ndarray[Any, Any], str]:
            async with turns:
                result = await client.infer(vae_decode_model(MODEL), decode_inputs(latents, quality))
            info = json.loads(result.as_numpy("info").reshape(-1)[0])
            return result.as_numpy("images")[0], info["decode_path"]

        return await asyncio.gather(*(one(*work) for work in works))


def test_many_decodes_of_mixed_tiers_at_once(server: RunningServer, pipe: Any) -> None:
    """Each lossless one is diffusers' own, bit by bit; each fast one is what it is alone (on a CPU, exactly)."""
    draw, noise = random.Random(0), np.random.default_rng(0)
    works = []
    for _ in range(CONCURRENT):
        shape = (1, 4, *draw.choice(SIZES))
        works.append(((noise.standard_normal(shape) * 2).astype(np.float32), draw.choice(list(TIERS))))
    fast = [work for work in works if TIERS[work[1]] == "fast"]
    alone = dict(enumerate(asyncio.run(decode_all(server.grpc_url, fast, at_once=1))))
    together = asyncio.run(decode_all(server.grpc_url, works, at_once=CONCURRENT))
    seen = 0
    for (latents, quality), (picture, path) in zip(works, together, strict=True):
        assert path == TIERS[quality]
        if path == "lossless":
            np.testing.assert_array_equal(picture, diffusers_picture(pipe, torch.from_numpy(latents)))
        else:
            np.testing.assert_array_equal(picture, alone[seen][0])
            seen += 1
    assert 50 < seen < 150


@pytest.mark.parametrize(
    ("quality", "path"), [*TIERS.items(), ("auto", "lossless"), ("standard", "lossless")]
)
def test_the_path_is_the_quality_tables(client: DiffusionClient, quality: str, path: str) -> None:
    info = client.generate(MODEL, PROMPT, seed=1, num_inference_steps=2, quality=quality).info
    assert (info["quality"], info["decode_path"]) == (quality, path)


def test_the_fast_picture_is_nearly_the_lossless_one(client: DiffusionClient) -> None:
    made = [client.generate(MODEL, PROMPT, seed=1, quality=each) for each in ("lossless", "high", "lossless")]
    assert [each.info["decode_path"] for each in made] == ["lossless", "fast", "lossless"]
    lossless, fast, again = (each.images.astype(int) for each in made)
    mse = float(np.square(lossless - fast).mean()) / 255**2
    assert mse < 1e-4  # above 40 dB
    # Not the same decoder; in float32 rounding may not change a single byte.
    assert mse > 1e-8 or fast_dtype(torch.device("cpu"), torch.float32) == torch.float32
    np.testing.assert_array_equal(lossless, again)


def test_the_card_and_describe_say_what_is_installed(server: RunningServer) -> None:
    card = httpx.get(f"{server.adapter_url}/v1/models/{MODEL}").json()
    path = card["fast_path"]
    assert (path["state"], path["reason"]) == ("installed", None)
    assert path["psnr_db"] >= 40
    assert path["rewritten"] == {"Decoder": 1, "ResnetBlock2D": 8, "Upsample2D": 2}
    assert path["dtype"] in ("bfloat16", "float32")
    assert path["kernels"] == kernels_for(
        torch.device(card["stages"][vae_decode_model(MODEL)]["device"]), torch.float32
    )


def test_openai_clients_are_told_the_path(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{server.adapter_url}/v1", api_key="none", max_retries=0)
    counted = triton_metrics.read(server.metrics_url, "pictures_total", "vae_decode", decode_path="fast")
    answer = client.images.generate(model=MODEL, prompt=PROMPT, quality="low", extra_body={"seed": 1})
    assert answer.quality == "low"
    assert answer.data is not None
    assert answer.data[0].model_dump()["decode_path"] == "fast"
    assert (
        triton_metrics.read(server.metrics_url, "pictures_total", "vae_decode", decode_path="fast")
        == counted + 1
    )
    metrics = httpx.get(f"{server.adapter_url}/metrics").text
    assert f'openai_adapter_images_total{{decode_path="fast",model="{MODEL}",quality="low"}}' in metrics


@pytest.mark.parametrize("quality", ["ultra", "", 1, "HIGH"])
def test_other_qualities_are_refused(client: DiffusionClient, quality: Any) -> None:
    with pytest.raises(DiffusionError, match="allowed: auto, standard, lossless, xhigh") as caught:
        client.generate(MODEL, PROMPT, quality=quality)
    assert caught.value.param == "quality"


def test_a_trajectory_is_the_latents_of_every_step(client: DiffusionClient, pipe: Any) -> None:
    parameters = {"seed": 5, "num_inference_steps": 5}
    shown = list(client.stream(MODEL, PROMPT, trajectory=True, **parameters))
    assert [each.info["step"] for each in shown] == [1, 2, 3, 4, 5]
    assert [each.info["is_final"] for each in shown] == [False] * 4 + [True]
    latents: list[torch.Tensor] = []

    def keep(_pipe: Any, _step: int, _timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        latents.append(values["latents"])
        return {}

    settings = resolve(client.limits(MODEL), PROMPT, None, parameters)
    arguments = seams.call_arguments(pipe, client.limits(MODEL), settings)
    pipe(**{**arguments, "callback_on_step_end": keep, "output_type": "latent"})
    config = pipe.vae.config
    for each, packed in zip(shown, latents, strict=True):
        z = pipe._unpack_latents(packed, 64, 64, pipe.vae_scale_factor)
        expected = diffusers_picture(pipe, z / config.scaling_factor + config.shift_factor)
        np.testing.assert_array_equal(each.images, expected)


def test_a_trajectory_goes_through_the_gate(client: DiffusionClient) -> None:
    shown = list(client.stream(MODEL, PROMPT, trajectory=True, quality="high", seed=5, num_inference_steps=9))
    assert [each.info["step"] for each in shown] == list(range(1, 10))
    assert {each.info["decode_path"] for each in shown} == {"fast"}


@pytest.mark.parametrize(
    ("parameters", "param"),
    [({"trajectory": "yes"}, "trajectory"), ({"trajectory": True, "partial_images": 1}, "partial_images")],
)
def test_a_trajectory_is_asked_for_by_true_alone(
    client: DiffusionClient, parameters: dict[str, Any], param: str
) -> None:
    with pytest.raises(DiffusionError) as caught:
        client.generate(MODEL, PROMPT, **parameters)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("parameter", "default", "value", "allowed"),
    [("fast_path_min_psnr_db", "40", "nan", "numbers"), ("max_gpu_batch_rows", "4", "few", "numbers")],
)
def test_a_parameter_that_is_none_is_told_to_the_operator(
    parameter: str, default: str, value: str, allowed: str, tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    add(str(ROOT / "model_repository/emoji-flux/pipeline"), "fox", repository, BuildOptions(warmup=False))
    change_parameter(repository / "fox_vae_decode/config.pbtxt", parameter, default, value)
    said = (
        f"the parameter '{parameter}' in the config.pbtxt of fox_vae_decode is '{value}'; "
        f"allowed: {allowed} from 0"
    )
    triton = TritonServer(repository, data_dir=tmp_path / "data", exit_timeout=30)
    with pytest.raises(LaunchError, match=re.escape(said)), triton:
        pass


def change_parameter(config: Path, name: str, before: str, after: str) -> None:
    """As an operator does, with an editor."""
    text = config.read_text()
    asked = f'key: "{name}" value: {{ string_value: "{before}" }}'
    assert asked in text
    config.write_text(text.replace(asked, asked.replace(f'"{before}"', f'"{after}"')))


def test_the_operator_decides_what_auto_is_and_what_is_good_enough(tmp_path: Path) -> None:
    """Two models: one whose ``auto`` is fast, and one whose threshold its fast decoder does not reach."""
    pipeline = str(ROOT / "model_repository/emoji-flux/pipeline")
    repository = tmp_path / "repository"
    for name in ("quick", "strict"):
        add(pipeline, name, repository, BuildOptions(default_quality=Tier.FAST))
    change_parameter(repository / "strict_vae_decode/config.pbtxt", "fast_path_min_psnr_db", "40", "150")
    with TritonServer(repository, data_dir=tmp_path / "data", exit_timeout=30) as triton:
        triton.wait_ready(120)
        with DiffusionClient(triton.grpc_url) as client:
            paths = {
                (model, quality): client.generate(model, PROMPT, quality=quality, num_inference_steps=2).info[
                    "decode_path"
                ]
                for model in ("quick", "strict")
                for quality in ("auto", "hd", "low")
            }
    assert paths == {
        ("quick", "auto"): "fast",
        ("quick", "hd"): "lossless",
        ("quick", "low"): "fast",
        ("strict", "auto"): "lossless",
        ("strict", "hd"): "lossless",
        ("strict", "low"): "lossless",
    }
