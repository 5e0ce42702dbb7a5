"""Frames to the files of a video, slice by slice, so that no clip is ever in memory as a whole.

The files of a clip, by name:

- ``video.mp4``: H.264 (yuv420p, BT.709), with its index in front (*faststart*) so that a player can start before it
  has all. 4:2:0 needs even sides: where one is odd, its last row or column is repeated once.
- ``thumbnail.webp``: the first frame, as players show it before they start; its longer side at most 512 pixels.
- ``spritesheet.webp``: up to 16 frames, evenly spaced from the first to the last, in rows of 4 (or of all, if they
  are fewer) from the top left; each at most 256 pixels on its longer side. An unfinished last row ends in black.

The same frames give the same bytes.
"""

from __future__ import annotations

import io
import math
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from fractions import Fraction
from types import TracebackType
from typing import Self

import av
import numpy as np
import numpy.typing as npt
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc, Interpolation
from PIL import Image

Frames = npt.NDArray[np.uint8]

MEDIA_TYPES: Mapping[str, str] = {
    "video.mp4": "video/mp4",
    "thumbnail.webp": "image/webp",
    "spritesheet.webp": "image/webp",
}

_THUMBNAIL_SIDE = 512
_SPRITES = 16
_SPRITE_COLUMNS = 4
_SPRITE_SIDE = 256
_WEBP_QUALITY = 85
_ENCODER_OPTIONS = {
    "crf": "18",  # hardly told from the frames
    "preset": "veryfast",  # at this crf it costs bytes, not quality; and it looks only 10 frames ahead
    # Without it, x264's code for AVX-512 (in the macroblock tree) gives other bytes from run to run.
    "x264-params": "cpu-independent=1",
}
# "bitexact" keeps the versions of libraries out of the file.
_CONTAINER_OPTIONS = {"movflags": "+faststart", "fflags": "+bitexact"}


class VideoEncoder:
    """An MP4 file that is written while frames arrive. All methods block; use it as a context manager."""

    def __init__(self, fps: float | Fraction, width: int, height: int) -> None:
        """``fps`` are frames per second; sizes are those of the frames, in pixels.

        Raises:
            ValueError: one of them is not positive.
        """
        if not (0 < fps < math.inf and width > 0 and height > 0):
            raise ValueError(f"fps {fps}, width {width}, height {height}; allowed: positive numbers")
        self._shape = (height, width, 3)
        self._padding = ((0, 0), (0, height % 2), (0, width % 2), (0, 0))
        self._count = 0
        self._resources = ExitStack()
        with ExitStack() as resources:
            # It has no name, so it is gone with this process however that ends. Moving the index to the front needs a
            # path to read the file by; Linux has one.
            self._file = resources.enter_context(tempfile.TemporaryFile(prefix="video-"))
            self._container = resources.enter_context(
                av.open(f"/proc/self/fd/{self._file.fileno()}", "w", "mp4", options=_CONTAINER_OPTIONS)
            )
            rate = Fraction(fps).limit_denominator(1001)
            self._stream = self._container.add_stream("libx264", rate, options=_ENCODER_OPTIONS)
            codec = self._stream.codec_context
            codec.width, codec.height = width + width % 2, height + height % 2
            codec.pix_fmt = "yuv420p"
            codec.time_base = 1 / rate
            codec.thread_count = (
                1  # with more the bytes depend on how many; clips are encoded side by side anyway
            )
            codec.colorspace = Colorspace.ITU709
            codec.color_primaries = ColorPrimaries.BT709
            codec.color_trc = ColorTrc.BT709
            codec.color_range = ColorRange.MPEG
            self._resources = resources.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, frames: Frames) -> None:
        """Encode the next frames, uint8 [F, H, W, 3], RGB.

        Raises:
            ValueError: they have another shape or dtype.
        """
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[1:] != self._shape:
            raise ValueError(f"frames are {frames.dtype} {frames.shape}, not uint8 (F, *{self._shape})")
        for number in range(len(frames)):
            pixels = np.pad(frames[number : number + 1], self._padding, mode="edge")[0]
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(
                format="yuv420p",
                dst_colorspace=Colorspace.ITU709,
                dst_color_range=ColorRange.MPEG,
                interpolation=Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.BITEXACT,
            )
            frame.pts, frame.duration = self._count, 1
            frame.time_base = self._stream.codec_context.time_base
            self._container.mux(self._stream.encode(frame))
            self._count += 1

    def finish(self) -> bytes:
        """The whole file. Nothing can be added afterwards.

        Raises:
            ValueError: there is no frame.
        """
        if not self._count:
            raise ValueError("a video needs a frame")
        self._container.mux(self._stream.encode())
        self._container.close()
        self._file.seek(0)
        return self._file.read()

    def close(self) -> None:
        """Let go of everything, finished or not."""
        self._resources.close()


