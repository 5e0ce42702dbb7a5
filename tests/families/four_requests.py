"""Four different requests of a family, each with its own images: recorded by encode, denoised alone or together."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from diffusion_backend import conditioning, loading, seams
from diffusion_backend.conditioning import Call
from diffusion_backend.engine import Engine, Job
from diffusion_backend.engine_events import EngineEvents
from diffusion_backend.loading import Stage
from diffusion_backend.rows import Denoiser
from diffusion_backend.self_check import BatchingCheck, check_batching
from diffusion_backend.settings import Settings, resolve
from diffusion_backend.task_pipelines import pipelines_by_task
from diffusion_backend.tasks import INPAINTING
from diffusion_backend.tombstones import Tombstones

from tests.families.family import Family
from tests.families.three_stages import CPU, arguments_of, images_of, limits_of

PROMPTS = ["a red fox", "two blue birds on a branch", "a house", "a very small green frog that jumps"]


class Batches(EngineEvents):
    """The rows of every forward."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def stepped(self, rows: int, seconds: float) -> None:  # noqa: ARG002
        self.rows.append(rows)


class FourRequests:
    """Four different requests of a family, recorded by its encode stage, to be run by its denoise stage."""

    def __init__(
        self, family: Family, folder: Path, tombstones: Tombstones, dtype: torch.dtype = torch.float32
    ) -> None:
        self.name = f"{family.name}, {dtype}"
        pipeline = loading.open_pipeline(str(folder))
        self._tombstones = tombstones
        self._family, self._limits = family, limits_of(family, folder)
        encoder, self.pipe = (
            loading.load_stage(
                pipeline,
                stage,
                device=CPU,
                dtype=dtype,
                methods=seams.STAND_IN_METHODS,
                takes_image=family.takes_image,
            )[0]
            for stage in (Stage.ENCODE, Stage.DENOISE)
        )
        encoder, self.pipe = (pipelines_by_task(pipe)[family.task] for pipe in (encoder, self.pipe))
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
        return resolve(
            self._limits,
            PROMPTS[number],
            None,
            parameters,
            images=self._family.images,
            has_mask=self._family.task == INPAINTING,
        )

    def run(
        self, number: int, denoiser: Denoiser | None = None, prepare: seams.Prepare | None = None
    ) -> seams.Denoised:
        settings = self.all[number]
        arguments = arguments_of(self.pipe, self._family, self._limits, settings)
        calls: list[Call] = self._calls[number]
        return seams.replay(self.pipe, calls, arguments, settings.seed, denoiser=denoiser, prepare=prepare)

    def denoise(self, number: int, denoiser: Denoiser | None = None) -> torch.Tensor:
        return self.run(number, denoiser).latents

    def check(self) -> BatchingCheck:
        """What the denoise stage tries when it loads."""
        images = images_of(self._family, self.all[0].seed)
        sample = conditioning.Conditioning(self._calls[0], self.all[0].model_dump(), 0.0, images=images)
        return check_batching(self.pipe, self._limits, self.all[0], sample, torch.float32)

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
