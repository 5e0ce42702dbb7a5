"""What serving costs over calling the pipeline: the same pictures three ways, side by side.

bare   the diffusers pipeline, called in a process of its own
naive  a FastAPI server around that pipeline (naive_server.py), over HTTP
ours   the adapter, tritonserver and the three stages, over HTTP

Each round makes one picture in each way, in random order, so that whatever else the machine does hits all alike. One
request at a time; the HTTP client keeps its connections.
"""

from __future__ import annotations

import base64
import io
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import httpx
import measure
import numpy as np
import numpy.typing as npt
from PIL import Image

SIZE = 64
STEPS = 20
LEAST_ROUNDS = 3  # one slow shot among fewer would decide the median
WARMUP_ROUNDS = 2
# A process that has just computed spins for a moment before it sleeps: not in the next one's time.
PAUSE_SECONDS = 0.05
STAGES = ("encode", "denoise", "decode")


@dataclass(frozen=True)
class Shot:
    """One picture: its PNG file, how long it took, and what ``ours`` says of its stages."""

    milliseconds: float
    file: bytes
    stages: dict[str, float] = field(default_factory=dict)

    @property
    def pixels(self) -> npt.NDArray[np.int16]:
        return np.asarray(Image.open(io.BytesIO(self.file)).convert("RGB"), dtype=np.int16)


Contender = Callable[[int], Shot]  # from a seed


@contextmanager
def bare() -> Iterator[Contender]:
    """The pipeline in a process without HTTP; it takes the time itself."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_bare_process, args=(there,), daemon=True)
    process.start()
    there.close()

    def shoot(seed: int) -> Shot:
        here.send(seed)
        shot = here.recv()
        assert isinstance(shot, Shot)
        return shot

    try:
        yield shoot
    finally:
        here.close()  # its recv() ends
        process.join()


def _bare_process(connection: Connection) -> None:
    import diffusers
    import naive_server
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    pipe = naive_server.load()
    while True:
        try:
            seed = connection.recv()
        except EOFError:
            return
        started = time.perf_counter()
        request = naive_server.ImageRequest(
            prompt=measure.PROMPT, seed=seed, width=SIZE, height=SIZE, steps=STEPS
        )
        file = naive_server.draw(pipe, request)
        connection.send(Shot((time.perf_counter() - started) * 1000, file))


@contextmanager
def naive(client: httpx.Client) -> Iterator[Contender]:
    """naive_server.py, over HTTP."""

    def shoot(seed: int) -> Shot:
        body = {"prompt": measure.PROMPT, "seed": seed, "width": SIZE, "height": SIZE, "steps": STEPS}
        started = time.perf_counter()
        answer = client.post(url, json=body).raise_for_status().json()
        file = base64.b64decode(answer["b64_json"])
        return Shot((time.perf_counter() - started) * 1000, file)

    with measure.plain_server("naive_server.py") as url:
        yield shoot


@contextmanager
def ours(client: httpx.Client) -> Iterator[Contender]:
    """The product, over HTTP."""
    with measure.unstarted_server() as server:
        server.wait_ready(measure.START_SECONDS)
        url = f"{server.adapter.url}/v1/images/generations"

        def shoot(seed: int) -> Shot:
            body = measure.request_body(seed, size=f"{SIZE}x{SIZE}", num_inference_steps=STEPS)
            started = time.perf_counter()
            (picture,) = client.post(url, json=body).raise_for_status().json()["data"]
            file = base64.b64decode(picture["b64_json"])
            milliseconds = (time.perf_counter() - started) * 1000
            timings = picture["timings"]
            return Shot(milliseconds, file, {name: timings[f"{name}_seconds"] * 1000 for name in STAGES})

        yield shoot


def check_same_work(shots: dict[str, Shot]) -> None:
    """Exit if the pictures differ by more than a rounding step: then the times would compare nothing."""
    reference = shots["bare"].pixels
    for name, shot in shots.items():
        pixels = shot.pixels
        if pixels.shape != reference.shape or np.abs(pixels - reference).max() > 1:
            sys.exit(f"error: {name} and bare made different pictures, so their times cannot be compared")


def run(rounds: int, seconds: float) -> list[dict[str, Shot]]:
    """Rounds of one shot of each contender; fewer, but at least three, where they take more than ``seconds``."""
    order = random.Random(0)
    done = []
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=120))
        contenders = {
            "bare": stack.enter_context(bare()),
            "naive": stack.enter_context(naive(client)),
            "ours": stack.enter_context(ours(client)),
        }
        deadline = time.monotonic() + seconds
        for seed in range(WARMUP_ROUNDS + rounds):
            if seed >= WARMUP_ROUNDS + LEAST_ROUNDS and time.monotonic() > deadline:
                break
            names = list(contenders)
            order.shuffle(names)
            shots = {}
            for name in names:
                time.sleep(PAUSE_SECONDS)
                shots[name] = contenders[name](seed)
            check_same_work(shots)
            done.append({name: shots[name] for name in contenders})
    return done[WARMUP_ROUNDS:]


def main() -> None:
    """Measure and report."""
    options = measure.parse_options("What serving adds to a diffusers pipeline: bare, naive server, ours.")
    rounds = run(rounds=10, seconds=20) if options.quick else run(rounds=100, seconds=600)
    times = {name: [shots[name].milliseconds for shots in rounds] for name in rounds[0]}
    figures: dict[str, float] = {"rounds": len(rounds)}
    rows = []
    for name, values in times.items():
        middle = figures[f"{name}_ms"] = statistics.median(values)
        row: list[str | float] = [name, middle, min(values)]
        if name == "bare":
            row += ["", "", ""]
        else:
            # Each round by itself: what slows a whole round down cancels out.
            pairs = list(zip(values, times["bare"], strict=True))
            figures[f"{name}_added_ms"] = statistics.median(value - base for value, base in pairs)
            figures[f"{name}_added_of_medians_ms"] = middle - figures["bare_ms"]
            figures[f"{name}_over_bare"] = statistics.median(value / base for value, base in pairs)
            row += [figures[f"{name}_{what}"] for what in ("added_ms", "added_of_medians_ms", "over_bare")]
        rows.append(row)
    for stage in STAGES:
        figures[f"ours_{stage}_ms"] = statistics.median(shots["ours"].stages[stage] for shots in rounds)
    figures["ours_outside_stages_ms"] = statistics.median(
        shots["ours"].milliseconds - sum(shots["ours"].stages.values()) for shots in rounds
    )
    measure.report(
        f"{measure.MODEL}, {SIZE}x{SIZE}, {STEPS} steps, PNG, one request at a time, {len(rounds)} rounds",
        ["", "median ms", "best ms", "added ms", "of medians", "ratio"],
        rows,
    )
    parts = ", ".join(f"{stage} {figures[f'ours_{stage}_ms']:.1f}" for stage in STAGES)
    print(f"\nours, median ms: {parts}, outside the stages {figures['ours_outside_stages_ms']:.1f}")
    measure.write_json(options.json, figures)


if __name__ == "__main__":
    main()
