"""The denoise stage: ``conditioning`` in, ``latents`` and slim ``settings`` out, on a thread of its own."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from diffusion_backend.engine import Engine, Job
from diffusion_backend.settings import check
from diffusion_backend.stages import common
from diffusion_backend.stages.decode_settings import DecodeSettings


class TritonPythonModel:
    """Runs the pipeline's own denoising loop. ``execute`` only admits; the engine's thread answers."""

    def initialize(self, args: dict[str, str]) -> None:
        common.tune_process()
        from diffusion_backend import conditioning, seams
        from diffusion_backend.loading import Stage

        self._conditioning, self._seams = conditioning, seams
        self._config = common.start_stage(args)
        common.check_warmup(args, self._check_sample)
        self._is_stream = json.loads(args["model_config"])["model_transaction_policy"]["decoupled"]
        self._engine = Engine(max_queued=int(self._config.parameters["max_queued_requests"]))
        self._pipe, self._description = self._engine.run(lambda: common.load(self._config, Stage.DENOISE))

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._admit(request)

    def finalize(self) -> None:
        self._engine.close()

    def _check_sample(self, files: dict[str, bytes]) -> None:
        check(self._config.limits, self._conditioning.unpack(files["conditioning"]).settings)

    def _admit(self, request: Any) -> None:
        import triton_python_backend_utils as pb_utils

        sender = request.get_response_sender()
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

        request_id = request.request_id()

        def fail(error: BaseException) -> None:
            sender.send(common.error_response(error, request_id), flags=final)

        def succeed(response: Any) -> None:
            if self._is_stream:
                common.send_in_stream(sender, response, request_id)
            else:
                sender.send(response, flags=final)

        if common.asks_to_describe(request):
            # At once, whatever the engine does: who asks wants to know whether this process lives.
            succeed(common.description_response(self._description, (1,)))
            return
        try:
            # The copy matters: the input's memory is Triton's again once execute returns.
            blob = common.array_input(request, "conditioning").tobytes()
            conditioning = self._conditioning.unpack(blob)
            settings = check(self._config.limits, conditioning.settings)
            self._engine.submit(
                Job(
                    request_id=request_id or str(uuid.uuid4()),
                    run=lambda: [self._denoise(conditioning, settings) for _ in range(conditioning.rows)][-1],
                    succeed=succeed,
                    fail=fail,
                )
            )
        except Exception as error:
            fail(error)

    def _denoise(self, conditioning: Any, settings: Any) -> Any:
        import triton_python_backend_utils as pb_utils

        started = time.perf_counter()
        arguments = self._seams.call_arguments(self._pipe, self._config.limits, settings)
        denoised = self._seams.replay(
            self._pipe,
            conditioning.calls,
            arguments,
            settings.seed,
            recorded_dtype=common.parse_dtype(conditioning.dtype),
        )
        decode_settings = DecodeSettings.of(
            settings,
            decode_arguments=denoised.decode_arguments,
            timings={
                "encode_seconds": conditioning.encode_seconds,
                "denoise_seconds": time.perf_counter() - started,
            },
        )
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("latents", denoised.latents[0].contiguous().cpu().numpy()),
                common.text_tensor("settings", decode_settings.model_dump_json()),
            ]
        )
