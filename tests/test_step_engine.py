"""The step engine on the real server: batches, previews, cancels, deadlines, back-pressure, and what /metrics says."""

from __future__ import annotations

import asyncio
import queue
import random
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from diffusion_backend.client import AsyncDiffusionClient, DiffusionClient, Generation, infer_request
from diffusion_backend.errors import DiffusionError, Status
from diffusion_backend.repository import BuildOptions, add
from diffusion_backend.tritonserver import TritonServer
from tritonclient.grpc import service_pb2_grpc

from tests import triton_metrics
from tests.running_server import ROOT, RunningServer
from tests.triton_inputs import bytes_input

MODEL = "emoji-flux"
PROMPT = "a fox on a blue background"
LONG = 200  # steps: seconds, if nobody ends it
PLACES = 64  # max_queued_requests
PIPELINE = ROOT / "model_repository/emoji-flux/pipeline"


def outcomes(server: RunningServer, outcome: str) -> float:
    return triton_metrics.read(server.metrics_url, "requests_total", outcome=outcome)


def test_requests_that_arrive_at_random_are_what_they_are_alone(server: RunningServer) -> None:
    draw = random.Random(1)
    requests = [
        {
            "prompt": draw.choice(["a fox", "a red car on a white background", "two cats"]),
            "seed": number,
            "num_inference_steps": draw.choice([2, 4, 9]),
            "guidance_scale": draw.choice([1.0, 2.0, 3.5]),
            "width": draw.choice([64, 64, 128]),
        }
        for number in range(24)
    ]

    async def run(client: AsyncDiffusionClient, request: dict[str, Any], delay: float) -> Generation:
        await asyncio.sleep(delay)
        return await client.generate(MODEL, **request)

    async def together() -> list[Generation]:
        async with AsyncDiffusionClient(server.grpc_url) as client:
            return await asyncio.gather(*(run(client, request, draw.random()) for request in requests))

    before = triton_metrics.read(server.metrics_url, "batch_size_count")
    rows_before = triton_metrics.read(server.metrics_url, "batch_size_sum")
    batched = asyncio.run(together())
    triton_metrics.wait_until_idle(server.metrics_url, 10)
    forwards = triton_metrics.read(server.metrics_url, "batch_size_count") - before
    rows = triton_metrics.read(server.metrics_url, "batch_size_sum") - rows_before
    assert rows / forwards > 1.5, "requests hardly ever shared a forward"
    with DiffusionClient(server.grpc_url) as client:
        for request, generation in zip(requests, batched, strict=True):
            alone = client.generate(MODEL, **request)
            assert np.abs(alone.images.astype(int) - generation.images.astype(int)).max() <= 1, request


def test_previews_come_in_order_and_leave_the_picture_as_it_is(server: RunningServer) -> None:
    async def run() -> list[Generation]:
        async with AsyncDiffusionClient(server.grpc_url) as client:
            request = client.stream(MODEL, PROMPT, seed=3, num_inference_steps=12, partial_images=3)
            return [generation async for generation in request]

    *previews, final = asyncio.run(run())
    with DiffusionClient(server.grpc_url) as client:
        alone = client.generate(MODEL, PROMPT, seed=3, num_inference_steps=12)
    np.testing.assert_array_equal(final.images, alone.images)
    assert [preview.info["step"] for preview in previews] == [3, 6, 9]
    assert [preview.info["is_final"] for preview in previews] == [False] * 3
    assert final.info["is_final"]
    distances = [np.abs(preview.images.astype(int) - final.images).mean() for preview in previews]
    assert distances[0] > distances[1] > distances[2]
    # A picture already, not noise: neighbouring pixels of noise differ by 85 on average.
    assert np.abs(np.diff(previews[0].images.astype(int), axis=0)).mean() < 30


@pytest.mark.parametrize("value", [4, -1, "1", 1.5])
def test_the_number_of_previews_is_checked(server: RunningServer, value: object) -> None:
    with (
        DiffusionClient(server.grpc_url) as client,
        pytest.raises(DiffusionError, match="allowed: integers from 0 to 3") as caught,
    ):
        client.generate(MODEL, PROMPT, partial_images=value)
    assert caught.value.param == "partial_images"


@pytest.mark.parametrize("partial_images", [0, 3])
def test_who_stops_reading_cancels(server: RunningServer, partial_images: int) -> None:
    """Within a step, and without a word to the batch mate."""
    cancelled = outcomes(server, "cancelled")

    async def run() -> Generation:
        async with AsyncDiffusionClient(server.grpc_url) as client:
            mate = asyncio.create_task(client.generate(MODEL, PROMPT, seed=1, num_inference_steps=60))
            victim = asyncio.create_task(
                client.generate(MODEL, PROMPT, num_inference_steps=LONG, partial_images=partial_images)
            )
            await asyncio.sleep(0.4)
            victim.cancel()
            with pytest.raises(asyncio.CancelledError):
                await victim
            return await mate

    survivor = asyncio.run(run())
    triton_metrics.wait_until_idle(server.metrics_url, 10)
    assert outcomes(server, "cancelled") == cancelled + 1
    with DiffusionClient(server.grpc_url) as client:
        alone = client.generate(MODEL, PROMPT, seed=1, num_inference_steps=60)
    assert np.abs(alone.images.astype(int) - survivor.images.astype(int)).max() <= 1


