"""What one denoising step of emoji-flux is made of: the forward, the engine around it, and the pipeline's own Python.

continuous_batching.py runs this as a process with the environment of a denoise stage, so that it computes as one:

python benchmarks/step_costs.py [--quick]   # prints JSON

forward   the denoiser alone, on 1, 2, 4, 8 and 16 rows, in shuffled turns
engine    the step engine between two forwards of a denoiser that does nothing: grouping, concatenating, splitting and
          switching, for 1, 8 and 32 requests whose own code does nothing either
pipeline  what FluxPipeline itself does in a step of one request (guidance, scheduler, progress bar), and before its
          first step and after its last
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import measure
import torch
from diffusers import DiffusionPipeline
from diffusion_backend import batching, conditioning, loading, seams
from diffusion_backend.engine import Engine, Job
from diffusion_backend.engine_events import EngineEvents
from diffusion_backend.loading import Stage, quiet_libraries
from diffusion_backend.model_config import read_model_config
from diffusion_backend.rows import Denoiser, Row
from diffusion_backend.settings import check, parse_limits
from diffusion_backend.tombstones import Tombstones
from diffusion_backend.tritonserver import CHECKOUT
from torch import nn

MODELS = CHECKOUT / "model_repository"
FORWARD_ROWS = (1, 2, 4, 8, 16)
ENGINE_BATCHES = (1, 8, 32)
CALLS_PER_STEP = 2  # guidance: FluxPipeline calls its transformer for each of the two prompts


class Requests:
    """Requests as the denoise stage runs them: the model's warmup sample, with seeds of their own."""

    def __init__(self) -> None:
        self._limits = parse_limits(read_model_config(MODELS / measure.MODEL).parameters)
        sample = MODELS / f"{measure.MODEL}_denoise/warmup/64x64.conditioning"
        self._sample = conditioning.unpack(sample.read_bytes())
        self._pipe: DiffusionPipeline
        self._pipe, _ = loading.load_stage(
            loading.open_pipeline(str(MODELS / measure.MODEL / "pipeline")),
            Stage.DENOISE,
            device=torch.device("cpu"),
            dtype=torch.float32,
            methods=seams.STAND_IN_METHODS,
        )

    def denoise(self, seed: int, steps: int, denoiser: Denoiser) -> None:
        """One request's denoising, with ``denoiser`` in the model's place."""
        settings = check(self._limits, {**self._sample.settings, "seed": seed, "num_inference_steps": steps})
        arguments = seams.call_arguments(self._pipe, self._limits, settings)
        seams.replay(
            self._pipe, self._sample.calls, arguments, seed, recorded_dtype=torch.float32, denoiser=denoiser
        )

    def first_call(self, seed: int) -> batching.DenoiserCall:
        """The first call of the denoiser by the request of that seed."""
        row = Row(lambda denoiser: self.denoise(seed, 4, denoiser))
        row.start()
        assert row.call is not None
        call = row.call
        row.cancel()
        return call


class Nothing(nn.Module):
    """A denoiser that does nothing. Remembers when it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards: list[tuple[float, int]] = []  # when, and how many rows

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,  # noqa: ARG002
        pooled_projections: torch.Tensor,  # noqa: ARG002
        timestep: torch.Tensor,  # noqa: ARG002
        img_ids: torch.Tensor,  # noqa: ARG002
        txt_ids: torch.Tensor,  # noqa: ARG002
        guidance: torch.Tensor | None = None,  # noqa: ARG002
        joint_attention_kwargs: dict[str, Any] | None = None,  # noqa: ARG002
        return_dict: bool = True,  # noqa: ARG002
    ) -> tuple[torch.Tensor]:
        """The signature is that of FLUX's transformer."""
        self.forwards.append((time.perf_counter(), len(hidden_states)))
        return (hidden_states,)


def forward_ms(requests: Requests, rounds: int) -> dict[int, float]:
    """The median milliseconds of a forward by its rows."""
    calls = [requests.first_call(seed) for seed in range(max(FORWARD_ROWS))]
    joined = {rows: batching.join(calls[:rows]) for rows in FORWARD_ROWS}
    times: dict[int, list[float]] = {rows: [] for rows in FORWARD_ROWS}
    order = random.Random(0)
    for number in range(rounds + 2):
        for rows in order.sample(FORWARD_ROWS, len(FORWARD_ROWS)):
            started = time.perf_counter()
            calls[0].module(**joined[rows])
            if number >= 2:
                times[rows].append((time.perf_counter() - started) * 1000)
    return {rows: statistics.median(values) for rows, values in times.items()}


def engine_ms(batch: int, call: batching.DenoiserCall, steps: int) -> float:
    """The median milliseconds between two forwards that do nothing, of ``batch`` requests with ``call``'s tensors."""
    model = Nothing()
    ended = threading.Semaphore(0)

    def work(denoiser: Denoiser) -> None:
        # Tensors of its own for each request, as in life.
        arguments = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in call.arguments.items()
        }
        for _ in range(steps):
            denoiser(model, (), arguments)

    def end(_: object = None) -> None:
        ended.release()

    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        engine = Engine(
            max_requests=batch,
            max_batch_rows=batch,
            tombstones=Tombstones(Path(folder)),
            events=EngineEvents(),
        )
        jobs = [Job(str(number), work, end, end, end) for number in range(batch)]
        engine.run(lambda: [engine.submit(job) for job in jobs])
        for _ in jobs:
            ended.acquire()
        engine.close()
    # Of a burst only a few begin before each forward: those before all have, and after the first ends, do not count.
    full = [moment for moment, rows in model.forwards if rows == batch * call.rows]
    assert len(full) >= steps // 2, "the requests were not joined"
    gaps = [after - before for before, after in itertools.pairwise(full)]
    return statistics.median(gaps) * 1000


def pipeline_ms(requests: Requests, rounds: int) -> dict[str, float]:
    """The median milliseconds of the pipeline's own code: in a step of a request (two calls), and outside its steps."""
    in_steps, outside = [], []
    for _ in range(rounds + 2):
        times: list[float] = []

        def nothing(
            _: nn.Module, __: tuple[Any, ...], arguments: dict[str, Any], times: list[float] = times
        ) -> tuple[torch.Tensor]:
            times.append(time.perf_counter())
            return (arguments["hidden_states"],)

        started = time.perf_counter()
        requests.denoise(0, 20, nothing)
        whole = time.perf_counter() - started
        loop = times[-1] - times[0]
        in_steps.append(loop / (len(times) - 1) * CALLS_PER_STEP * 1000)
        outside.append((whole - loop) * 1000)
    return {"pipeline_ms": statistics.median(in_steps[2:]), "request_ms": statistics.median(outside[2:])}


def main() -> None:
    """Measure, and print it as JSON."""
    quiet_libraries()
    is_quick = "--quick" in sys.argv
    requests = Requests()
    with torch.no_grad():
        figures = {
            f"forward_ms_{rows}": ms for rows, ms in forward_ms(requests, 20 if is_quick else 100).items()
        }
        call = requests.first_call(0)
        for batch in ENGINE_BATCHES:
            figures[f"engine_ms_b{batch}"] = engine_ms(batch, call, 200)
    print(json.dumps({**figures, **pipeline_ms(requests, 10 if is_quick else 50)}))


if __name__ == "__main__":
    main()
