"""Pictures of pictures on the real server, called as direct Triton users call it."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from diffusers import DiffusionPipeline, FluxImg2ImgPipeline, FluxInpaintPipeline
from diffusion_backend.client import DiffusionClient
from diffusion_backend.errors import DiffusionError
from PIL import Image

from tests.running_server import ROOT, RunningServer

MODEL = "emoji-flux"
PROMPT = "a panda on a yellow background"
SIDE = 64
HALF = SIDE // 2
Pixels = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Any:
    with DiffusionClient(server.grpc_url) as client:
        yield client


@pytest.fixture(scope="module")
def apple(client: DiffusionClient) -> Pixels:
    return client.generate(MODEL, "a red apple on a yellow background", seed=1).images


@pytest.fixture(scope="module")
def pipe() -> Any:
    return DiffusionPipeline.from_pretrained(
        ROOT / "model_repository/emoji-flux/pipeline", dtype=torch.float32
    )


def png(pixels: npt.ArrayLike) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.asarray(pixels)).save(file, "PNG")
    return file.getvalue()


def right_half() -> bytes:
    """A mask: the right half may change."""
    mask = np.full((SIDE, SIDE, 4), 255, np.uint8)
    mask[:, HALF:, 3] = 0
    return png(mask)


def unsplit(pipe: Any, apple: Pixels, **more: Any) -> Pixels:
    """Plain diffusers' picture."""
    pipe.set_progress_bar_config(disable=True)
    torch.manual_seed(5)
    made = pipe(
        prompt=PROMPT,
        negative_prompt="",
        image=Image.fromarray(apple),
        height=SIDE,
        width=SIDE,
        strength=0.7,
        num_inference_steps=10,
        true_cfg_scale=2.0,
        max_sequence_length=16,
        generator=torch.Generator("cpu").manual_seed(5),
        **more,
    )
    return np.asarray(made.images[0])


def test_an_image_to_image_equals_unsplit_diffusers(
    client: DiffusionClient, apple: Pixels, pipe: Any
) -> None:
    made = client.generate(
        MODEL, PROMPT, image=png(apple), strength=0.7, num_inference_steps=10, guidance_scale=2.0, seed=5
    )
    assert made.info["task"] == "image-to-image"
    np.testing.assert_array_equal(made.images, unsplit(FluxImg2ImgPipeline.from_pipe(pipe), apple))


@pytest.mark.parametrize("quality", ["lossless", "high"])
def test_what_a_mask_keeps_is_the_image_s(
    client: DiffusionClient, apple: Pixels, pipe: Any, quality: str
) -> None:
    """In both tiers; what it does not is unsplit diffusers'."""
    mask = np.zeros((SIDE, SIDE), np.uint8)
    mask[:, HALF:] = 255
    expected = unsplit(FluxInpaintPipeline.from_pipe(pipe), apple, mask_image=Image.fromarray(mask))
    made = client.generate(
        MODEL,
        PROMPT,
        image=png(apple),
        mask=right_half(),
        quality=quality,
        strength=0.7,
        num_inference_steps=10,
        guidance_scale=2.0,
        seed=5,
    )
    assert (made.info["task"], made.info["decode_path"]) == (
        "inpainting",
        "fast" if quality == "high" else "lossless",
    )
    np.testing.assert_array_equal(made.images[:, :HALF], apple[:, :HALF])
    assert np.abs(made.images[:, HALF:].astype(int) - apple[:, HALF:]).mean() > 10
    if quality == "lossless":
        np.testing.assert_array_equal(made.images[:, HALF:], expected[:, HALF:])


def test_previews_keep_it_too(client: DiffusionClient, apple: Pixels) -> None:
    *previews, last = client.stream(
        MODEL, PROMPT, image=png(apple), mask=right_half(), partial_images=2, strength=0.7, seed=5
    )
    assert [preview.info["is_final"] for preview in (*previews, last)] == [False, False, True]
    for each in (*previews, last):
        np.testing.assert_array_equal(each.images[:, :HALF], apple[:, :HALF])


def test_requests_of_different_tasks_at_once(client: DiffusionClient, apple: Pixels) -> None:
    """Each is what it is alone, but for what batches round differently."""
    given: list[dict[str, Any]] = [
        {},
        {"image": png(apple)},
        {"image": png(apple), "mask": right_half()},
        {"image": png(apple), "strength": 0.3},
    ]

    def make(number: int) -> Pixels:
        return client.generate(MODEL, PROMPT, seed=number, **given[number % len(given)]).images

    alone = [make(number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(make, range(8)))
    for one, other in zip(alone, together, strict=True):
        assert np.abs(one.astype(int) - other).max() <= 1


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"mask": right_half()}, "mask"),
        ({"image": b"GIF89a"}, "image"),
        ({"image": [png(np.zeros((8, 8, 3), np.uint8))] * 2}, "image"),
        ({"image": png(np.zeros((8, 9, 3), np.uint8)), "mask": right_half()}, "mask"),
        ({"strength": 0.5}, "strength"),
        ({"image": png(np.zeros((8, 8, 3), np.uint8)), "strength": 0.01}, "strength"),
        ({"image": png(np.zeros((8, 8, 3), np.uint8)), "strength": "much"}, "strength"),
    ],
)
def test_refusals_name_the_field(client: DiffusionClient, arguments: dict[str, Any], param: str) -> None:
    with pytest.raises(DiffusionError) as caught:
        client.generate(MODEL, PROMPT, **arguments)
    assert caught.value.param == param
    assert "allowed" in caught.value.message
