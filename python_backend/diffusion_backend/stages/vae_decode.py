"""The VAE decode stage: ``latents``, ``settings`` and perhaps an ``overlay`` in, ``images`` and ``info`` out."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from typing import Any

import numpy as np

from diffusion_backend.errors import invalid
from diffusion_backend.quality import Tier
from diffusion_backend.stages import common
from diffusion_backend.stages.decode_batches import Work, group
from diffusion_backend.stages.decode_settings import DecodeSettings
from diffusion_backend.stages.decoder import Decoder, is_worth_repeating

logger = logging.getLogger("diffusion_backend")


class TritonPythonModel:
    """Decodes what arrives together: lossless one at a time; fast, on a GPU, in batches of a shape.

    Batched convolutions round differently, and lossless means lossless. ``info`` says which path really ran.
    """

    def initialize(self, args: dict[str, str]) -> None:
        common.prepare_process()
        from diffusion_backend.tombstones import Tombstones

        self._tombstones = Tombstones()
        self._config = common.start_stage(args)
        self._max_pixels = self._most_pixels()
        self._decoder = Decoder(self._config, args)

    def execute(self, requests: list[Any]) -> list[Any]:
        responses: list[Any] = [None] * len(requests)
        works: list[Work] = []
        for index, request in enumerate(requests):
            request_id = "?"
            try:
                request_id = common.read_request_id(request)
                if common.asks_to_describe(request):
                    responses[index] = common.description_response(self._decoder.description, (1, 1))
                    continue
                settings = self._decoder.read_settings(request)
                # A preview is decoded all the same: denoise runs yet, and tells of the cancel.
                if settings.is_final and request_id in self._tombstones:
                    responses[index] = _no_picture(common.cancelled(), settings, request_id)
                elif not settings.is_final and not common.has_input(request, "latents"):
                    responses[index] = _response(_EMPTY, settings.info())  # the step that is reached
                else:
                    latents, overlay = self._read_latents(request), _read_overlay(request, settings)
                    tier = self._decoder.tier(settings)
                    works.append(Work(index, request_id, latents, settings, tier, overlay))
            except Exception as error:
                responses[index] = common.error_response(error, request_id)
        for batch in group(works, self._max_pixels):
            for work, response in zip(batch, self._answer(batch), strict=True):
                responses[work.index] = response
        return responses

    def _most_pixels(self) -> float:
        """Of a batch of fast decodes.

        On a CPU each is alone: torch's sums depend on the batch there, so that a picture would differ with its mates;
        nor is a batch faster.
        """
        limits = self._config.limits
        rows = self._config.number("max_gpu_batch_rows", at_least=0)
        return (
            rows * limits.default_width * limits.default_height if self._config.device.type == "cuda" else 0
        )

    def _read_latents(self, request: Any) -> np.ndarray[Any, Any]:
        """One request's: [1, C, H, W]."""
        latents = common.array_input(request, "latents")
        if len(latents) != 1:
            raise invalid("latents", f"'latents' are of {len(latents)} requests; allowed: one request's")
        return latents

    def _answer(self, batch: list[Work]) -> list[Any]:
        try:
            for work in batch:
                self._decoder.check_latents(work.latents, work.settings)
            return self._decode(batch)
        except Exception as error:
            if len(batch) == 1 and not is_worth_repeating(error, batch[0].tier):
                return [self._failure(error, batch[0])]
            reason = str(error)
        # After the block: the error holds what the decode that failed has left in memory.
        if len(batch) > 1:
            return [response for work in batch for response in self._answer([work])]  # whose fault it was
        logger.warning("%s: the fast decoder failed, decoding losslessly: %s", batch[0].request_id, reason)
        self._decoder.metrics.repeated()
        return self._answer([dataclasses.replace(batch[0], tier=Tier.LOSSLESS)])

    def _decode(self, batch: list[Work]) -> list[Any]:
        import torch

        started = time.perf_counter()
        latents = torch.from_numpy(np.concatenate([work.latents for work in batch]))
        first, decoder = batch[0], self._decoder
        with decoder.path(first.tier) as path:
            images = decoder.seams.decode(
                decoder.pipe, latents, first.settings.decode_arguments, exact=path is Tier.LOSSLESS
            ).numpy()
        seconds = time.perf_counter() - started
        decoder.metrics.decoded(path.value, len(batch), seconds)
        return [self._picture(image, work, path, seconds) for image, work in zip(images, batch, strict=True)]

    def _picture(self, image: np.ndarray[Any, Any], work: Work, path: Tier, seconds: float) -> Any:
        self._decoder.check_size((image.shape[-2], image.shape[-3]), work.settings)
        if work.overlay is not None:
            image = np.where(work.overlay[..., 3:] == _STAYS, work.overlay[..., :3], image)
        return _response(image, self._decoder.info(work.settings, path, seconds))

    def _failure(self, error: Exception, work: Work) -> Any:
        if work.settings.is_final:
            return common.error_response(error, work.request_id)
        return _no_picture(error, work.settings, work.request_id)


def _no_picture(error: Exception, settings: DecodeSettings, request_id: str) -> Any:
    """An empty picture, whose ``info`` has the error: for whom denoise may not be done with yet.

    An error that overtakes the end of another step of the same request leaves a request that tritonserver 2.51
    never counts out.
    """
    return _response(_EMPTY, {**settings.info(), "error": common.to_ours(error, request_id).message})


_EMPTY = np.zeros((0, 0, 3), np.uint8)
_STAYS = 255  # the alpha of an overlay's pixel that is laid over the picture


def _read_overlay(request: Any, settings: DecodeSettings) -> np.ndarray[Any, Any] | None:
    """One request's: [H, W, 4]; None where nothing is to be laid over the picture."""
    if not common.has_input(request, "overlay"):
        return None
    overlay = common.array_input(request, "overlay")
    if overlay.shape != (1, settings.height, settings.width, 4):
        raise invalid(
            "overlay",
            f"'overlay' has the shape {list(overlay.shape[1:])}; allowed: [{settings.height}, {settings.width}, 4]",
        )
    picture: np.ndarray[Any, Any] = overlay[0]
    return picture


def _response(image: np.ndarray[Any, Any], info: dict[str, Any]) -> Any:
    import triton_python_backend_utils as pb_utils

    # Outputs of a model with a batch axis: [1, H, W, 3] and [1, 1].
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor("images", image[None]), common.text_tensor("info", json.dumps(info), (1, 1))]
    )
