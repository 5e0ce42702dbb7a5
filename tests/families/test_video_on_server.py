"""Clips on a real server: text to video and image to video, through the ensemble and our client."""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusion_backend import seams
from diffusion_backend.client import AsyncDiffusionClient, DiffusionClient, Generation
from diffusion_backend.errors import DiffusionError, Status
from diffusion_backend.repository import add
from diffusion_backend.settings import resolve
from diffusion_backend.tritonserver import TritonServer
from PIL import Image

from tests import triton_metrics
from tests.families.family import PROMPT, Family
from tests.families.stable_diffusion import sd3
from tests.families.video import cogvideox, ltx_image, mochi
from tests.families.wan import wan21, wan21_image

MODELS = {"wan": wan21, "wan-image": wan21_image}
FURTHER_MODELS = {"ltx-image": ltx_image, "cogvideox": cogvideox, "mochi": mochi}  # on a server of their own
Saved = Callable[[Family], Path]
SLICED = ("wan", "wan-image")  # two frames of the default size a slice


def image_file(file_format: str = "PNG", mode: str = "RGB", **options: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 70, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, file_format, **options)
    return file.getvalue()


@contextlib.contextmanager
def serve(models: dict[str, Family], saved: Saved, folder: Path) -> Iterator[TritonServer]:
    """A server of ``models``, ready."""
    repository = folder / "repository"
    for name, family in models.items():
        add(str(saved(family)), name, repository)
    for name in set(SLICED) & set(models):
        config = repository / f"{name}_vae_decode/config.pbtxt"
        default = '"max_slice_bytes" value: { string_value: "16777216"'
        assert default in config.read_text()
        config.write_text(config.read_text().replace(default, default.replace("16777216", "3072")))
    triton = TritonServer(repository, data_dir=folder / "data", exit_timeout=30)
    triton.start()
    try:
        triton.wait_ready(240)
        yield triton
    finally:
        in_order = triton.stop()
    # A request that tritonserver never counted out keeps it from ending.
    assert in_order, triton.process.obituary()


