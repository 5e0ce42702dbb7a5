"""The encoded image files that a request brings: read within limits, and made what the pipeline is given.

A file is turned as its EXIF orientation says, converted to RGB as diffusers' ``load_image`` does it (transparency is
dropped), scaled until it covers the size that was asked for, and cropped to that size about its centre.
"""

from __future__ import annotations

import io

from PIL import Image, ImageOps

from diffusion_backend.errors import DiffusionError, invalid

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_BYTES = 50 << 20
# Told by the header, before anything is decoded: a few bytes of PNG can hold a picture of gigabytes.
MAX_PIXELS = 64_000_000
_MAX_SIXTEEN_BITS = 65535


def read_image(data: bytes, width: int, height: int, param: str = "image") -> Image.Image:
    """The RGB image of ``width`` x ``height`` that a PNG, JPEG or WebP file shows; of an animation the first frame.

    Raises:
        DiffusionError: INVALID_ARG, naming ``param``: it is none of them, damaged, or larger than is allowed.
    """
    if len(data) > MAX_BYTES:
        raise invalid(
            param, f"'{param}' has {len(data)} bytes; allowed: at most {MAX_BYTES}", "image_too_large"
        )
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise _too_large(param, "more pixels than that") from None
    except Exception:  # a damaged header fails in dozens of ways
        raise invalid(
            param, f"'{param}' is no image file that can be read; allowed: PNG, JPEG, WebP", "invalid_image"
        ) from None
    if image.width * image.height > MAX_PIXELS:
        raise _too_large(param, f"{image.width}x{image.height} pixels")
    try:
        image.load()
        upright = _eight_bits(ImageOps.exif_transpose(image)).convert("RGB")
    except Exception as error:  # what the file holds decides what is raised
        raise invalid(
            param,
            f"'{param}' is a {image.format} file that is damaged or cut short ({error}); allowed: a whole one",
            "invalid_image",
        ) from None
    return fit(upright, width, height)


def fit(image: Image.Image, width: int, height: int) -> Image.Image:
    """``image`` scaled until it covers ``width`` x ``height``, and cropped to that about its centre."""
    return ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 bits, which Pillow itself would cut off at 255."""
    if not image.mode.startswith("I"):
        return image
    return image.convert("I").point(lambda level: level * (255 / _MAX_SIXTEEN_BITS)).convert("L")


def _too_large(param: str, what: str) -> DiffusionError:
    return invalid(param, f"'{param}' has {what}; allowed: at most {MAX_PIXELS:,} pixels", "image_too_large")
