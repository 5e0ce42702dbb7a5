"""End to end with the clients people use: the official Python and Node SDKs, and curl."""

from __future__ import annotations

import asyncio
import base64
import io
import random
import subprocess
from pathlib import Path
from typing import Any

import emoji
import evaluate
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from diffusion_backend.launcher import curl_line
from openai import AsyncOpenAI, OpenAI
from PIL import Image

from tests.node_sdk import run_script
from tests.running_server import ROOT, RunningServer

MODEL = ROOT / "model_repository/emoji-flux"
Pixels = np.ndarray[Any, Any]


def pixels(b64: str) -> Pixels:
    image = Image.open(io.BytesIO(base64.b64decode(b64)))
    assert image.format == "PNG"
    return np.asarray(image).astype(int)


def test_the_python_sdk(server: RunningServer) -> None:
    client = OpenAI(base_url=f"{server.adapter_url}/v1", api_key="unused", max_retries=0)
    (model,) = client.models.list().data
    answer = client.images.generate(model=model.id, prompt="a fox on a blue background", size="64x64", n=2)
    assert answer.data is not None
    assert [pixels(image.b64_json or "").shape for image in answer.data] == [(64, 64, 3)] * 2


def test_the_node_sdk(server: RunningServer, tmp_path: Path) -> None:
    result = run_script(tmp_path, "generate.mjs", f"{server.adapter_url}/v1")
    assert result["models"] == ["emoji-flux"]
    assert pixels(result["answer"]["data"][0]["b64_json"]).shape == (64, 64, 3)
    assert result["answer"]["seed"] == 11
    assert [event["type"] for event in result["events"]] == [
        "image_generation.partial_image",
        "image_generation.partial_image",
        "image_generation.completed",
    ]
    assert {pixels(event["b64_json"]).shape for event in result["events"]} == {(64, 64, 3)}
    assert result["refused"] == {
        "name": "BadRequestError",
        "status": 400,
        "param": "size",
        "code": "invalid_size",
    }


def test_the_printed_curl_line(server: RunningServer, tmp_path: Path) -> None:
    """The line that ./serve prints writes a PNG when it is pasted."""
    subprocess.run(
        ["bash", "-c", curl_line(server.adapter_url, "emoji-flux")], cwd=tmp_path, check=True, timeout=60
    )
    (file,) = tmp_path.iterdir()
    assert Image.open(file).size == (64, 64)


def test_32_at_once_each_gets_its_own_picture(server: RunningServer) -> None:
    """Mixed steps, seeds, sizes and prompts under load: within 1/255 of the same request alone."""
    draw = random.Random(0)
    requests = [
        {
            "model": "emoji-flux",
            "prompt": f"a {draw.choice(['fox', 'cat', 'car', 'star'])} on a {draw.choice(['red', 'blue'])} background",
            "size": draw.choice(["64x64", "128x64", "96x128", "auto"]),
            "extra_body": {"seed": seed, "num_inference_steps": draw.randint(1, 8)},
        }
        for seed in range(32)
    ]

    async def run() -> tuple[list[Pixels], list[Pixels]]:
        async with AsyncOpenAI(
            base_url=f"{server.adapter_url}/v1", api_key="unused", max_retries=0
        ) as client:

            async def picture(request: dict[str, Any]) -> Pixels:
                answer = await client.images.generate(**request)
                assert answer.data is not None
                return pixels(answer.data[0].b64_json or "")

            together = await asyncio.gather(*(picture(request) for request in requests))
            return list(together), [await picture(request) for request in requests]

    together, alone = asyncio.run(run())
    for loaded, single in zip(together, alone, strict=True):
        assert loaded.shape == single.shape
        assert np.abs(loaded - single).max() <= 1
    assert len({picture.tobytes() for picture in alone}) == len(requests)


@pytest.mark.parametrize("name", ["fox", "red apple", "rocket", "panda", "pizza", "robot"])
def test_the_picture_is_of_its_prompt(server: RunningServer, name: str) -> None:
    """Nearest of the 74 training emoji, in the VAE's latent space, to what the API answers."""
    client = OpenAI(base_url=f"{server.adapter_url}/v1", api_key="unused", max_retries=0)
    prompt = f"a {name} on a white background"
    answer = client.images.generate(model="emoji-flux", prompt=prompt, extra_body={"seed": 1234})
    assert answer.data is not None
    picture = torch.tensor(pixels(answer.data[0].b64_json or "")).permute(2, 0, 1)[None] / 255
    vae = AutoencoderKL.from_pretrained(MODEL / "pipeline/vae", dtype=torch.float32)
    tiles = emoji.load_sheet(MODEL / "training/references.png")
    assert evaluate.recognise_names(vae, picture, ["white"], tiles, emoji.load_names()) == [name]
