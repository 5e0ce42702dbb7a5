"""The VAE decode stage: ``latents`` and ``settings`` in, ``images`` and ``info`` out."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from typing import Any

import numpy as np

from diffusion_backend.errors import DiffusionError, invalid
from diffusion_backend.quality import Tier, resolve_tier
from diffusion_backend.stages import common
from diffusion_backend.stages.decode_batches import Work, group
from diffusion_backend.stages.decode_settings import DecodeSettings, parse_decode_settings

logger = logging.getLogger("diffusion_backend")


class TritonPythonModel:
    """Decodes what arrives together: lossless one at a time; fast, on a GPU, in batches of a shape.

    Batched convolutions round differently, and lossless means lossless. ``info`` says which path really ran.
    """

    def initialize(self, args: dict[str, str]) -> None:
        common.tune_process()
        from diffusion_backend import fast_path, seams
        from diffusion_backend.fast_path_gate import use_vae_fast_path
        from diffusion_backend.loading import Stage
        from diffusion_backend.stages.metrics import DecodeMetrics
        from diffusion_backend.tombstones import Tombstones

        self._seams = seams
        self._use_fast_path = use_vae_fast_path
        self._tombstones = Tombstones()
        self._config = common.start_stage(args)
        common.check_warmup(args, self._check_sample)
        self._scale = int(self._config.parameter("vae_scale_factor"))
        self._metrics = DecodeMetrics(self._config.model, self._config.instance)
        self._pipe, description = common.load(self._config, Stage.VAE_DECODE)
        path = fast_path.install(
            self._pipe,
            self._latents_shape(args),
            device=self._config.device,
            min_psnr_db=float(self._config.parameter("fast_path_min_psnr_db")),
        )
        self._has_fast_path = path.state == "installed"
        self._max_pixels = self._most_pixels()
        self._description = json.dumps({**json.loads(description), "fast_path": dataclasses.asdict(path)})

    def execute(self, requests: list[Any]) -> list[Any]:
        responses: list[Any] = [None] * len(requests)
        works: list[Work] = []
        for index, request in enumerate(requests):
            request_id = "?"
            try:
                request_id = common.read_request_id(request)
                if common.asks_to_describe(request):
                    responses[index] = common.description_response(self._description, (1, 1))
                    continue
                work = self._read(index, request_id, request)
                # A preview is decoded all the same: denoise runs yet, and tells of the cancel.
                if work.settings.is_final and request_id in self._tombstones:
                    responses[index] = self._no_picture(common.cancelled(), work)
                else:
                    works.append(work)
            except Exception as error:
                responses[index] = common.error_response(error, request_id)
        for batch in group(works, self._max_pixels):
            for work, response in zip(batch, self._answer(batch), strict=True):
                responses[work.index] = response
        return responses

    def _latents_shape(self, args: dict[str, str]) -> list[int]:
        """Those of a picture of the default size: [C, H, W], or [C, 1, H, W] where the VAE is one for clips."""
        inputs = {given["name"]: given for given in json.loads(args["model_config"])["input"]}
        channels, *free = map(int, inputs["latents"]["dims"])
        limits = self._config.limits
        sides = [limits.default_height // self._scale, limits.default_width // self._scale]
        return [channels, *[1] * (len(free) - 2), *sides]

    def _most_pixels(self) -> float:
        """Of a batch of fast decodes.

        On a CPU each is alone: torch's sums depend on the batch there, so that a picture would differ with its mates;
        nor is a batch faster.
        """
        limits = self._config.limits
        rows = float(self._config.parameter("max_gpu_batch_rows"))
        return (
            rows * limits.default_width * limits.default_height if self._config.device.type == "cuda" else 0
        )

    def _check_sample(self, files: dict[str, bytes]) -> None:
        parse_decode_settings(common.text_sample("settings", files["settings"]), self._config.limits)

    def _read(self, index: int, request_id: str, request: Any) -> Work:
        settings = parse_decode_settings(common.text_input(request, "settings"), self._config.limits)
        if settings.error is not None:
            raise DiffusionError.from_text(settings.error) or invalid(
                "settings", "'error' is none of denoise's"
            )
        latents = common.array_input(request, "latents")
        tier = resolve_tier(settings.quality, self._config.limits.default_quality)
        if not self._has_fast_path:
            tier = Tier.LOSSLESS
        return Work(index, request_id, latents, settings, tier)

    def _answer(self, batch: list[Work]) -> list[Any]:
        try:
            for work in batch:
                self._check_latents(work.latents, work.settings)
            return self._decode(batch)
        except Exception as error:
            if len(batch) == 1:
                return self._recover(error, batch[0])
        return [response for work in batch for response in self._answer([work])]  # whose fault it was

    def _recover(self, error: Exception, work: Work) -> list[Any]:
        """What is too much for the fast decoder's dtype need not be for the VAE's own."""
        if work.tier is Tier.LOSSLESS or common.is_clients_fault(error):
            return [self._failure(error, work)]
        logger.warning("%s: the fast decoder failed, decoding losslessly: %s", work.request_id, error)
        return self._answer([dataclasses.replace(work, tier=Tier.LOSSLESS)])

    def _decode(self, batch: list[Work]) -> list[Any]:
        import torch

        started = time.perf_counter()
        latents = torch.from_numpy(np.concatenate([work.latents for work in batch]))
        first = batch[0]
        with self._use_fast_path(self._pipe.vae, first.tier is Tier.FAST) as is_fast:
            images = self._seams.decode(
                self._pipe, latents, first.settings.decode_arguments, exact=not is_fast
            ).numpy()
        seconds = time.perf_counter() - started
        path = Tier.FAST if is_fast else Tier.LOSSLESS
        self._metrics.decoded(path.value, len(batch), seconds)
        return [self._response(image, work, path, seconds) for image, work in zip(images, batch, strict=True)]

    def _failure(self, error: Exception, work: Work) -> Any:
        if work.settings.is_final:
            return common.error_response(error, work.request_id)
        return self._no_picture(error, work)

    def _no_picture(self, error: Exception, work: Work) -> Any:
        """An empty picture, whose ``info`` has the error: for whom denoise may not be done with yet.

        An error that overtakes the end of another step of the same request leaves a request that tritonserver 2.51
        never counts out.
        """
        import triton_python_backend_utils as pb_utils

        ours = common.to_ours(error, work.request_id)
        info = {**work.settings.model_dump(exclude={"decode_arguments", "timings"}), "error": ours.message}
        empty = np.zeros((1, 0, 0, 3), np.uint8)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("images", empty), common.text_tensor("info", json.dumps(info), (1, 1))]
        )

    def _response(self, image: np.ndarray[Any, Any], work: Work, path: Tier, seconds: float) -> Any:
        import triton_python_backend_utils as pb_utils

        settings = work.settings
        size = (image.shape[-2], image.shape[-3])
        if size != (settings.width, settings.height):
            raise DiffusionError(
                f"the VAE made a picture of {size[0]}x{size[1]}, not {settings.width}x{settings.height}",
                code="wrong_size",
            )
        timings = {str(name): taken for name, taken in settings.timings.items()}
        timings["decode_seconds"] = seconds
        info = {
            **settings.model_dump(exclude={"decode_arguments", "timings", "error"}),
            "decode_path": path.value,
            "timings": timings,
        }
        # Outputs of a model with a batch axis: [1, H, W, 3] and [1, 1].
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("images", image[None]), common.text_tensor("info", json.dumps(info), (1, 1))]
        )

    def _check_latents(self, latents: np.ndarray[Any, Any], settings: DecodeSettings) -> None:
        """Before any work: one request's latents, of the size that makes the picture that the settings speak of."""
        wanted = (settings.height // self._scale, settings.width // self._scale)
        if len(latents) != 1 or latents.shape[-2:] != wanted:
            raise invalid(
                "latents",
                f"'latents' have the shape {list(latents.shape)}; allowed for {settings.width}x{settings.height}: "
                f"one request's, ending in {wanted[0]}, {wanted[1]}",
            )
        if not np.isfinite(latents).all():
            raise invalid("latents", "'latents' are not finite")
