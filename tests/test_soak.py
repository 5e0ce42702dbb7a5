"""Many requests at once, a third of them cancelled, some broken, some whose client leaves: on a server of its own.

Nobody gets another's picture, every request ends, all places are free again, memory stays, and the server ends in
order. Run with -s to see the figures; the full length is marked ``long``.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from diffusion_backend import conditioning
from diffusion_backend.client import AsyncDiffusionClient, denoise_model, infer_request
from diffusion_backend.conditioning import Call, Conditioning
from diffusion_backend.errors import DiffusionError
from diffusion_backend.guard import SHARED_MEMORY, group_members
from diffusion_backend.launcher import ServeOptions, Server
from diffusion_backend.processes import free_ports
from diffusion_backend.stub_watcher import find_stubs
from diffusion_backend.tritonserver import TritonPorts
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc

from tests import triton_metrics
from tests.running_server import ROOT

MODEL = "emoji-flux"
CONCURRENT = 24
START_SECONDS = 240
STOP_SECONDS = 60
# Of the time that a request takes under this load: a cancel may come at any moment of it, and after it.
CANCEL_SECONDS = 1.5
WARMUPS = 3  # one for each task of the model
KINDS = {"finish": 45, "cancel": 17, "abandon": 16, "broken": 8, "poisoned": 4, "leave": 10}  # in percent
WORKS = [
    {"prompt": prompt, "seed": seed, "num_inference_steps": steps}
    for seed, (prompt, steps) in enumerate(
        (prompt, steps) for prompt in ("a red fox", "a blue bird on a branch") for steps in (2, 3, 5, 8)
    )
]
BROKEN: list[dict[str, Any]] = [
    {"prompt": ""},
    {"seed": -1},
    {"num_inference_steps": 100_000},
    {"width": 65},
    {"colour": "red"},
]
# What a process may grow by after its warm phase, in MiB: malloc keeps its own pace, a leak has no end.
GROWTH = 48.0


@dataclass
class Soak:
    """A server, the lone pictures to compare with, and what came of the requests."""

    server: Server
    client: AsyncDiffusionClient
    adapter: httpx.AsyncClient
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    references: list[np.ndarray[Any, Any]] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    cancel_seconds: list[float] = field(default_factory=list)

    async def prepare(self) -> None:
        """The lone pictures, all different."""
        self.references = [(await self.client.generate(MODEL, **work)).images for work in WORKS]
        assert len({picture.tobytes() for picture in self.references}) == len(WORKS)

    async def run(self, numbers: range) -> None:
        """That many requests, ``CONCURRENT`` at a time."""
        places = asyncio.Semaphore(CONCURRENT)

        async def one(kind: str) -> None:
            async with places, asyncio.timeout(120):  # a row that is lost would be waited for in vain
                self.outcomes[f"{kind}: {await getattr(self, kind)()}"] += 1

        kinds = self.draw.choices(list(KINDS), list(KINDS.values()), k=len(numbers))
        await asyncio.gather(*map(one, kinds))

    def check(self, number: int, pixels: np.ndarray[Any, Any]) -> str:
        """The picture is the lone one: a batch rounds differently, by one level at most."""
        difference = np.abs(pixels.astype(int) - self.references[number].astype(int)).max()
        assert difference <= 1, f"request {WORKS[number]} got a picture that differs by {difference}"
        return "a picture"

    async def finish(self) -> str:
        number = self.draw.randrange(len(WORKS))
        return self.check(number, (await self.client.generate(MODEL, **WORKS[number])).images)

    async def abandon(self) -> str:
        """Whoever waits is cancelled: the client cancels the request."""
        task = asyncio.create_task(self.finish())
        await asyncio.wait({task}, timeout=self.draw.uniform(0, CANCEL_SECONDS))
        task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            return "cancelled"

    async def cancel(self) -> str:
        """A control message on the generation's own stream; and how long it takes until the stream says the end."""
        number = self.draw.randrange(len(WORKS))
        work = {name: value for name, value in WORKS[number].items() if name != "prompt"}
        name = f"soak-{self.draw.getrandbits(64):x}"
        request = infer_request(MODEL, {"prompt": str(WORKS[number]["prompt"])}, name, work)
        end = asyncio.Event()
        sent: list[float] = []

        async def requests() -> AsyncIterator[service_pb2.ModelInferRequest]:
            yield request
            try:
                await asyncio.wait_for(end.wait(), self.draw.uniform(0, CANCEL_SECONDS))
            except TimeoutError:
                sent.append(time.perf_counter())
                yield infer_request(denoise_model(MODEL), {"cancel": name}, f"cancel-{name}")
                await end.wait()

        outcome = "an empty end"
        async with grpc.aio.insecure_channel(self.client.url) as channel:
            async for response in service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(
                requests()
            ):
                answer = response.infer_response
                if response.error_message:
                    outcome = str(DiffusionError.from_text(response.error_message))
                    end.set()
                elif answer.id == name:
                    if answer.outputs:
                        pixels = InferResult(answer).as_numpy("images")
                        outcome = self.check(number, pixels) if pixels.size else "an empty picture"
                    if answer.parameters["triton_final_response"].bool_param:
                        end.set()
                        if sent and outcome == "an empty end":
                            self.cancel_seconds.append(time.perf_counter() - sent[0])
        return outcome

    async def broken(self) -> str:
        """Refused by the encode stage."""
        with pytest.raises(DiffusionError) as caught:
            await self.client.generate(MODEL, **{**WORKS[0], **self.draw.choice(BROKEN)})
        assert caught.value.param is not None
        return "refused"

    async def poisoned(self) -> str:
        """Fails in the denoise stage, after some steps beside others: embeddings that are not finite."""
        path = ROOT / f"model_repository/{MODEL}_denoise/warmup/64x64.conditioning"
        sample = conditioning.unpack(path.read_bytes())
        embeddings, pooled, ids = sample.calls[0].result
        calls = [Call("encode_prompt", (embeddings * float("nan"), pooled, ids)), *sample.calls[1:]]
        blob = conditioning.pack(Conditioning(calls, {**sample.settings, "num_inference_steps": 3}, 0.0))
        request = service_pb2.ModelInferRequest(model_name=denoise_model(MODEL))
        request.id = f"soak-{self.draw.getrandbits(64):x}"
        request.inputs.add(name="conditioning", datatype="UINT8", shape=[len(blob)])
        request.raw_input_contents.append(blob)
        async with grpc.aio.insecure_channel(self.client.url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            (answer,) = [each async for each in stub.ModelStreamInfer(iter([request]))]
        error = DiffusionError.from_text(answer.error_message)
        assert error is not None
        assert error.code == "non_finite_latents"
        return "failed"

    async def leave(self) -> str:
        """A client of the OpenAI API closes its connection."""
        body = {"model": MODEL, "size": "64x64", **self.draw.choice(WORKS)}
        try:
            answer = await self.adapter.post(
                "/v1/images/generations", json=body, timeout=self.draw.uniform(0.01, CANCEL_SECONDS)
            )
        except httpx.TimeoutException:
            return "left"
        return f"status {answer.status_code}"

    def metric(self, name: str, **labels: str) -> float:
        return triton_metrics.read(self.server.triton.metrics_url, name, **labels)

    def wait_until_idle(self) -> None:
        """What was cancelled ends within a step; a row that is lost never does."""
        triton_metrics.wait_until_idle(self.server.triton.metrics_url, 10)

    def memory(self) -> dict[str, float]:
        """The resident MiB of every process of the server."""
        triton = self.server.triton.process.pid
        processes = {"tritonserver": triton, "adapter": self.server.adapter.process.pid}
        processes |= {stub.model: pid for pid, stub in find_stubs(triton).items()}
        return {name: _resident(pid) for name, pid in processes.items()}


def _resident(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def start(repository: Path, folder: Path) -> Iterator[Server]:
    """A server; it is left to the test to stop it in order."""
    http, grpc_port, metrics, port = free_ports(4)
    server = Server(
        ServeOptions(
            repository=repository,
            data_dir=folder,
            host="127.0.0.1",
            port=port,
            triton_ports=TritonPorts(http=http, grpc=grpc_port, metrics=metrics),
            exit_timeout=STOP_SECONDS,
        )
    )
    try:
        server.start()
        server.wait_ready(START_SECONDS)
        yield server
    finally:
        server.stop()


def assert_clean_end(server: Server) -> None:
    """tritonserver ends by itself at a SIGTERM, and takes its stubs and its shared memory with it."""
    triton = server.triton
    assert server.adapter.stop()
    assert list(SHARED_MEMORY.glob(f"{triton.regions}*"))
    os.kill(triton.process.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while triton.process.poll() is None:
        assert time.monotonic() < deadline, "it does not end"
        time.sleep(0.05)
    assert triton.process.poll() == 0, triton.process.obituary()
    assert group_members(triton.process.pid) == []
    assert list(SHARED_MEMORY.glob(f"{triton.regions}*")) == []


async def soak(server: Server, count: int) -> None:
    warm = count // 4
    adapter = httpx.AsyncClient(base_url=server.adapter.url)
    async with AsyncDiffusionClient(server.triton.grpc_url) as client, adapter:
        run = Soak(server, client, adapter)
        await run.prepare()
        await run.run(range(warm))
        run.wait_until_idle()
        before = run.memory()
        await run.run(range(warm, count))
        run.wait_until_idle()
    after = run.memory()
    for line in sorted(f"{what}: {times}" for what, times in run.outcomes.items()):
        print(line)
    for name, size in after.items():
        print(f"{name}: {before[name]:.0f} MiB after {warm} requests, {size:.0f} MiB after {count}")
    print_cancels(run)
    assert_adds_up(run, count)
    growth = {name: round(size - before[name]) for name, size in after.items()}
    assert {name: mib for name, mib in growth.items() if mib > GROWTH} == {}


def print_cancels(run: Soak) -> None:
    """From the cancel's leaving the client until the stream's end is back there, in steps of that load."""
    step = run.metric("step_seconds_sum") / run.metric("step_seconds_count")
    steps = [seconds / step for seconds in run.cancel_seconds]
    assert steps, "no cancel came in time"
    print(
        f"cancel to the stream's end, {len(steps)} cancels: median {statistics.median(steps):.2f} steps, "
        f"worst {max(steps):.2f}, of {step * 1000:.1f} ms"
    )


def assert_adds_up(run: Soak, count: int) -> None:
    """Every request has ended once, and as its client has seen it."""
    outcomes = {
        name: run.metric("requests_total", outcome=name)
        for name in ("succeeded", "failed", "cancelled", "deadline", "refused")
    }
    print("the denoise stage:", {name: int(value) for name, value in outcomes.items()})
    assert run.outcomes.total() == count
    kinds: Counter[str] = Counter()
    endings: Counter[str] = Counter()
    for what, times in run.outcomes.items():
        kind, _, ending = what.partition(": ")
        kinds[kind] += times
        endings[ending] += times
    assert outcomes["failed"] == kinds["poisoned"]
    assert outcomes["deadline"] == outcomes["refused"] == 0
    assert endings["an empty end"] <= outcomes["cancelled"]
    # Besides, there were the references and the warmup's. A request that was cancelled early did not come so far.
    assert outcomes["succeeded"] >= len(WORKS) + WARMUPS + endings["a picture"] + endings["status 200"]
    sent = len(WORKS) + WARMUPS + count - kinds["broken"]
    assert sent - kinds["cancel"] - kinds["abandon"] - kinds["leave"] <= sum(outcomes.values()) <= sent
    assert run.metric("running_rows") == run.metric("waiting_rows") == 0


@pytest.mark.parametrize(
    "count", [100, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
def test_soak(model_repository: Path, tmp_path: Path, count: int) -> None:
    with start(model_repository, tmp_path / "data") as server:
        asyncio.run(soak(server, count))
        assert_clean_end(server)