@pytest.fixture(scope="module")
def triton(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server of two video models and one that makes pictures."""
    with serve({**MODELS, "picture": sd3}, saved, tmp_path_factory.mktemp("serving")) as triton:
        yield triton


@pytest.fixture(scope="module")
def client(triton: TritonServer) -> Iterator[DiffusionClient]:
    with DiffusionClient(triton.grpc_url) as client:
        yield client


@pytest.fixture(scope="module")
def further_client(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiffusionClient]:
    """A client of a server of the further models."""
    with (
        serve(FURTHER_MODELS, saved, tmp_path_factory.mktemp("serving")) as triton,
        DiffusionClient(triton.grpc_url) as client,
    ):
        yield client


def unsplit(
    client: DiffusionClient,
    name: str,
    folder: Path,
    parameters: dict[str, Any],
    image: Image.Image | None,
    prompt: str = PROMPT,
) -> np.ndarray[Any, Any]:
    """Plain diffusers: the clip as its own conversion to PIL makes it."""
    limits = client.limits(name)
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    settings = resolve(limits, prompt, None, parameters, images=0 if image is None else 1)
    torch.manual_seed(settings.seed)
    images = {} if image is None else {"image": image}
    arguments = {**seams.call_arguments(pipe, limits, settings, images), "output_type": "pil"}
    (frames,) = pipe(**arguments).frames
    return np.stack([np.asarray(frame) for frame in frames])


@pytest.mark.parametrize("name", MODELS)
def test_the_servers_clips_equal_unsplit_diffusers(name: str, client: DiffusionClient, saved: Saved) -> None:
    assert_equals_unsplit(client, name, MODELS[name], saved)


@pytest.mark.long
@pytest.mark.parametrize("name", FURTHER_MODELS)
def test_clips_of_further_families(name: str, further_client: DiffusionClient, saved: Saved) -> None:
    assert_equals_unsplit(further_client, name, FURTHER_MODELS[name], saved)


def assert_equals_unsplit(client: DiffusionClient, name: str, family: Family, saved: Saved) -> None:
    limits = client.limits(name)
    assert limits.task == family.task
    assert limits.min_num_frames is not None
    assert limits.num_frames_step is not None
    larger = {
        "width": limits.default_width + limits.size_multiple,
        "num_frames": limits.min_num_frames + limits.num_frames_step,
    }
    for parameters in ({"seed": 1}, {"seed": 2, "num_inference_steps": 2, "fps": 10, **larger}):
        size = parameters.get("width", limits.default_width), limits.default_height
        picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (*size[::-1], 3), np.uint8))
        file = io.BytesIO()
        picture.save(file, "PNG")
        given = {"image": file.getvalue()} if limits.takes_image else {}
        clip = client.generate(name, PROMPT, **given, **parameters)
        expected = unsplit(client, name, saved(family), parameters, picture if given else None)
        assert clip.frames.std() > 1
        np.testing.assert_array_equal(clip.frames, expected)
        assert clip.images.size == 0
        assert (
            clip.info["num_frames"]
            == len(clip.frames)
            == parameters.get("num_frames", limits.default_num_frames)
        )
        assert clip.info["fps"] == parameters.get("fps", limits.default_fps)
        assert (clip.info["decode_path"], clip.info["is_final"]) == ("lossless", True)


def test_slices_are_in_order_and_complete(client: DiffusionClient) -> None:
    slices = list(client.stream("wan", PROMPT, seed=1, num_frames=9))
    assert [len(part.frames) for part in slices] == [2, 2, 2, 2, 1]
    assert [part.info["frame_index"] for part in slices] == [0, 2, 4, 6, 8]
    assert [part.info["is_final"] for part in slices] == [False] * 4 + [True]
    assert {(part.info["num_frames"], part.info["fps"]) for part in slices} == {(9, 16)}
    whole = client.generate("wan", PROMPT, seed=1, num_frames=9)
    np.testing.assert_array_equal(np.concatenate([part.frames for part in slices]), whole.frames)
    assert whole.info["frame_index"] == 0


def test_the_fast_tier(client: DiffusionClient) -> None:
    lossless, fast = (client.generate("wan", PROMPT, seed=1, quality=q) for q in ("lossless", "high"))
    assert (lossless.info["decode_path"], fast.info["decode_path"]) == ("lossless", "fast")
    error = (lossless.frames.astype(int) - fast.frames.astype(int)).astype(float)
    assert -10 * np.log10((error**2).mean() / 255**2 + 1e-20) > 40


def test_requests_of_one_shape_share_the_denoiser(client: DiffusionClient, triton: TritonServer) -> None:
    """Rows of a batch are what they are alone, up to rounding."""

    def clip(seed: int) -> np.ndarray[Any, Any]:
        return client.generate("wan", PROMPT, seed=seed, num_inference_steps=40).frames.astype(int)

    def forwards() -> float:
        return triton_metrics.read(triton.metrics_url, "step_seconds_count", model="wan_denoise")

    alone = [clip(1)]
    before = forwards()
    alone.append(clip(2))
    one = forwards() - before
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(clip, (1, 2)))
    assert forwards() - before - one < 1.75 * one
    assert max(np.abs(a - b).max() for a, b in zip(alone, together, strict=True)) <= 1


@pytest.mark.parametrize("name", ["wan", "picture"])
def test_progress(name: str, client: DiffusionClient) -> None:
    parameters = {"seed": 1, "num_inference_steps": 150}
    answers = list(client.stream(name, PROMPT, progress=True, **parameters))
    told = [answer for answer in answers if answer.is_progress]
    made = [answer for answer in answers if not answer.is_progress]
    assert told == answers[: len(told)], "word of a step came after what was made"
    assert told, "nothing was told"
    steps = [answer.info["step"] for answer in told]
    assert steps == sorted(set(steps))
    assert steps[0] == 1
    assert steps[-1] < 150
    assert {(answer.info["num_inference_steps"], answer.info["is_final"]) for answer in told} == {
        (150, False)
    }
    assert not any("error" in answer.info for answer in told)
    # No more than one in 100 ms.
    assert len(told) <= made[-1].info["timings"]["denoise_seconds"] / 0.1 + 1
    quiet = list(client.stream(name, PROMPT, **parameters))
    assert not any(answer.is_progress for answer in quiet)
    for one, other in zip(made, quiet, strict=True):
        np.testing.assert_array_equal(one.frames, other.frames)
        np.testing.assert_array_equal(one.images, other.images)


def test_progress_and_previews(client: DiffusionClient) -> None:
    answers = list(
        client.stream("picture", PROMPT, seed=1, num_inference_steps=60, progress=True, partial_images=2)
    )
    pictures = [answer for answer in answers if not answer.is_progress]
    assert [answer.info["step"] for answer in pictures] == [20, 40, 60]
    steps = [answer.info["step"] for answer in answers]
    assert steps == sorted(steps)


@pytest.mark.parametrize("progress", [False, True])
def test_a_cancel_frees_and_leaks_nothing(
    client: DiffusionClient, triton: TritonServer, progress: bool
) -> None:
    """In denoise, and while the clip is decoded and sent: the server's end, in order, says that none is left."""
    before = count_given_up(triton)
    answers = client.stream("wan", PROMPT, seed=1, num_inference_steps=200, progress=progress)
    if progress:
        assert next(answers).is_progress
        answers.close()  # type: ignore[attr-defined]
    else:
        with pytest.raises(DiffusionError) as caught:
            client.generate("wan", PROMPT, num_inference_steps=200, timeout=0.3)
        assert caught.value.status is Status.CANCELLED
    triton_metrics.wait_until_idle(triton.metrics_url, 5)
    assert count_given_up(triton) == before + 1
    for _ in range(10):
        slices = client.stream("wan", PROMPT, num_inference_steps=2, num_frames=9, progress=progress)
        first: Generation = next(slices)
        assert first.is_progress == progress
        assert len(first.frames) == (0 if progress else 2), "the clip has more"
        slices.close()  # type: ignore[attr-defined]
    triton_metrics.wait_until_idle(triton.metrics_url, 5)
    assert pending(triton, "wan") == 0
    assert client.generate("wan", PROMPT, num_inference_steps=2).frames.shape == (5, 16, 32, 3)


def test_cancels_while_clips_wait_for_the_decode(client: DiffusionClient, triton: TritonServer) -> None:
    def cancelled(seconds: float) -> None:
        with pytest.raises(DiffusionError) as caught:
            client.generate("wan", PROMPT, num_inference_steps=1, num_frames=9, timeout=seconds)
        assert caught.value.status is Status.CANCELLED

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(cancelled, np.linspace(0.001, 0.02, 24)))
    triton_metrics.wait_until_idle(triton.metrics_url, 10)
    assert pending(triton, "wan") == 0


