"""The encode stage: prompts, an image and request parameters in, ``conditioning`` out."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from diffusion_backend.errors import invalid
from diffusion_backend.settings import Settings, resolve
from diffusion_backend.stages import common

# What Triton itself puts among a request's parameters.
_TRITON_PARAMETERS = ("id", "sequence_id", "sequence_start", "sequence_end", "priority", "timeout")


class TritonPythonModel:
    """Runs the encoders. Each request of a batch is encoded by itself: exact, whatever its batch mates."""

    def initialize(self, args: dict[str, str]) -> None:
        common.tune_process()
        from diffusion_backend import conditioning, input_image, loading, seams
        from diffusion_backend.encoder_cache import EncoderCache
        from diffusion_backend.loras import LoraSwitch
        from diffusion_backend.stage_names import Stage
        from diffusion_backend.stages.metrics import CacheMetrics
        from diffusion_backend.tombstones import Tombstones

        self._conditioning, self._seams = conditioning, seams
        self._read_image = input_image.read_image
        self._tombstones = Tombstones()
        self._config = common.start_stage(args)
        common.check_warmup(args, self._check_sample)
        cache_bytes = self._config.integer("encoder_cache_bytes", at_least=0)
        self._pipe, self._description = common.load(self._config, Stage.ENCODE)
        self._metrics = CacheMetrics(self._config.model, self._config.instance)
        self._cache = EncoderCache(cache_bytes, self._metrics.looked_up)
        self._loras = LoraSwitch(self._pipe, Stage.ENCODE, self._config.loras)
        for name, encoder in loading.modules_of(self._pipe, Stage.ENCODE).items():
            vars(self._pipe)[name] = self._cache.wrap(encoder, self._loras.state(encoder))

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _check_sample(self, files: dict[str, bytes]) -> None:
        texts = {name: common.text_sample(name, data) for name, data in files.items() if name != "image"}
        settings = resolve(self._config.limits, texts.get("prompt"), texts.get("negative_prompt"), {})
        self._images(common.bytes_sample("image", files["image"]) if "image" in files else None, settings)

    def _images(self, file: bytes | None, settings: Settings) -> dict[str, Any]:
        """The images among the call's arguments.

        Raises:
            DiffusionError: INVALID_ARG, naming ``image``: it is missing, or no image that can be used.
        """
        if not self._config.limits.takes_image:
            return {}
        if file is None:
            raise invalid(
                "image",
                "'image' is missing, and this model makes video of one; allowed: a PNG, JPEG or WebP file",
                "missing",
            )
        return {"image": self._read_image(file, settings.width, settings.height)}

    def _answer(self, request: Any) -> Any:
        import triton_python_backend_utils as pb_utils

        request_id = "?"
        try:
            request_id = common.read_request_id(request)
            if common.asks_to_describe(request):
                return common.description_response(self._description, (1, 1))
            if request_id in self._tombstones:
                raise common.cancelled()
            blob = self._encode(
                common.text_input(request, "prompt"),
                common.text_input(request, "negative_prompt"),
                common.bytes_input(request, "image"),
                common.read_parameters(request),
            )
        except Exception as error:
            return common.error_response(error, request_id)
        # The leading axis is Triton's batch axis.
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("conditioning", np.frombuffer(blob, np.uint8)[None])]
        )

    def _encode(
        self,
        prompt: str | None,
        negative_prompt: str | None,
        image: bytes | None,
        parameters: dict[str, Any],
    ) -> bytes:
        started = time.perf_counter()
        limits = self._config.limits
        given = {
            name: value
            for name, value in parameters.items()
            if name not in _TRITON_PARAMETERS and not name.startswith("triton_")
        }
        settings = resolve(limits, prompt, negative_prompt, given)
        images = self._images(image, settings)
        self._loras.switch(settings.loras)
        calls = self._seams.record(
            self._pipe, self._seams.call_arguments(self._pipe, limits, settings, images)
        )
        self._metrics.filled(self._cache.bytes)
        return self._conditioning.pack(
            self._conditioning.Conditioning(
                calls,
                settings.model_dump(),
                time.perf_counter() - started,
                dtype=common.dtype_name(self._config.dtype),
                images=images,
            )
        )