class Spritesheet:
    """A grid of a clip's frames, filled in while they pass by."""

    def __init__(self, num_frames: int, width: int, height: int) -> None:
        sprites = min(num_frames, _SPRITES)
        columns = min(sprites, _SPRITE_COLUMNS)
        self._tile = _fit(width, height, _SPRITE_SIDE)
        self._places = {
            round(sprite * (num_frames - 1) / max(sprites - 1, 1)): divmod(sprite, columns)
            for sprite in range(sprites)
        }
        rows = math.ceil(sprites / columns)
        self._sheet = Image.new("RGB", (columns * self._tile[0], rows * self._tile[1]))

    def add(self, number: int, frame: Frames) -> None:
        """Frame ``number`` of the clip, uint8 [H, W, 3]; most are passed over."""
        if number in self._places:
            row, column = self._places[number]
            tile = Image.fromarray(frame).resize(self._tile, Image.Resampling.LANCZOS)
            self._sheet.paste(tile, (column * self._tile[0], row * self._tile[1]))

    def finish(self) -> bytes:
        """The sheet as a WebP file."""
        return _webp(self._sheet)


class VideoFiles:
    """All files of one clip from its frames. All methods block; use it as a context manager."""

    def __init__(self, num_frames: int, fps: float | Fraction, width: int, height: int) -> None:
        """A clip of ``num_frames`` frames of ``width`` x ``height`` pixels, ``fps`` of them a second.

        Raises:
            ValueError: one of them is not positive.
        """
        if num_frames < 1:
            raise ValueError(f"num_frames is {num_frames}; allowed: 1 or more")
        self._num_frames = num_frames
        self._count = 0
        self._thumbnail = b""
        self._thumbnail_size = _fit(width, height, _THUMBNAIL_SIDE)
        self._sheet = Spritesheet(num_frames, width, height)
        self._video = VideoEncoder(fps, width, height)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, frames: Frames) -> None:
        """Take the next frames, uint8 [F, H, W, 3], RGB; none of them is kept.

        Raises:
            ValueError: they have another shape or dtype, or are more than there should be.
        """
        if self._count + len(frames) > self._num_frames:
            raise ValueError(f"{self._count + len(frames)} frames of a clip of {self._num_frames}")
        self._video.add(frames)
        for frame in frames:
            if not self._count:
                image = Image.fromarray(frame).resize(self._thumbnail_size, Image.Resampling.LANCZOS)
                self._thumbnail = _webp(image)
            self._sheet.add(self._count, frame)
            self._count += 1

    def finish(self) -> dict[str, bytes]:
        """Every file by its name, one of ``MEDIA_TYPES``. Nothing can be added afterwards.

        Raises:
            ValueError: frames are missing.
        """
        if self._count != self._num_frames:
            raise ValueError(f"{self._count} frames of a clip of {self._num_frames}")
        return {
            "video.mp4": self._video.finish(),
            "thumbnail.webp": self._thumbnail,
            "spritesheet.webp": self._sheet.finish(),
        }

    def close(self) -> None:
        """Let go of everything, finished or not."""
        self._video.close()


def _fit(width: int, height: int, longest: int) -> tuple[int, int]:
    """The size at which neither side is longer than ``longest``; never larger than it was."""
    scale = min(1.0, longest / max(width, height))
    return max(1, round(width * scale)), max(1, round(height * scale))


def _webp(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "WEBP", quality=_WEBP_QUALITY)
    return file.getvalue()
