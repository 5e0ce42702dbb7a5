"""The VAE decode stage: ``latents`` and ``settings`` in, ``images`` and ``info`` out."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

from diffusion_backend.errors import DiffusionError, invalid
from diffusion_backend.quality import Tier
from diffusion_backend.stages import common
from diffusion_backend.stages.decode_settings import DecodeSettings, parse_decode_settings


class TritonPythonModel:
    """Decodes one request at a time: batched convolutions round differently, and lossless means lossless.

    Both tiers run the untouched VAE until a fast decoder is installed; ``info`` says which path really ran.
    """

    def initialize(self, args: dict[str, str]) -> None:
        common.tune_process()
        from diffusion_backend import seams
        from diffusion_backend.loading import Stage
        from diffusion_backend.tombstones import Tombstones

        self._seams = seams
        self._tombstones = Tombstones()
        self._config = common.start_stage(args)
        common.check_warmup(args, self._check_sample)
        self._pipe, self._description = common.load(self._config, Stage.VAE_DECODE)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _check_sample(self, files: dict[str, bytes]) -> None:
        parse_decode_settings(common.text_sample("settings", files["settings"]), self._config.limits)

    def _answer(self, request: Any) -> Any:
        import triton_python_backend_utils as pb_utils

        if common.asks_to_describe(request):
            return common.description_response(self._description, (1, 1))
        try:
            settings = parse_decode_settings(common.text_input(request, "settings"), self._config.limits)
            # A preview is decoded all the same: denoise runs yet, and tells of the cancel.
            if settings.is_final and request.request_id() in self._tombstones:
                raise common.cancelled()
            latents = common.array_input(request, "latents")
            images, info = self._decode(latents, settings)
        except Exception as error:
            return common.error_response(error, request.request_id())
        # Outputs of a model with a batch axis: [1, H, W, 3] and [1, 1].
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("images", images), common.text_tensor("info", info, (1, 1))]
        )

    def _decode(
        self, latents: np.ndarray[Any, Any], settings: DecodeSettings
    ) -> tuple[np.ndarray[Any, Any], str]:
        import torch

        started = time.perf_counter()
        self._check_latents(latents, settings)
        images = self._seams.decode(self._pipe, torch.from_numpy(latents.copy()), settings.decode_arguments)
        size = (images.shape[-2], images.shape[-3])
        if size != (settings.width, settings.height):
            raise DiffusionError(
                f"the VAE made a picture of {size[0]}x{size[1]}, not {settings.width}x{settings.height}",
                code="wrong_size",
            )
        timings = {str(name): seconds for name, seconds in settings.timings.items()}
        timings["decode_seconds"] = time.perf_counter() - started
        info = {
            **settings.model_dump(exclude={"decode_arguments", "timings"}),
            "decode_path": Tier.LOSSLESS.value,
            "timings": timings,
        }
        return images.numpy(), json.dumps(info)

    def _check_latents(self, latents: np.ndarray[Any, Any], settings: DecodeSettings) -> None:
        """Before any work: one request's latents, of the size that makes the picture that the settings speak of."""
        scale = int(self._config.parameters["vae_scale_factor"])
        wanted = (settings.height // scale, settings.width // scale)
        if len(latents) != 1 or latents.shape[-2:] != wanted:
            raise invalid(
                "latents",
                f"'latents' have the shape {list(latents.shape)}; allowed for {settings.width}x{settings.height}: "
                f"one request's, ending in {wanted[0]}, {wanted[1]}",
            )
        if not np.isfinite(latents).all():
            raise invalid("latents", "'latents' are not finite")