def test_a_reader_who_leaves_after_the_first_preview_cancels(server: RunningServer) -> None:
    cancelled = outcomes(server, "cancelled")

    async def run() -> None:
        async with AsyncDiffusionClient(server.grpc_url) as client:
            request = client.stream(MODEL, PROMPT, num_inference_steps=LONG, partial_images=3)
            async with aclosing(request) as generations:
                async for generation in generations:
                    assert not generation.info["is_final"]
                    break

    asyncio.run(run())
    triton_metrics.wait_until_idle(server.metrics_url, 10)
    assert outcomes(server, "cancelled") == cancelled + 1


def test_a_cancel_that_comes_before_its_request(server: RunningServer) -> None:
    """Also where it came while the prompt was being encoded."""
    request_id = str(uuid.uuid4())

    async def run() -> None:
        async with AsyncDiffusionClient(server.grpc_url) as client:
            await client.cancel(MODEL, request_id)
            with pytest.raises(DiffusionError, match="cancelled") as caught:
                await client.generate(MODEL, PROMPT, request_id=request_id)
            assert caught.value.status is Status.CANCELLED

    asyncio.run(run())


def test_the_blocking_client_cancels_at_its_timeout(server: RunningServer) -> None:
    with (
        DiffusionClient(server.grpc_url) as client,
        pytest.raises(DiffusionError, match="no answer within") as caught,
    ):
        client.generate(MODEL, PROMPT, num_inference_steps=LONG, timeout=0.5)
    assert caught.value.code == "deadline_exceeded"
    triton_metrics.wait_until_idle(server.metrics_url, 10)


def test_a_timeout_is_for_the_whole_request_and_told_to_the_server(server: RunningServer) -> None:
    """Not for each answer: the previews come in time, the picture would not."""
    counted = {outcome: outcomes(server, outcome) for outcome in ("deadline", "cancelled")}
    with DiffusionClient(server.grpc_url) as client:
        started = time.monotonic()
        client.generate(MODEL, PROMPT, num_inference_steps=LONG)
        timeout = 0.7 * (time.monotonic() - started)
        shown = client.stream(MODEL, PROMPT, num_inference_steps=LONG, partial_images=3, timeout=timeout)
        assert not next(shown).info["is_final"]
        with pytest.raises(DiffusionError) as caught:
            list(shown)
    assert caught.value.code == "deadline_exceeded"
    triton_metrics.wait_until_idle(server.metrics_url, 10)
    assert sum(outcomes(server, outcome) - before for outcome, before in counted.items()) == 1


def test_the_blocking_client_streams_what_the_other_does(server: RunningServer) -> None:
    with DiffusionClient(server.grpc_url) as client:
        shown = list(client.stream(MODEL, PROMPT, seed=3, partial_images=2))
        alone = client.generate(MODEL, PROMPT, seed=3)
    assert [each.info["is_final"] for each in shown] == [False, False, True]
    assert np.array_equal(shown[-1].images, alone.images)


def test_a_deadline_ends_a_request_on_the_server(server: RunningServer) -> None:
    """Triton's own ``timeout`` of a request, which any client can set."""
    late = outcomes(server, "deadline")
    answers: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
    with triton_grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(
            MODEL,
            [bytes_input("prompt", PROMPT)],
            request_id=str(uuid.uuid4()),
            parameters={"num_inference_steps": LONG},
            timeout=400_000,
        )
        _, failure = answers.get(timeout=20)
        client.stop_stream()
    error = DiffusionError.from_text(str(failure))
    assert error is not None
    assert (error.status, error.code) == (Status.CANCELLED, "deadline_exceeded")
    assert outcomes(server, "deadline") == late + 1


def test_a_deadline_after_a_preview_leaves_nothing_behind(server: RunningServer) -> None:
    """The error comes by way of vae_decode, which may have previews to decode yet. (An error of denoise itself would
    leave a request that is never counted out: then the server would not end in order after the tests.)"""
    kinds: Counter[tuple[bool, str | None]] = Counter()
    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        full = 0.0  # seconds, without a deadline
        for share in (None, *(0.3 + 0.04 * number for number in range(12))):
            parameters = {"num_inference_steps": 60, "partial_images": 3}
            timeout = share and share * full
            started = time.monotonic()
            request = infer_request(MODEL, {"prompt": PROMPT}, str(uuid.uuid4()), parameters, timeout)
            pictures, error = 0, None
            for response in stub.ModelStreamInfer(iter([request]), timeout=60):
                pictures += bool(response.infer_response.outputs)
                if response.error_message:
                    error = DiffusionError.from_text(response.error_message)
            if share is None:
                full = time.monotonic() - started
                assert (pictures, error) == (4, None)
            else:
                kinds[pictures > 0, error and error.code] += 1
    assert kinds[True, "deadline_exceeded"] > 0
    assert all(code == "deadline_exceeded" for (_, code) in kinds if code)


