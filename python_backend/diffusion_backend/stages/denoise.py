"""The denoise stage: ``conditioning`` in, ``latents`` and slim ``settings`` out, by way of the step engine."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from diffusion_backend.errors import DiffusionError, invalid
from diffusion_backend.settings import (
    NO_PICTURES,
    Settings,
    check,
    check_previews,
    check_progress,
    check_trajectory,
)
from diffusion_backend.stages import common
from diffusion_backend.stages.decode_settings import DecodeSettings
from diffusion_backend.tasks import steps_run

logger = logging.getLogger("diffusion_backend")

ANSWERS_ONCE = "this model answers once a request"


@dataclasses.dataclass(frozen=True)
class Made:
    """Latents, float32 on the CPU without a row axis (None: none yet), and DecodeSettings as JSON.

    ``overlay`` are the pixels that stay (``seams.overlay_of``), with the latents of a request with a mask.
    """

    latents: Any
    settings: str
    overlay: np.ndarray[Any, Any] | None = None


class TritonPythonModel:
    """Admits requests and answers them. The engine's thread does the work; ``execute`` never waits for it."""

    def initialize(self, args: dict[str, str]) -> None:
        common.prepare_process()
        from diffusion_backend import conditioning, engine, previews, progress, seams, task_pipelines
        from diffusion_backend.loading import Stage
        from diffusion_backend.loras import LoraSwitch
        from diffusion_backend.stages.metrics import DenoiseMetrics
        from diffusion_backend.tombstones import Tombstones

        self._conditioning, self._seams, self._previews = conditioning, seams, previews
        self._job, self._progress = engine.Job, progress.Progress
        self._config = common.start_stage(args)
        common.check_warmup(args, self._check_sample)
        self._is_decoupled = json.loads(args["model_config"])["model_transaction_policy"]["decoupled"]
        self._tombstones = Tombstones()
        self._engine = engine.Engine(
            max_requests=self._config.integer("max_queued_requests", at_least=1),
            max_batch_rows=self._config.number("max_batch_rows", at_least=0),
            tombstones=self._tombstones,
            events=DenoiseMetrics(self._config.model, self._config.instance),
        )
        self._pipe, description = self._engine.run(lambda: common.load(self._config, Stage.DENOISE))
        self._pipes = task_pipelines.pipelines_by_task(self._pipe)
        self._loras = self._engine.run(lambda: LoraSwitch(self._pipe, Stage.DENOISE, self._config.loras))
        batching = self._engine.run(lambda: self._check_batching(Path(args["model_repository"])))
        self._no_progress = None if self._is_decoupled else ANSWERS_ONCE
        self._no_trajectory = self._find_no_trajectory()
        self._no_previews = self._no_trajectory or self._find_no_previews()
        self._description = json.dumps(
            {
                **json.loads(description),
                "batching": batching,
                "no_previews": self._no_previews,
                "no_trajectory": self._no_trajectory,
                "no_progress": self._no_progress,
            }
        )

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._admit(request)

    def finalize(self) -> None:
        self._engine.close()

    def _check_sample(self, files: dict[str, bytes]) -> None:
        sample = self._conditioning.unpack(files["conditioning"])
        self._seams.check_images(
            self._config.limits, check(self._config.limits, sample.settings), sample.images
        )

    def _check_batching(self, model: Path) -> dict[str, Any]:
        """Try whether rows of a batch are what they are alone; if not, the engine makes no batches."""
        from diffusion_backend.self_check import check_batching

        sample = self._conditioning.unpack((model / self._config.parameter("self_check")).read_bytes())
        settings = check(self._config.limits, sample.settings)
        dtype = common.parse_dtype(sample.dtype)
        result = check_batching(self._pipe, self._config.limits, settings, sample, dtype)
        if not result.passed:
            self._engine.never_batch()
            reason = f"they differ by {result.difference:g}" if result.joined else "they were never joined"
            logger.warning("rows cannot share a batch (%s): requests are denoised one by one", reason)
        return {
            "enabled": result.passed,
            "difference": result.difference if math.isfinite(result.difference) else None,
            "tolerance": result.tolerance,
            "joined": result.joined,
        }

    def _admit(self, request: Any) -> None:
        answer = _Answer(request.get_response_sender(), is_decoupled=self._is_decoupled)
        try:
            answer.request_id = common.read_request_id(request)
            if common.asks_to_describe(request):
                # At once, whatever the engine does: who asks wants to know whether this process lives.
                if not self._engine.is_alive:
                    raise DiffusionError("the step engine has died", code="internal_error")
                answer.describe(common.description_response(self._description, (1,)))
            elif (cancelled := common.text_input(request, "cancel")) is not None:
                if not cancelled:
                    raise invalid("cancel", "'cancel' is empty; allowed: the id of a request")
                self._tombstones.add(cancelled)
                if self._is_decoupled:
                    answer.end()
                else:
                    answer.describe(common.description_response(json.dumps({"cancelled": cancelled}), (1,)))
            else:
                self._submit(request, answer)
        except Exception as error:
            answer.fail(error)

    def _submit(self, request: Any, answer: _Answer) -> None:
        # The copy matters: the input's memory is Triton's again once execute returns.
        conditioning = self._conditioning.unpack(common.array_input(request, "conditioning").tobytes())
        settings = check(self._config.limits, conditioning.settings)
        check_previews(settings.partial_images, self._no_previews)
        check_trajectory(settings.trajectory, self._no_trajectory)
        check_progress(settings.progress, self._no_progress)
        self._seams.check_images(self._config.limits, settings, conditioning.images)
        if conditioning.rows > 1 and answer.request_id:
            raise invalid(
                "conditioning",
                f"'conditioning' has {conditioning.rows} rows; allowed: 1, but in a warmup sample",
            )
        limits = self._config.limits
        size = settings.width * settings.height / (limits.default_width * limits.default_height)
        if settings.num_frames and limits.default_num_frames:
            size *= settings.num_frames / limits.default_num_frames
        timeout = request.timeout()
        request_id = answer.request_id or str(uuid.uuid4())
        answer.wait_for(conditioning.rows)
        self._engine.submit(
            *(
                self._job(
                    request_id=f"{request_id}/{row}" if row else request_id,
                    work=lambda denoiser: self._denoise(conditioning, settings, denoiser, answer),
                    succeed=answer.succeed,
                    fail=answer.fail,
                    cancelled=answer.end,
                    size=size,
                    deadline=time.monotonic() + timeout / 1e6 if timeout else None,
                )
                for row in range(conditioning.rows)
            )
        )

    def _find_no_trajectory(self) -> str | None:
        """Why this model shows no pictures but the last one; None where it does."""
        if self._config.limits.makes_video:
            return NO_PICTURES
        if not self._is_decoupled:
            return ANSWERS_ONCE
        if not self._previews.steps_once(self._pipe.scheduler):
            return f"a {type(self._pipe.scheduler).__name__} takes several steps a timestep"
        return None

    def _find_no_previews(self) -> str | None:
        """Why this model shows no previews, where it shows its trajectory; None where it does."""
        if self._previews.estimate_of(self._pipe.scheduler) is None:
            return f"a {type(self._pipe.scheduler).__name__} tells no preview"
        return None

    def _denoise(
        self, conditioning: Any, settings: Settings, denoiser: Callable[..., Any], answer: _Answer
    ) -> Made:
        """The final latents, and what vae_decode must know."""
        started = time.perf_counter()
        if self._config.loras:
            denoiser = self._loras.denoiser(denoiser, settings.loras)
        pipe = self._pipes[settings.task]
        overlay = self._seams.overlay_of(conditioning.images)

        def run(denoiser: Callable[..., Any], prepare: Callable[[Any], None] | None = None) -> Any:
            return self._seams.replay(
                pipe,
                conditioning.calls,
                self._seams.call_arguments(pipe, self._config.limits, settings, conditioning.images),
                settings.seed,
                recorded_dtype=common.parse_dtype(conditioning.dtype),
                denoiser=denoiser,
                prepare=prepare,
            )

        def reached(step: int | None, decode_arguments: dict[str, Any]) -> str:
            timings = {
                "encode_seconds": conditioning.encode_seconds,
                "denoise_seconds": time.perf_counter() - started,
            }
            return DecodeSettings.of(
                settings, decode_arguments=decode_arguments, timings=timings, step=step
            ).model_dump_json()

        def made(denoised: Any, step: int | None = None) -> Made:
            latents = denoised.latents[0].contiguous().cpu()
            return Made(latents, reached(step, denoised.decode_arguments), overlay)

        def show(step: int, denoised: Any) -> None:
            self._engine.tell(answer.show, made(denoised, step))

        count = steps_run(settings.num_inference_steps, settings.strength)
        watch = None
        if settings.progress:
            watch = self._progress(
                count, self._engine.tell, lambda step: answer.show(Made(None, reached(step, {})))
            ).watch
        steps = (
            list(range(1, count))
            if settings.trajectory
            else self._previews.preview_steps(settings.partial_images, count)
        )
        if steps:
            return made(
                self._previews.run_with_previews(
                    run, denoiser, steps, show, trajectory=settings.trajectory, prepare=watch
                )
            )
        return made(run(denoiser, watch))


