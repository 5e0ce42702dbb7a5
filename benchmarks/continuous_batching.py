"""Many requests at once, of 4, 12 and 28 steps, four ways, side by side.

naive   one picture at a time: FastAPI around diffusers, behind a lock (naive_server.py)
cap1    ours with max_batch_rows 1: requests take turns at every step
static  whole requests batched: one pipeline call for all that wait, of the largest number of steps (static_server.py)
ours    continuous batching

All four run all the time and take turns, so that whatever else the machine does hits all alike; one that has nothing
to do takes no time. Each gets the same requests at the same times (Poisson arrivals), over HTTP, and all four compute
with the threads and the settings of a denoise stage. Latencies count from the planned arrival.

The forward by itself is measured as well: how much faster a batch of the rows that ours really ran is than as many
forwards of one row is the limit of what batching can give ours over cap1.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import measure
import numpy as np
from diffusion_backend import malloc
from diffusion_backend.launcher import Server
from diffusion_backend.stages.common import tune_process
from diffusion_backend.stub_watcher import find_stubs
from diffusion_backend.tritonserver import CHECKOUT
from PIL import Image

STEPS = (4, 12, 28)
SHORT = min(STEPS)
CAP = 16  # max_batch_rows of the model, and of static
FORWARD_ROWS = (1, 2, 4, 8, 16)  # that step_costs.py measures
LOADS = {"above": 2.0, "at": 1.0, "light": 0.1}  # arrivals, in units of what ours can do
CAPACITY_BURSTS = 3
CONTENDERS = ("naive", "cap1", "static", "ours")


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    requests: dict[str, int]  # a round, by load
    rounds: dict[str, int]  # short ones at light load, where p50 is compared within 5 %

    @classmethod
    def of(cls, *, is_quick: bool) -> Plan:
        if is_quick:
            return cls({"above": 12, "at": 12, "light": 3}, {"above": 1, "at": 1, "light": 2})
        return cls({"above": 64, "at": 64, "light": 16}, {"above": 2, "at": 1, "light": 4})

    def totals(self) -> dict[str, int]:
        """All requests of a load."""
        return {load: count * self.rounds[load] for load, count in self.requests.items()}


@dataclass(frozen=True)
class Order:
    """One request, and when it is sent."""

    at: float
    steps: int
    seed: int


@dataclass
class Result:
    """What came of a load: latencies in milliseconds, and seconds from the first arrival to the last answer."""

    seconds: float = 0.0
    all: list[float] = field(default_factory=list)
    short: list[float] = field(default_factory=list)

    @property
    def images_per_second(self) -> float:
        return len(self.all) / self.seconds

    def add(self, orders: list[Order], latencies: list[float]) -> None:
        """One round more."""
        ends = [order.at + latency / 1000 for order, latency in zip(orders, latencies, strict=True)]
        self.seconds += max(ends) - orders[0].at
        self.all += latencies
        self.short += [
            latency for order, latency in zip(orders, latencies, strict=True) if order.steps == SHORT
        ]

    def figures(self) -> dict[str, float]:
        return {
            "images_per_second": self.images_per_second,
            "p50_ms": statistics.median(self.all),
            "p99_ms": percentile(self.all, 99),
            "p50_4step_ms": statistics.median(self.short),
            "p99_4step_ms": percentile(self.short, 99),
        }


@dataclass(frozen=True)
class Contender:
    """A server's route, and the body of its request for a picture."""

    url: str
    body: Callable[[Order], Mapping[str, object]]
    file: Callable[[dict[str, object]], str]


