"""The encode stage: prompts, images and request parameters in, ``conditioning`` out."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from diffusion_backend.settings import Settings, resolve
from diffusion_backend.stages import common
from diffusion_backend.tasks import check_images

# What Triton itself puts among a request's parameters.
_TRITON_PARAMETERS = ("id", "sequence_id", "sequence_start", "sequence_end", "priority", "timeout")


class TritonPythonModel:
    """Runs the encoders. Each request of a batch is encoded by itself: exact, whatever its batch mates."""

    def initialize(self, args: dict[str, str]) -> None:
        common.prepare_process()
        from diffusion_backend import conditioning, input_image, loading, seams, task_pipelines
        from diffusion_backend.encoder_cache import EncoderCache
        from diffusion_backend.loras import LoraSwitch
        from diffusion_backend.stage_names import Stage
        from diffusion_backend.stages.metrics import CacheMetrics
        from diffusion_backend.tombstones import Tombstones

        self._conditioning, self._seams = conditioning, seams
        self._input_image = input_image
        self._tombstones = Tombstones()
        self._config = common.start_stage(args)
        common.check_warmup(args, self._check_sample)
        cache_bytes = self._config.integer("encoder_cache_bytes", at_least=0)
        self._pipe, self._description = common.load(self._config, Stage.ENCODE)
        self._metrics = CacheMetrics(self._config.model, self._config.instance)
        self._cache = EncoderCache(cache_bytes, self._metrics.looked_up)
        self._loras = LoraSwitch(self._pipe, Stage.ENCODE, self._config.loras)
        self._pipes = task_pipelines.pipelines_by_task(self._pipe)
        for name, encoder in loading.modules_of(self._pipe, Stage.ENCODE).items():
            cached = self._cache.wrap(encoder, self._loras.state(encoder))
            for pipe in self._pipes.values():
                vars(pipe)[name] = cached

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _check_sample(self, files: dict[str, bytes]) -> None:
        images = [common.bytes_sample(name, data) for name, data in files.items() if name == "image"]
        mask = common.bytes_sample("mask", files["mask"]) if "mask" in files else None
        texts = {
            name: common.text_sample(name, data)
            for name, data in files.items()
            if name not in ("image", "mask")
        }
        self._read(texts.get("prompt"), texts.get("negative_prompt"), images, mask, {})

    def _read(
        self,
        prompt: str | None,
        negative_prompt: str | None,
        files: list[bytes],
        mask: bytes | None,
        parameters: dict[str, Any],
    ) -> tuple[Settings, dict[str, Any]]:
        """A request's settings, and the images among its call's arguments. A picture made of one has its size.

        Raises:
            DiffusionError: INVALID_ARG, naming what is wrong.
        """
        limits = self._config.limits
        check_images(limits.tasks, len(files), has_mask=mask is not None, max_images=limits.max_images)
        given = self._input_image.open_images(
            files, mask, takes_mask=limits.takes_mask, largest=(limits.max_width, limits.max_height)
        )
        if given.size and not limits.makes_video and not {"width", "height"} & set(parameters):
            width, height = limits.size_of_image(*given.size)
            parameters = {**parameters, "width": width, "height": height}
        settings = resolve(
            limits,
            prompt,
            negative_prompt,
            parameters,
            images=len(files),
            has_mask=given.part is not None,
        )
        if not files:
            return settings, {}
        size = (settings.width, settings.height)
        first, *others = given.fitted(size)
        images: dict[str, Any] = {self._seams.IMAGE: [first, *others] if others else first}
        if (part := given.fitted_part(size)) is not None:
            images[self._seams.MASK] = part.convert("RGB")
        return settings, images

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
                common.bytes_inputs(request, "image"),
                common.bytes_input(request, "mask"),
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
        files: list[bytes],
        mask: bytes | None,
        parameters: dict[str, Any],
    ) -> bytes:
        started = time.perf_counter()
        given = {
            name: value
            for name, value in parameters.items()
            if name not in _TRITON_PARAMETERS and not name.startswith("triton_")
        }
        settings, images = self._read(prompt, negative_prompt, files, mask, given)
        self._loras.switch(settings.loras)
        pipe = self._pipes[settings.task]
        calls = self._seams.record(
            pipe, self._seams.call_arguments(pipe, self._config.limits, settings, images)
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