def _response(made: Made) -> Any:
    import triton_python_backend_utils as pb_utils

    tensors = [common.text_tensor("settings", made.settings)]
    if made.latents is not None:
        tensors.append(pb_utils.Tensor("latents", made.latents.numpy()))
    if made.overlay is not None:
        tensors.append(pb_utils.Tensor("overlay", made.overlay))
    return pb_utils.InferenceResponse(tensors)


class _Answer:
    """The one answer to a request, given when all rows that it waits for have ended; previews may come before it."""

    def __init__(self, sender: Any, *, is_decoupled: bool) -> None:
        self.request_id = "?"
        self._sender = sender
        self._is_decoupled = is_decoupled
        self._rows = 1
        self._shown: Made | None = None

    def wait_for(self, rows: int) -> None:
        """Warmup asks for several rows of one request."""
        self._rows = rows

    def describe(self, response: Any) -> None:
        """The answer to a request that wants no work."""
        self._rows = 0
        self._send(response)

    def succeed(self, made: Made) -> None:
        if self._rows > 1:
            self._rows -= 1
        elif self._rows == 1:  # 0: it has been answered
            self._send(_response(made))
            self._rows = 0

    def show(self, made: Made) -> None:
        """A preview, or without latents the step that is reached; there is more to come."""
        if self._rows == 0:
            return
        self._sender.send(_response(made))
        self._shown = made

    def fail(self, error: BaseException) -> None:
        if self._rows == 0:
            return
        self._rows = 0
        if self._shown is None:
            self._send_last(common.error_response(error, self.request_id))
        else:
            last = DecodeSettings.model_validate_json(self._shown.settings)
            text = common.to_ours(error, self.request_id).to_text()
            last = last.model_copy(update={"is_final": True, "error": text})
            # With the end of the stream: vae_decode is fast to answer, and must not be before it.
            self._send_last(_response(dataclasses.replace(self._shown, settings=last.model_dump_json())))

    def end(self) -> None:
        """The request was cancelled: an empty end, since an error would leak a count in tritonserver 2.51."""
        if self._rows == 0:
            return
        if self._is_decoupled:
            import triton_python_backend_utils as pb_utils

            self._rows = 0
            self._sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        else:
            self.fail(common.cancelled())  # one response is mandatory there

    def _send(self, response: Any) -> None:
        if self._is_decoupled:
            common.send_in_stream(self._sender, response, self.request_id)
        else:
            self._send_last(response)

    def _send_last(self, response: Any) -> None:
        import triton_python_backend_utils as pb_utils

        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