@dataclass(frozen=True)
class Work:
    """What a server of ours has done so far: the engine's forwards, and the seconds that its processes computed."""

    forwards: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0
    cpu: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, server: Server) -> Work:
        with urllib.request.urlopen(server.triton.metrics_url, timeout=10) as answer:
            text = answer.read().decode()

        def read(name: str) -> float:
            series = re.findall(rf"^diffusion_denoise_{name}{{.*}} (\S+)$", text, re.MULTILINE)
            return sum(map(float, series))

        processes = {stub.model: pid for pid, stub in find_stubs(server.triton.process.pid).items()}
        return cls(
            read("batch_size_count"),
            read("batch_size_sum"),
            read("step_seconds_sum"),
            {name.removeprefix(f"{measure.MODEL}_"): cpu_seconds(pid) for name, pid in processes.items()},
        )

    def __sub__(self, before: Work) -> Work:
        return Work(
            self.forwards - before.forwards,
            self.rows - before.rows,
            self.seconds - before.seconds,
            {name: seconds - before.cpu[name] for name, seconds in self.cpu.items()},
        )

    def __add__(self, other: Work) -> Work:
        return Work(
            self.forwards + other.forwards,
            self.rows + other.rows,
            self.seconds + other.seconds,
            {name: seconds + self.cpu.get(name, 0.0) for name, seconds in other.cpu.items()},
        )


def cpu_seconds(pid: int) -> float:
    """What a process has computed, on all cores."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentile(values: list[float], percent: float) -> float:
    """Of few values the 99th percentile is nearly the largest one."""
    return float(np.percentile(values, percent))


def plain(url: str) -> Contender:
    """One of the servers to compare with."""
    return Contender(
        url,
        lambda order: {"prompt": measure.PROMPT, "seed": order.seed, "steps": order.steps},
        lambda answer: str(answer["b64_json"]),
    )


def product(server: Server) -> Contender:
    """The adapter of ours."""
    return Contender(
        f"{server.adapter.url}/v1/images/generations",
        lambda order: measure.request_body(order.seed, size="64x64", num_inference_steps=order.steps),
        lambda answer: str(answer["data"][0]["b64_json"]),  # type: ignore[index]
    )


@contextmanager
def repository_with_cap_1() -> Iterator[Path]:
    """A copy of the model whose engine makes no batches."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        for model in (CHECKOUT / "model_repository").glob(f"{measure.MODEL}*"):
            shutil.copytree(model, Path(folder) / model.name, ignore=shutil.ignore_patterns("training"))
        config = Path(folder) / f"{measure.MODEL}_denoise/config.pbtxt"
        cap = 'parameters { key: "max_batch_rows" value: { string_value: "%d" } }'
        text = config.read_text()
        if cap % CAP not in text:
            sys.exit(f"error: {config.parent.name} has another max_batch_rows than {CAP}")
        config.write_text(text.replace(cap % CAP, cap % 1))
        yield Path(folder)


def stage_environment(server: Server) -> dict[str, str]:
    """The environment in which the denoise stage computes, with what it sets in its own process."""
    stubs = find_stubs(server.triton.process.pid).items()
    pid = next(pid for pid, stub in stubs if stub.model == f"{measure.MODEL}_denoise")
    text = Path(f"/proc/{pid}/environ").read_bytes().decode()
    return malloc.environment() | dict(line.split("=", 1) for line in text.split("\0") if "=" in line)


def make_orders(count: int, rate: float, seed: int) -> list[Order]:
    """Poisson arrivals, the first one at once; each number of steps as often, in random order."""
    draw = random.Random(seed)
    steps = [STEPS[number % len(STEPS)] for number in range(count)]
    draw.shuffle(steps)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + draw.expovariate(rate))
    return [Order(at, each, number) for number, (at, each) in enumerate(zip(times, steps, strict=True))]


