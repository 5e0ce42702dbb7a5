"""What the two forms of the VAE decode stage share: the loaded VAE, and what they ask of their inputs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from diffusion_backend.errors import DiffusionError, invalid
from diffusion_backend.quality import Tier, resolve_tier
from diffusion_backend.stages import common
from diffusion_backend.stages.decode_settings import DecodeSettings, parse_decode_settings


def is_worth_repeating(error: Exception, tier: Tier) -> bool:
    """Whether a decode that failed may pass losslessly: the fast decoder's dtype may be too narrow for it."""
    return tier is Tier.FAST and not common.is_clients_fault(error)


class Decoder:
    """The VAE of one process, with a fast decoder beside its own if that one can be had."""

    def __init__(self, config: common.StageConfig, args: dict[str, str]) -> None:
        """Check the warmup files and load; ``args`` is what Triton gives ``initialize``.

        Raises:
            DiffusionError: a warmup file cannot be used, or a file that the stage needs is missing or damaged.
        """
        from diffusion_backend import fast_path, seams
        from diffusion_backend.fast_path_gate import use_vae_fast_path
        from diffusion_backend.loading import Stage
        from diffusion_backend.stages.metrics import DecodeMetrics

        self._use_fast_path = use_vae_fast_path
        self.seams = seams
        self.config = config
        common.check_warmup(args, self._check_sample)
        min_psnr_db = config.number("fast_path_min_psnr_db", at_least=0)
        self._scale = config.integer("vae_scale_factor", at_least=1)
        self.metrics = DecodeMetrics(config.model, config.instance)
        self.pipe, description = common.load(config, Stage.VAE_DECODE)
        path = fast_path.install(
            self.pipe,
            self._latents_shape(args),
            device=config.device,
            min_psnr_db=min_psnr_db,
        )
        self._has_fast_path = path.state == "installed"
        self.description = json.dumps({**json.loads(description), "fast_path": dataclasses.asdict(path)})

    def tier(self, settings: DecodeSettings) -> Tier:
        """Of the decoder that is going to run, which need not be the one of the quality asked for."""
        tier = resolve_tier(settings.quality, self.config.limits.default_quality)
        return tier if self._has_fast_path else Tier.LOSSLESS

    @contextmanager
    def path(self, tier: Tier) -> Iterator[Tier]:
        """Decodes inside go the way of ``tier``, or the lossless one where no other is: the one that is yielded."""
        with self._use_fast_path(self.pipe.vae, tier is Tier.FAST) as is_fast:
            yield Tier.FAST if is_fast else Tier.LOSSLESS

    def read_settings(self, request: Any) -> DecodeSettings:
        """A request's settings.

        Raises:
            DiffusionError: they are wrong, or what they bring is an error of denoise's.
        """
        settings = parse_decode_settings(common.text_input(request, "settings"), self.config.limits)
        if settings.error is not None:
            raise DiffusionError.from_text(settings.error) or invalid(
                "settings", "'error' is none of denoise's"
            )
        return settings

    def check_latents(self, latents: np.ndarray[Any, Any], settings: DecodeSettings) -> None:
        """Before any work: ``latents``, [C, ...], make what the settings speak of.

        Raises:
            DiffusionError: INVALID_ARG, naming the shape that does.
        """
        sides = self._latent_sides(settings.height, settings.width)
        of = f"{settings.width}x{settings.height}"
        if list(latents.shape[-2:]) != sides:
            raise invalid(
                "latents",
                f"'latents' have the shape {list(latents.shape)}; allowed for {of}: one request's, "
                f"ending in {sides[0]}, {sides[1]}",
            )
        # Each latent is one frame or more.
        if settings.num_frames is not None and not 1 <= latents.shape[-3] <= settings.num_frames:
            raise invalid(
                "latents",
                f"'latents' have the shape {list(latents.shape)}; allowed for {settings.num_frames} frames of {of}: "
                f"one request's, with at most as many in the third axis from the end",
            )
        if not np.isfinite(latents).all():
            raise invalid("latents", "'latents' are not finite")

    def check_size(self, size: Sequence[int], settings: DecodeSettings) -> None:
        """``size`` of what was decoded, (width, height), is that of the settings.

        Raises:
            DiffusionError: it is not.
        """
        if tuple(size) != (settings.width, settings.height):
            raise DiffusionError(
                f"the VAE made a picture of {size[0]}x{size[1]}, not {settings.width}x{settings.height}",
                code="wrong_size",
            )

    def info(self, settings: DecodeSettings, path: Tier, seconds: float) -> dict[str, Any]:
        """What is told of something decoded."""
        timings = {str(name): taken for name, taken in settings.timings.items()}
        timings["decode_seconds"] = seconds
        return {**settings.info(), "decode_path": path.value, "timings": timings}

    def _check_sample(self, files: dict[str, bytes]) -> None:
        parse_decode_settings(common.text_sample("settings", files["settings"]), self.config.limits)

    def _latents_shape(self, args: dict[str, str]) -> list[int]:
        """Those of the default size: [C, H, W], or [C, F, H, W] where the VAE is one for clips; F is 1 for a picture.

        Of a clip three frames are enough: the first, the second and all others are decoded differently.
        """
        inputs = {given["name"]: given for given in json.loads(args["model_config"])["input"]}
        channels, *free = map(int, inputs["latents"]["dims"])
        limits = self.config.limits
        frames = 3 if limits.makes_video else 1
        sides = self._latent_sides(limits.default_height, limits.default_width)
        return [channels, *[frames] * (len(free) - 2), *sides]

    def _latent_sides(self, height: int, width: int) -> list[int]:
        return [height // self._scale, width // self._scale]