def count_given_up(triton: TritonServer) -> float:
    """Requests of wan that its step engine ended early: it may learn of a deadline before the client's cancel comes."""
    return sum(
        triton_metrics.read(triton.metrics_url, "requests_total", model="wan_denoise", outcome=outcome)
        for outcome in ("cancelled", "deadline")
    )


def pending(triton: TritonServer, model: str) -> float:
    """Requests of the model's stages that Triton has not counted out, after what may yet be under way."""
    deadline = time.monotonic() + 5
    while True:
        request = urllib.request.Request(triton.metrics_url, headers={"Connection": "close"})
        with urllib.request.urlopen(request) as answer:
            lines = answer.read().decode().splitlines()
        counts = [
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith("nv_inference_pending_request_count") and f'model="{model}' in line
        ]
        assert len(counts) >= 3, "Triton counts each stage"
        if not (count := sum(counts)) or time.monotonic() > deadline:
            return count
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("wan", {"num_frames": 6}, "'num_frames' is 6; allowed: 1, 5, 9"),
        ("wan", {"num_frames": 13}, "'num_frames' is 13; allowed: 1, 5, 9"),
        ("wan", {"num_frames": True}, "'num_frames' is true"),
        ("wan", {"fps": 0}, "'fps' is 0; allowed: integers from 1 to 120"),
        ("wan", {"partial_images": 1}, "'partial_images' is 1; allowed: 0, since this model makes video"),
        ("wan", {"trajectory": True}, "'trajectory' is true; allowed: false, since this model makes video"),
        ("wan", {"progress": "yes"}, "'progress' is 'yes'; allowed: true, false"),
        ("wan", {"width": 40}, "'width' is 40; allowed: multiples of 16"),
        ("wan", {"image": image_file()}, "unexpected inference input 'image'"),
        ("picture", {"num_frames": 5}, "'num_frames' is 5; this model makes pictures"),
        ("picture", {"fps": 5}, "'fps' is 5; this model makes pictures"),
        ("wan-image", {}, "'image' is missing"),
        ("wan-image", {"image": b""}, "'image' is no image file"),
        ("wan-image", {"image": image_file()[:-400]}, "'image' is a PNG file that is damaged or cut short"),
        (
            "wan-image",
            {"image": image_file("GIF")},
            "'image' is no image file that can be read; allowed: PNG",
        ),
    ],
)
def test_refusals_name_the_field(
    client: DiffusionClient, name: str, parameters: dict[str, Any], words: str
) -> None:
    with pytest.raises(DiffusionError) as caught:
        client.generate(name, PROMPT, **parameters)
    assert words in caught.value.message
    assert caught.value.status is Status.INVALID_ARG


def test_a_video_stage_describes_itself(triton: TritonServer) -> None:
    async def describe() -> dict[str, Any]:
        async with AsyncDiffusionClient(triton.grpc_url) as client:
            return await client.describe("wan_vae_decode", batched=False)

    facts = asyncio.run(describe())
    assert facts["stage"] == "vae_decode"
    assert facts["fast_path"]["state"] == "installed"