async def send(contender: Contender, orders: list[Order]) -> list[float]:
    """Send each at its time; the latencies in milliseconds."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        started = time.perf_counter()

        async def one(order: Order) -> float:
            await asyncio.sleep(started + order.at - time.perf_counter())
            (await client.post(contender.url, json=contender.body(order))).raise_for_status()
            return (time.perf_counter() - started - order.at) * 1000

        return await asyncio.gather(*map(one, orders))


def burst(contender: Contender, count: int) -> float:
    """Images per second when all requests come at once."""
    result = Result()
    orders = [Order(0.0, order.steps, order.seed) for order in make_orders(count, 1.0, seed=0)]
    result.add(orders, asyncio.run(send(contender, orders)))
    return result.images_per_second


def check_same_work(contenders: dict[str, Contender]) -> None:
    """Exit if a lone request's pictures differ by more than a rounding step. Warms all of them up, too."""
    order = Order(0.0, 4, 0)
    pictures = {}
    for name, each in contenders.items():
        answer = httpx.post(each.url, json=each.body(order), timeout=120).raise_for_status().json()
        image = Image.open(io.BytesIO(base64.b64decode(each.file(answer)))).convert("RGB")
        pictures[name] = np.asarray(image, dtype=np.int16)
        if np.abs(pictures[name] - pictures["naive"]).max() > 1:
            sys.exit(f"error: {name} and naive made different pictures, so their times cannot be compared")


def run(
    plan: Plan, contenders: dict[str, Contender], servers: dict[str, Server]
) -> tuple[dict[str, Result], dict[str, Work], float]:
    """Every load on every contender: the results by load and contender, our servers' work, and the capacity."""
    shuffle = random.Random(0)
    # The best of a few: what else the machine does only makes it less, and then no load would be above it.
    capacity = max(burst(contenders["ours"], plan.requests["above"]) for _ in range(CAPACITY_BURSTS))
    results: dict[str, Result] = {}
    works: dict[str, Work] = {}
    for load, factor in LOADS.items():
        for number in range(plan.rounds[load]):
            orders = make_orders(plan.requests[load], factor * capacity, seed=number + 1)
            for name in shuffle.sample(CONTENDERS, len(CONTENDERS)):
                before = Work.of(servers[name]) if name in servers else Work()
                latencies = asyncio.run(send(contenders[name], orders))
                results.setdefault(f"{load}_{name}", Result()).add(orders, latencies)
                if name in servers:
                    done = Work.of(servers[name]) - before
                    works[f"{load}_{name}"] = works.get(f"{load}_{name}", Work()) + done
                result = results[f"{load}_{name}"]
                print(
                    f"{load} {name}, round {number + 1} of {plan.rounds[load]}: so far "
                    f"{result.images_per_second:.2f} images/s, p50 {statistics.median(result.all):.0f} ms",
                    file=sys.stderr,
                )
    return results, works, capacity


def batch_limit(costs: dict[str, float], ran: Work) -> float:
    """What batching can give: the time of ``ran``'s rows in forwards of one, over that in the forwards that they had.

    A forward's time is nearly a straight line over its rows, so the number of forwards and their rows are enough.
    """
    slope, base = np.polyfit(FORWARD_ROWS, [costs[f"forward_ms_{rows}"] for rows in FORWARD_ROWS], 1)
    return float(costs["forward_ms_1"] * ran.rows / (base * ran.forwards + slope * ran.rows))


def measure_all(plan: Plan, *, is_quick: bool) -> dict[str, float]:
    """Start everything, and measure; the figures."""
    with ExitStack() as stack:
        cap1 = stack.enter_context(measure.unstarted_server(stack.enter_context(repository_with_cap_1())))
        ours = stack.enter_context(measure.unstarted_server())
        servers = {"cap1": cap1, "ours": ours}
        for server in servers.values():
            server.wait_ready(measure.START_SECONDS)
        environment = stage_environment(ours)
        naive = measure.plain_server("naive_server.py", environment=environment)
        static = measure.plain_server("static_server.py", str(CAP), environment=environment)
        contenders = {
            "naive": plain(stack.enter_context(naive)),
            "cap1": product(cap1),
            "static": plain(stack.enter_context(static)),
            "ours": product(ours),
        }
        check_same_work(contenders)
        costs = step_costs(environment, is_quick=is_quick)
        results, works, capacity = run(plan, contenders, servers)
    ran = works["above_ours"]
    limit = batch_limit(costs, ran)
    figures = {
        f"{name}_{what}": value
        for name, result in results.items()
        for what, value in result.figures().items()
    }
    for name in servers:
        images = len(results[f"above_{name}"].all)
        for stage, seconds in works[f"above_{name}"].cpu.items():
            figures[f"above_{name}_{stage}_cpu_ms"] = seconds / images * 1000
    gain = figures["above_ours_images_per_second"] / figures["above_cap1_images_per_second"]
    return {
        "throughput_vs_cap1": gain,
        "batch_limit": limit,
        "share_of_batch_limit": gain / limit,
        "p99_4step_vs_static": figures["above_static_p99_4step_ms"] / figures["above_ours_p99_4step_ms"],
        "p50_light_vs_cap1": figures["light_ours_p50_ms"] / figures["light_cap1_p50_ms"],
        "capacity_images_per_second": capacity,
        "rows_per_forward": ran.rows / ran.forwards,
        "ms_per_engine_step": ran.seconds / ran.forwards * 1000,
        "engine_busy_share": ran.seconds / results["above_ours"].seconds,
        **costs,
        **figures,
    }


