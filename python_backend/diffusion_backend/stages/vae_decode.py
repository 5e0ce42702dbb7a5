"""The VAE decode stage: ``latents`` and ``settings`` in, ``images`` and ``info`` out."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from diffusion_backend.errors import DiffusionError, invalid
from diffusion_backend.quality import Tier, resolve_tier
from diffusion_backend.stages import common
from diffusion_backend.stages.decode_settings import DecodeSettings, parse_decode_settings


@dataclass(frozen=True)
class _Work:
    """One request's: ``latents`` [1, C, H, W], or [1, C, F, H, W], float32. ``index`` is its place in ``execute``."""

    index: int
    request_id: str
    latents: np.ndarray[Any, Any]
    settings: DecodeSettings
    tier: Tier

    @property
    def key(self) -> Any:
        """What is equal among those that may be decoded as one batch: never that of a lossless one."""
        if self.tier is Tier.LOSSLESS:
            return self.index
        return self.latents.shape, json.dumps(self.settings.decode_arguments, sort_keys=True)


class TritonPythonModel:
    """Decodes what arrives together: lossless one at a time, fast in batches of a shape.

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
        self._scale = int(self._config.parameters["vae_scale_factor"])
        self._max_rows = float(self._config.parameters["max_batch_rows"])
        self._metrics = DecodeMetrics(self._config.model, self._config.instance)
        self._pipe, description = common.load(self._config, Stage.VAE_DECODE)
        path = fast_path.install(
            self._pipe,
            self._latents_shape(args),
            device=self._config.device,
            min_psnr_db=float(self._config.parameters["fast_path_min_psnr_db"]),
        )
        self._description = json.dumps({**json.loads(description), "fast_path": dataclasses.asdict(path)})

    def execute(self, requests: list[Any]) -> list[Any]:
        responses: list[Any] = [None] * len(requests)
        works: list[_Work] = []
        for index, request in enumerate(requests):
            try:
                if common.asks_to_describe(request):
                    responses[index] = common.description_response(self._description, (1, 1))
                else:
                    works.append(self._read(index, request))
            except Exception as error:
                responses[index] = common.error_response(error, request.request_id())
        for batch in self._batches(works):
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

    def _check_sample(self, files: dict[str, bytes]) -> None:
        parse_decode_settings(common.text_sample("settings", files["settings"]), self._config.limits)

    def _read(self, index: int, request: Any) -> _Work:
        settings = parse_decode_settings(common.text_input(request, "settings"), self._config.limits)
        # A preview is decoded all the same: denoise runs yet, and tells of the cancel.
        if settings.is_final and request.request_id() in self._tombstones:
            raise common.cancelled()
        latents = common.array_input(request, "latents")
        self._check_latents(latents, settings)
        tier = resolve_tier(settings.quality, self._config.limits.default_quality)
        return _Work(index, request.request_id(), latents, settings, tier)

    def _batches(self, works: list[_Work]) -> Iterator[list[_Work]]:
        """Groups of one key, up to ``max_batch_rows`` pictures of the default size."""
        groups: dict[Any, list[_Work]] = {}
        for work in works:
            groups.setdefault(work.key, []).append(work)
        limits = self._config.limits
        default = limits.default_width * limits.default_height
        for group in groups.values():
            pixels = group[0].settings.width * group[0].settings.height
            count = max(1, int(self._max_rows * default / pixels))
            yield from (group[start : start + count] for start in range(0, len(group), count))

    def _answer(self, batch: list[_Work]) -> list[Any]:
        try:
            return self._decode(batch)
        except Exception as error:
            if len(batch) == 1:
                return [common.error_response(error, batch[0].request_id)]
        return [response for work in batch for response in self._answer([work])]  # whose fault it was

    def _decode(self, batch: list[_Work]) -> list[Any]:
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

    def _response(self, image: np.ndarray[Any, Any], work: _Work, path: Tier, seconds: float) -> Any:
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
            **settings.model_dump(exclude={"decode_arguments", "timings"}),
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