def test_a_full_engine_refuses_and_recovers(server: RunningServer) -> None:
    refused = outcomes(server, "refused")

    async def run() -> list[BaseException]:
        async with AsyncDiffusionClient(server.grpc_url) as client:
            work = [
                asyncio.create_task(client.generate(MODEL, PROMPT, num_inference_steps=LONG))
                for _ in range(PLACES + 10)
            ]
            failures: list[BaseException] = []
            for answered in asyncio.as_completed(work):
                with pytest.raises(DiffusionError) as caught:
                    await answered
                failures.append(caught.value)
                if len(failures) == 10:
                    break
            for task in work:
                task.cancel()
            await asyncio.wait(work)
            return failures

    failures = asyncio.run(run())
    for failure in failures:
        assert isinstance(failure, DiffusionError)
        assert (failure.status, failure.code) == (Status.UNAVAILABLE, "queue_full")
    triton_metrics.wait_until_idle(server.metrics_url, 10)
    assert outcomes(server, "refused") == refused + len(failures)
    with DiffusionClient(server.grpc_url) as client:
        assert client.generate(MODEL, PROMPT, num_inference_steps=1).images.any()


def test_cancels_reach_the_instance_that_runs_the_request(tmp_path: Path) -> None:
    """A cancel lands on either of two instances."""
    add(str(PIPELINE), "two", tmp_path / "repository", BuildOptions(instances=2))

    async def run(url: str) -> list[float]:
        async with AsyncDiffusionClient(url) as client:
            seconds = []
            for _ in range(6):
                request = asyncio.create_task(client.generate("two", PROMPT, num_inference_steps=LONG))
                await asyncio.sleep(0.3)
                request.cancel()
                await asyncio.wait({request})
                seconds.append(
                    await asyncio.to_thread(triton_metrics.wait_until_idle, triton.metrics_url, 10)
                )
            return seconds

    with TritonServer(tmp_path / "repository", data_dir=tmp_path / "data", exit_timeout=30) as triton:
        print("seconds until the place was free:", [f"{s:.3f}" for s in asyncio.run(run(triton.grpc_url))])
        assert triton_metrics.read(triton.metrics_url, "requests_total", outcome="cancelled") == 6
        assert triton.stop(), "a request was counted as running"


def test_a_unary_model_is_cancelled_with_an_error(tmp_path: Path) -> None:
    """One response is mandatory there; and it has no previews."""
    add(str(PIPELINE), "unary", tmp_path / "repository", BuildOptions(unary=True))

    async def run(url: str) -> None:
        async with AsyncDiffusionClient(url) as client:
            request_id = str(uuid.uuid4())
            request = asyncio.create_task(
                client.generate("unary", PROMPT, num_inference_steps=LONG, request_id=request_id)
            )
            await asyncio.sleep(0.4)
            await client.cancel("unary", request_id)
            with pytest.raises(DiffusionError, match="was cancelled") as caught:
                await request
            assert caught.value.status is Status.CANCELLED
            with pytest.raises(DiffusionError, match="answers once a request") as refused:
                await client.generate("unary", PROMPT, partial_images=1)
            assert refused.value.param == "partial_images"
            description = await client.describe("unary_denoise", batched=False)
            assert description["no_previews"] == "this model answers once a request"

    with TritonServer(tmp_path / "repository", data_dir=tmp_path / "data", exit_timeout=30) as triton:
        asyncio.run(run(triton.grpc_url))


def test_describe_says_how_batches_were_checked(server: RunningServer) -> None:
    async def run() -> dict[str, Any]:
        async with AsyncDiffusionClient(server.grpc_url) as client:
            return await client.describe(f"{MODEL}_denoise", batched=False)

    batching = asyncio.run(run())["batching"]
    assert batching["enabled"]
    assert batching["joined"]
    assert 0 <= batching["difference"] < 1e-4 < batching["tolerance"]


def test_many_threads_share_one_blocking_client(server: RunningServer) -> None:
    with DiffusionClient(server.grpc_url) as client, ThreadPoolExecutor(8) as pool:
        seeds = pool.map(lambda n: client.generate(MODEL, PROMPT, seed=n).info["seed"], range(16))
        assert list(seeds) == list(range(16))


def test_a_prompt_that_comes_again_is_not_encoded_again(server: RunningServer) -> None:
    def lookups(result: str) -> float:
        return triton_metrics.read(server.metrics_url, "lookups_total", stage="encode_cache", result=result)

    with DiffusionClient(server.grpc_url) as client:
        client.generate(MODEL, "a prompt of its own", num_inference_steps=1, seed=1)
        hits, misses = lookups("hit"), lookups("miss")
        first = client.generate(MODEL, "another of its own", num_inference_steps=1, seed=1)
        assert lookups("hit") > hits, "the negative prompt was encoded again"
        assert lookups("miss") > misses
        misses = lookups("miss")
        again = client.generate(MODEL, "another of its own", num_inference_steps=1, seed=1)
        assert lookups("miss") == misses
        np.testing.assert_array_equal(first.images, again.images)
