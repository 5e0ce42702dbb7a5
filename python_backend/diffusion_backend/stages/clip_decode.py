"""The VAE decode stage of a model that makes video: ``latents`` and ``settings`` in, ``frames`` and ``info`` out.

A clip is decoded as a whole, and once: the VAE's layers look back at earlier frames. Then it is sent in slices, in
order; ``info`` says where in the clip a slice belongs, and which one is the last.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from diffusion_backend.clips import frames_a_slice
from diffusion_backend.errors import DiffusionError
from diffusion_backend.quality import Tier
from diffusion_backend.stages import common
from diffusion_backend.stages.decode_settings import DecodeSettings
from diffusion_backend.stages.decoder import Decoder, is_worth_repeating

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("diffusion_backend")


class TritonPythonModel:
    """Decodes one clip after the other, on a thread of its own: what tells of progress passes it by meanwhile."""

    def initialize(self, args: dict[str, str]) -> None:
        common.prepare_process()
        from diffusion_backend.tombstones import Tombstones

        self._tombstones = Tombstones()
        self._config = common.start_stage(args)
        self._max_slice_bytes = self._config.integer("max_slice_bytes", at_least=1)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="clip-decode")
        # On the thread that decodes: each thread that ran an OpenMP loop keeps a pool of threads of its own.
        self._decoder = self._worker.submit(Decoder, self._config, args).result()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._admit(request)

    def finalize(self) -> None:
        self._worker.shutdown()

    def _admit(self, request: Any) -> None:
        sender = request.get_response_sender()
        request_id = "?"
        try:
            request_id = common.read_request_id(request)
            if common.asks_to_describe(request):
                answer = common.description_response(self._decoder.description, (1,))
                common.send_in_stream(sender, answer, request_id)
                return
            settings = self._decoder.read_settings(request)
            if not settings.is_final:
                common.send_in_stream(sender, _response(_NO_FRAMES, settings.info()), request_id)
                return
            # The copy matters: the input's memory is Triton's again once execute returns.
            latents = common.array_input(request, "latents").copy()
            self._worker.submit(self._answer, sender, request_id, latents, settings)
        except Exception as error:
            _send_error(sender, error, request_id)

    def _answer(
        self, sender: Any, request_id: str, latents: np.ndarray[Any, Any], settings: DecodeSettings
    ) -> None:
        try:
            common.send_all_in_stream(sender, self._responses(request_id, latents, settings), request_id)
        except Exception as error:
            _send_error(sender, error, request_id)

    def _responses(
        self, request_id: str, latents: np.ndarray[Any, Any], settings: DecodeSettings
    ) -> Iterator[Any]:
        """The slices of a clip; where it was cancelled, at once or between two of them, what says so."""
        sent = 0
        if request_id not in self._tombstones:
            for frames, info in self._slices(request_id, latents, settings):
                yield _response(frames, info)
                sent += len(frames)
                if request_id in self._tombstones:
                    break
        if sent != settings.num_frames:
            # No error: one that overtakes the end of another step of the same request leaves a request that
            # tritonserver 2.51 never counts out.
            yield _response(_NO_FRAMES, {**settings.info(), "error": common.cancelled().message})

    def _slices(
        self, request_id: str, latents: np.ndarray[Any, Any], settings: DecodeSettings
    ) -> Iterator[tuple[np.ndarray[Any, Any], dict[str, Any]]]:
        """Some frames, uint8 [F, H, W, 3], and what is told of them."""
        import torch

        decoder, seams = self._decoder, self._decoder.seams
        decoder.check_latents(latents, settings)
        started = time.perf_counter()
        clip, path = self._decode(
            request_id, torch.from_numpy(latents)[None], settings, decoder.tier(settings)
        )
        seconds = time.perf_counter() - started
        decoder.metrics.decoded(path.value, 1, seconds)
        count, height, width = clip.shape[2:]
        decoder.check_size((width, height), settings)
        if count != settings.num_frames:
            raise DiffusionError(f"the VAE made {count} frames, not {settings.num_frames}", code="wrong_size")
        size = frames_a_slice(width, height, self._max_slice_bytes)
        for start in range(0, count, size):
            frames = seams.to_pictures(
                decoder.pipe, clip[:, :, start : start + size], exact=path is Tier.LOSSLESS
            )[0]
            info = decoder.info(settings, path, seconds)
            yield frames.numpy(), {**info, "frame_index": start, "is_final": start + size >= count}

    def _decode(
        self, request_id: str, latents: torch.Tensor, settings: DecodeSettings, tier: Tier
    ) -> tuple[torch.Tensor, Tier]:
        """The clip, and the way that it really went."""
        decoder = self._decoder
        try:
            with decoder.path(tier) as path:
                return decoder.seams.run_vae(decoder.pipe, latents, settings.decode_arguments), path
        except Exception as error:
            if not is_worth_repeating(error, tier):
                raise
            logger.warning("%s: the fast decoder failed, decoding losslessly: %s", request_id, error)
        decoder.metrics.repeated()  # after the block: the error holds what that decode has left in memory
        return self._decode(request_id, latents, settings, Tier.LOSSLESS)


_NO_FRAMES = np.zeros((0, 0, 0, 3), np.uint8)


def _response(frames: np.ndarray[Any, Any], info: dict[str, Any]) -> Any:
    import triton_python_backend_utils as pb_utils

    return pb_utils.InferenceResponse(
        [pb_utils.Tensor("frames", frames), common.text_tensor("info", json.dumps(info))]
    )


def _send_error(sender: Any, error: BaseException, request_id: str) -> None:
    """Answer with an error.

    Denoise is done with a request by then: what it sends before its last answer passes, and a decode that fails takes
    longer than the end of denoise's stream does. It is not where the inputs are forged, as by an ensemble of somebody's
    own: then tritonserver 2.51 never counts the request out.
    """
    import triton_python_backend_utils as pb_utils

    # With the end of the stream: after an error nothing may come.
    sender.send(common.error_response(error, request_id), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
