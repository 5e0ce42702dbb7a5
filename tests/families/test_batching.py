"""Every family through the step engine: four different requests that arrive at different steps, each against itself
alone. Run with -s to see each family's largest difference and the batches that it ran in."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_backend import conditioning, loading, seams
from diffusion_backend.conditioning import Call
from diffusion_backend.engine import Engine, Job
from diffusion_backend.engine_events import EngineEvents
from diffusion_backend.loading import Stage
from diffusion_backend.rows import Denoiser
from diffusion_backend.self_check import check_batching
from diffusion_backend.settings import Settings, resolve
from diffusion_backend.tombstones import Tombstones

from tests.families.catalogue import FAMILIES
from tests.families.family import Family
from tests.families.three_stages import CPU, arguments_of, limits_of

# float32 rounds differently in a batch, and each step carries that on. The second one is for the random weights of a
# family (PixArt) whose latents grow into the thousands, where two neighbouring float32 are 1.2e-4 apart.
TOLERANCE = 1e-4
RELATIVE_TOLERANCE = 1e-6
PROMPTS = ["a red fox", "two blue birds on a branch", "a house", "a very small green frog that jumps"]


class Batches(EngineEvents):
    """The rows of every forward."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def stepped(self, rows: int, seconds: float) -> None:  # noqa: ARG002
        self.rows.append(rows)


class Requests:
    """Four different requests of a family, recorded by its encode stage, to be run by its denoise stage."""

    def __init__(self, family: Family, folder: Path, tombstones: Tombstones) -> None:
        pipeline = loading.open_pipeline(str(folder))
        self._tombstones = tombstones
        self._family, self._limits = family, limits_of(family, folder)
        encoder, self._denoiser = (
            loading.load_stage(
                pipeline,
                stage,
                device=CPU,
                dtype=torch.float32,
                methods=seams.STAND_IN_METHODS,
                takes_image=family.takes_image,
            )[0]
            for stage in (Stage.ENCODE, Stage.DENOISE)
        )
        self.all = [self._settings(number) for number in range(len(PROMPTS))]
        self._calls = [
            seams.record(encoder, arguments_of(encoder, family, self._limits, settings))
            for settings in self.all
        ]

    def _settings(self, number: int) -> Settings:
        steps = self._limits.default_num_inference_steps + number
        scale = self._limits.default_guidance_scale
        parameters: dict[str, Any] = {"seed": number, "num_inference_steps": steps}
        if scale is not None:
            # Not down to 1, where guidance is off and the pipeline makes other calls.
            parameters["guidance_scale"] = scale + number
        return resolve(self._limits, PROMPTS[number], None, parameters)

    def denoise(self, number: int, denoiser: Denoiser | None = None) -> torch.Tensor:
        settings = self.all[number]
        arguments = arguments_of(self._denoiser, self._family, self._limits, settings)
        calls: list[Call] = self._calls[number]
        return seams.replay(self._denoiser, calls, arguments, settings.seed, denoiser=denoiser).latents

    def denoise_together(self) -> tuple[list[torch.Tensor], list[int]]:
        """All of them in one engine; each arrives when the one before it has done a step. And the forwards' rows."""
        batches = Batches()
        results: list[Future[torch.Tensor]] = [Future() for _ in self.all]

        def submit(number: int) -> None:
            def work(denoiser: Denoiser) -> torch.Tensor:
                calls = 0

                def counting(*call: Any) -> Any:
                    nonlocal calls
                    calls += 1
                    if calls == 2 and number + 1 < len(self.all):
                        submit(number + 1)
                    return denoiser(*call)

                return self.denoise(number, counting)

            future = results[number]
            engine.submit(
                Job(
                    str(number),
                    work,
                    future.set_result,
                    future.set_exception,
                    lambda: future.cancel() and None,
                )
            )

        engine = Engine(max_requests=8, max_batch_rows=64, tombstones=self._tombstones, events=batches)
        submit(0)
        latents = [future.result(60) for future in results]
        engine.close()
        return latents, batches.rows


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_rows_of_a_batch_are_what_they_are_alone(
    family: Family, saved: Callable[[Family], Path], tmp_path: Path
) -> None:
    requests = Requests(family, saved(family), Tombstones(tmp_path))
    alone = [requests.denoise(number) for number in range(len(PROMPTS))]
    together, batches = requests.denoise_together()
    difference = max((one - other).abs().max().item() for one, other in zip(alone, together, strict=True))
    largest = max(one.abs().max().item() for one in alone)
    print(f"{family.name}: {difference:.1e} of {largest:.1e}, forwards of {batches} rows")
    assert difference <= max(TOLERANCE, RELATIVE_TOLERANCE * largest)
    assert max(batches) > batches[0], "nothing was joined"
    for one, other in itertools.combinations(alone, 2):
        assert one.shape != other.shape or not torch.allclose(one, other, atol=0.01), "they must differ"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_check_at_load_passes(family: Family, saved: Callable[[Family], Path]) -> None:
    folder = saved(family)
    limits = limits_of(family, folder)
    pipeline = loading.open_pipeline(str(folder))
    settings = resolve(limits, PROMPTS[0], None, {"seed": 0})
    encoder = loading.load_dry(pipeline, Stage.ENCODE, methods=seams.STAND_IN_METHODS)
    calls = seams.record(encoder, arguments_of(encoder, family, limits, settings))
    denoiser, _ = loading.load_stage(
        pipeline, Stage.DENOISE, device=CPU, dtype=torch.float32, methods=seams.STAND_IN_METHODS
    )
    sample = conditioning.Conditioning(calls, settings.model_dump(), 0.0)
    image = arguments_of(denoiser, family, limits, settings).get("image")
    check = check_batching(denoiser, limits, settings, sample, torch.float32)
    print(family.name, check, image)
    assert check.joined
    assert check.passed