def step_costs(environment: dict[str, str], *, is_quick: bool) -> dict[str, float]:
    """step_costs.py's figures, computed as a denoise stage computes."""
    command = [sys.executable, str(Path(__file__).with_name("step_costs.py")), *["--quick"] * is_quick]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: step_costs.py failed:\n{done.stderr}")
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def report(figures: dict[str, float], plan: Plan) -> None:
    """Print tables."""
    columns = ("images_per_second", "p50_ms", "p99_ms", "p50_4step_ms", "p99_4step_ms")
    measure.report(
        f"{measure.MODEL}, 64x64, {'/'.join(map(str, STEPS))} steps mixed, PNG over HTTP; requests: "
        + ", ".join(f"{load} {count}" for load, count in plan.totals().items()),
        ["load", "images/s", "p50 ms", "p99 ms", "4-step p50", "4-step p99"],
        [
            [f"{load} {name}", *(figures[f"{load}_{name}_{column}"] for column in columns)]
            for load in LOADS
            for name in CONTENDERS
        ],
    )
    rates = ", ".join(f"{load} {factor:g}x" for load, factor in LOADS.items())
    print(
        f"\narrivals in units of ours' capacity ({figures['capacity_images_per_second']:.2f} images/s): {rates}\n"
        f"above capacity: {figures['throughput_vs_cap1']:.2f} times cap1's images/s, "
        f"{figures['share_of_batch_limit']:.0%} of the {figures['batch_limit']:.2f} that forwards of "
        f"{figures['rows_per_forward']:.1f} rows allow; the engine was busy for "
        f"{figures['engine_busy_share']:.0%} of the time, {figures['ms_per_engine_step']:.1f} ms a forward\n"
        f"p99 of the 4-step requests, static over ours: {figures['p99_4step_vs_static']:.2f}\n"
        f"p50 at light load, ours over cap1: {figures['p50_light_vs_cap1']:.3f}"
    )
    for name in ("cap1", "ours"):
        stages = ", ".join(
            f"{stage} {figures[f'above_{name}_{stage}_cpu_ms']:.0f}"
            for stage in ("encode", "denoise", "vae_decode")
        )
        print(f"CPU ms an image of {name}, above capacity: {stages}")
    forwards = ", ".join(f"{rows}: {figures[f'forward_ms_{rows}']:.1f}" for rows in FORWARD_ROWS)
    engine = ", ".join(f"{batch}: {figures[f'engine_ms_b{batch}']:.2f}" for batch in (1, 8, 32))
    print(
        f"\nms of a forward by its rows: {forwards}\n"
        f"ms of the engine between two forwards, by requests: {engine}\n"
        f"ms of the pipeline itself: {figures['pipeline_ms']:.3f} a step of a request, "
        f"{figures['request_ms']:.1f} a request outside its steps"
    )


def main() -> None:
    """Measure and report."""
    options = measure.parse_options("Many requests at once: naive server, cap 1, static batching, ours.")
    tune_process()  # the environment of all servers here
    plan = Plan.of(is_quick=options.quick)
    figures = measure_all(plan, is_quick=options.quick)
    report(figures, plan)
    measure.write_json(options.json, figures)


if __name__ == "__main__":
    main()
