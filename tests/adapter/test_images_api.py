"""Image generation through OpenAI's own client, against the running server."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import openai
import pytest
from adapter_process import AdapterProcess
from diffusion_backend.client import DiffusionClient
from diffusion_backend.quality import QUALITIES, TIERS
from diffusion_backend.settings import MAX_SEED, ModelLimits
from openai.types import Image as ImageResult
from openai.types import ImagesResponse
from PIL import Image
from test_image_streams import flags_for
from video_server import refusal

from tests.running_server import RunningServer

MODEL = "emoji-flux"
PROMPT = "a fox on a blue background"


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.adapter_url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def limits(server: RunningServer) -> ModelLimits:
    with DiffusionClient(server.grpc_url) as triton:
        return triton.limits(MODEL)


def generate(client: openai.OpenAI, **fields: Any) -> ImagesResponse:
    """A generation; fields that OpenAI's client doesn't know go through its ``extra_body``."""
    return client.images.generate(**{"prompt": PROMPT}, extra_body=fields)


def file_of(result: ImageResult) -> bytes:
    assert result.b64_json is not None
    return base64.b64decode(result.b64_json)


def pixels_of(file: bytes) -> npt.NDArray[np.int16]:
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB")).astype(np.int16)


def only(response: ImagesResponse) -> ImageResult:
    assert response.data is not None
    (result,) = response.data
    return result


def lone(client: openai.OpenAI, **fields: Any) -> bytes:
    return file_of(only(generate(client, **fields)))


def distance(one: bytes, other: bytes) -> int:
    return int(np.abs(pixels_of(one) - pixels_of(other)).max())


def test_defaults(client: openai.OpenAI, limits: ModelLimits) -> None:
    response = client.images.generate(model=MODEL, prompt=PROMPT)
    image = Image.open(io.BytesIO(file_of(only(response))))
    assert (image.format, image.mode, image.size) == (
        "PNG",
        "RGB",
        (limits.default_width, limits.default_height),
    )
    assert response.size == f"{limits.default_width}x{limits.default_height}"
    assert (response.quality, response.output_format, response.background) == ("auto", "png", "opaque")
    assert response.created > 1_700_000_000
    assert response._request_id
    assert response.model_extra is not None
    assert response.model_extra["model"] == MODEL
    assert "safety_identifier" not in response.model_fields_set


def test_the_drawn_seed_is_echoed_and_repeats_the_picture(client: openai.OpenAI) -> None:
    response = generate(client)
    assert response.model_extra is not None
    seed = response.model_extra["seed"]
    assert only(response).model_extra["seed"] == seed  # type: ignore[index]
    assert lone(client, seed=seed) == file_of(only(response))


def test_the_same_seed_alone_gives_the_same_file(client: openai.OpenAI) -> None:
    assert lone(client, seed=11) == lone(client, seed=11)
    assert lone(client, seed=11) != lone(client, seed=12)


@pytest.mark.parametrize("size", ["auto", "64x64", "128x64", "64x128", "72x96", "128x128"])
def test_sizes_are_exact(client: openai.OpenAI, limits: ModelLimits, size: str) -> None:
    response = client.images.generate(prompt=PROMPT, size=size)
    expected = f"{limits.default_width}x{limits.default_height}" if size == "auto" else size
    assert response.size == expected
    height, width, _ = pixels_of(file_of(only(response))).shape
    assert f"{width}x{height}" == expected


@pytest.mark.parametrize("output_format", ["png", "jpeg", "webp"])
def test_formats(client: openai.OpenAI, output_format: Any) -> None:
    response = client.images.generate(prompt=PROMPT, output_format=output_format, extra_body={"seed": 3})
    file = file_of(only(response))
    assert response.output_format == output_format
    assert Image.open(io.BytesIO(file)).format == output_format.upper()
    assert np.abs(pixels_of(file) - pixels_of(lone(client, seed=3))).mean() < 8


@pytest.mark.parametrize("output_format", ["jpeg", "webp"])
def test_compression(client: openai.OpenAI, output_format: str) -> None:
    sizes = [
        len(lone(client, seed=3, output_format=output_format, output_compression=level))
        for level in (0, 50, 100)
    ]
    assert sizes == sorted(set(sizes))


def test_several_images_are_those_of_the_following_seeds(client: openai.OpenAI) -> None:
    response = client.images.generate(prompt=PROMPT, n=3, extra_body={"seed": 21})
    assert response.data is not None
    files = [file_of(result) for result in response.data]
    assert [result.model_extra["seed"] for result in response.data] == [21, 22, 23]  # type: ignore[index]
    assert len(set(files)) == 3
    for seed, file in zip((21, 22, 23), files, strict=True):
        assert distance(file, lone(client, seed=seed)) <= 1


def test_url_results(client: openai.OpenAI, server: RunningServer) -> None:
    response = client.images.generate(prompt=PROMPT, response_format="url", n=2, extra_body={"seed": 5})
    assert response.data is not None
    urls = [result.url for result in response.data]
    assert len(set(urls)) == 2
    for seed, url in zip((5, 6), urls, strict=True):
        assert url is not None
        assert url.startswith(f"{server.adapter_url}/v1/media/")
        answer = httpx.get(url)
        assert answer.headers["content-type"] == "image/png"
        assert answer.headers["etag"]
        assert int(answer.headers["content-length"]) == len(answer.content)
        assert distance(answer.content, lone(client, seed=seed)) <= 1


@pytest.mark.parametrize("quality", QUALITIES)
def test_every_quality_is_served_and_says_how(client: openai.OpenAI, quality: Any) -> None:
    response = client.images.generate(prompt=PROMPT, quality=quality, extra_body={"seed": 8})
    assert response.quality == quality
    result = only(response)
    assert result.model_extra is not None
    path = TIERS.get(quality, "lossless")  # the others mean the model's default
    assert result.model_extra["decode_path"] == path
    if path == "lossless":
        assert file_of(result) == lone(client, seed=8)
    else:
        assert 0 < distance(file_of(result), lone(client, seed=8)) < 32


def test_extensions_at_either_place(client: openai.OpenAI) -> None:
    fields = {"seed": 4, "num_inference_steps": 5, "guidance_scale": 3.0, "negative_prompt": "cat"}
    top = lone(client, **fields)
    assert lone(client, extra_body=fields) == top
    assert lone(client, extra_body=fields, seed=4) == top


@pytest.mark.parametrize(
    "change", [{"num_inference_steps": 5}, {"guidance_scale": 4}, {"negative_prompt": "blue background"}]
)
def test_extensions_change_the_picture(client: openai.OpenAI, change: dict[str, Any]) -> None:
    assert lone(client, seed=4, **change) != lone(client, seed=4)


def test_accepted_and_without_effect(client: openai.OpenAI) -> None:
    response = client.images.generate(
        prompt=PROMPT,
        background="opaque",
        moderation="low",
        user="someone",
        safety_identifier="ключ",
        stream=False,
        extra_body={"seed": 4, "style": None, "partial_images": 0},
    )
    assert response.safety_identifier == "ключ"  # type: ignore[attr-defined]
    assert file_of(only(response)) == lone(client, seed=4)


@pytest.mark.parametrize("prompt", ["🦊" * 32_000, "a\u0000fox", "\u202eאבג", "e\u0301" * 1000, "x\n\ty"])
def test_any_unicode_prompt(client: openai.OpenAI, prompt: str) -> None:
    assert file_of(only(client.images.generate(prompt=prompt)))


ERRORS: list[tuple[dict[str, Any], int, str, str]] = [
    ({"prompt": " "}, 400, "prompt", "empty_prompt"),
    ({"model": "no-such-model"}, 404, "model", "model_not_found"),
    ({"model": ""}, 404, "model", "model_not_found"),
    ({"size": "65x64"}, 400, "size", "invalid_size"),
    ({"size": "64x1024"}, 400, "size", "invalid_size"),
    ({"size": "0x64"}, 400, "size", "invalid_size"),
    ({"size": "64"}, 400, "size", "invalid_size"),
    ({"size": "64X64"}, 400, "size", "invalid_size"),
    ({"size": "６４x64"}, 400, "size", "invalid_size"),
    ({"size": 64}, 400, "size", "invalid_size"),
    ({"seed": -1}, 400, "seed", "invalid_value"),
    ({"seed": MAX_SEED + 1}, 400, "seed", "invalid_value"),
    ({"seed": MAX_SEED, "n": 2}, 400, "seed", "invalid_value"),
    ({"seed": 1.0}, 400, "seed", "invalid_value"),
    ({"seed": True}, 400, "seed", "invalid_value"),
    ({"seed": "1"}, 400, "seed", "invalid_value"),
    ({"num_inference_steps": 0}, 400, "num_inference_steps", "invalid_value"),
    ({"num_inference_steps": 10**6}, 400, "num_inference_steps", "invalid_value"),
    ({"num_inference_steps": True}, 400, "num_inference_steps", "invalid_value"),
    ({"guidance_scale": -1}, 400, "guidance_scale", "invalid_value"),
    ({"guidance_scale": 1e9}, 400, "guidance_scale", "invalid_value"),
    ({"guidance_scale": True}, 400, "guidance_scale", "invalid_value"),
    ({"guidance_scale": "2"}, 400, "guidance_scale", "invalid_value"),
    ({"negative_prompt": 1}, 400, "negative_prompt", "invalid_value"),
    ({"negative_prompt": "x" * 32_001}, 400, "negative_prompt", "string_too_long"),
    ({"n": 11}, 400, "n", "invalid_value"),
    ({"quality": "ultra"}, 400, "quality", "invalid_value"),
    ({"output_format": "gif"}, 400, "output_format", "invalid_value"),
    ({"background": "transparent"}, 400, "background", "invalid_value"),
    ({"partial_images": 1}, 400, "partial_images", "invalid_value"),
    ({"style": "vivid"}, 400, "style", "unsupported_parameter"),
    ({"steps": 4}, 400, "steps", "unknown_parameter"),
]


@pytest.mark.parametrize(("fields", "status", "param", "code"), ERRORS)
def test_errors(client: openai.OpenAI, fields: dict[str, Any], status: int, param: str, code: str) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        generate(client, **fields)
    error = caught.value
    assert (error.status_code, error.param, error.code) == (status, param, code)
    assert error.request_id
    assert isinstance(error.body, dict)
    assert set(error.body) == {"message", "type", "param", "code"}


def test_lone_surrogates_are_refused_readably(server: RunningServer) -> None:
    for body in (r'{"prompt": "a", "negative_prompt": "\ud800"}', r'{"prompt": "a", "size": "\udfff"}'):
        answer = httpx.post(
            f"{server.adapter_url}/v1/images/generations",
            content=body,
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == 400
        assert "\\ud" in answer.json()["error"]["message"]


def test_concurrent_requests_get_their_own_pictures(client: openai.OpenAI) -> None:
    jobs = [
        {"seed": seed, "num_inference_steps": steps, "size": size}
        for seed, steps, size in zip(
            range(8), (4, 9, 20, 6, 20, 5, 12, 7), ("64x64", "64x128", "128x64", "72x72") * 2, strict=True
        )
    ]
    with ThreadPoolExecutor(len(jobs)) as pool:
        together = list(pool.map(lambda job: lone(client, **job), jobs))
    for job, file in zip(jobs, together, strict=True):
        assert distance(file, lone(client, **job)) <= 1


def test_metrics_count_images(client: openai.OpenAI, server: RunningServer) -> None:
    line = f'openai_adapter_images_total{{decode_path="lossless",model="{MODEL}",quality="hd"}}'

    def count() -> float:
        lines = httpx.get(f"{server.adapter_url}/metrics").text.splitlines()
        return sum(float(text.removeprefix(line)) for text in lines if text.startswith(line))

    before = count()
    client.images.generate(prompt=PROMPT, n=2, quality="hd")
    assert count() == before + 2


def test_a_store_that_takes_no_pictures(
    start_adapter: Callable[..., AdapterProcess], server: RunningServer, tmp_path: Path
) -> None:
    """Asked again, the pictures would be made again, for nothing."""
    (tmp_path / "store").write_text("")
    adapter = start_adapter(*flags_for(server), "--media-url", f"file://{tmp_path}/store")
    adapter.wait("/health")
    body = {"prompt": PROMPT, "num_inference_steps": 2}
    answer = httpx.post(f"{adapter.url}/v1/images/generations", json={**body, "response_format": "url"})
    assert refusal(answer) == (503, "response_format", "service_unavailable")
    assert answer.headers["x-should-retry"] == "false"
    assert httpx.post(f"{adapter.url}/v1/images/generations", json=body).status_code == 200
