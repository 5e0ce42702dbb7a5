"""Uploaded image files to clean ones: whatever a client sends, the stages get a plain PNG.

A file is what its bytes say, never what its name or content type does, and only the plugins of the allowed formats
ever look at it. Pixels come out upright (EXIF) and as 8-bit RGB or RGBA; their values are taken as sRGB, as embedded
profiles and all other metadata are dropped.
"""

from __future__ import annotations

import io

import numpy as np
from diffusion_backend.errors import DiffusionError, invalid
from diffusion_backend.input_image import fit, upright
from PIL import Image, UnidentifiedImageError

from openai_adapter.image_files import encode

ALLOWED = "one PNG, JPEG or WebP picture"

_FORMATS = ("PNG", "JPEG", "WEBP")


def to_png(data: bytes, field: str, max_pixels: int, size: tuple[int, int] | None = None) -> bytes:
    """The picture in ``data`` as an RGB PNG file; where it is transparent, it lies on white.

    With ``size`` (width, height) it is what a stage would make of the whole picture (``input_image.fit``).

    Blocks for as long as decoding takes, and needs 12 to 16 bytes of memory a pixel: call it in a worker thread.

    Raises:
        DiffusionError: INVALID_ARG, naming ``field`` and what is allowed.
    """
    image = _on_white(decode(data, field, max_pixels))
    return encode(np.asarray(fit(image, *size) if size else image), "png", 100)


def decode(data: bytes, field: str, max_pixels: int) -> Image.Image:
    """The picture in ``data``, upright, in mode RGB or, where its format has an alpha channel or colour, RGBA.

    Raises:
        DiffusionError: INVALID_ARG, naming ``field`` and what is allowed.
    """
    if not data:
        raise _refuse(field, "is empty", "empty_file")
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            _check_header(image, field, max_pixels)
            image.load()
            return upright(image)
    except (DiffusionError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise _refuse(field, "is no picture of these formats", "unsupported_image_format") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        # Pillow's own limit, which is beyond any of ours.
        raise _refuse(field, f"has more than {max_pixels} pixels", "image_too_large") from None
    except Exception as error:
        # On damaged files Pillow's plugins raise nearly anything, such as SyntaxError and struct.error.
        raise _refuse(field, f"is damaged ({type(error).__name__})", "invalid_image") from None


def _check_header(image: Image.Image, field: str, max_pixels: int) -> None:
    if image.width * image.height > max_pixels:
        size = f"{image.width}x{image.height}"
        raise _refuse(field, f"is {size}, more than {max_pixels} pixels", "image_too_large")
    # Phones put previews and depth maps behind the picture of a JPEG file (MPO): these are no animation.
    frames = getattr(image, "n_frames", 1)
    if frames != 1 and image.format != "MPO":
        raise _refuse(field, f"is animated ({frames} frames)", "animated_image")


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image)
    return white


def _refuse(field: str, what: str, code: str) -> DiffusionError:
    return invalid(field, f"the file in '{field}' {what}; allowed: {ALLOWED}", code)
