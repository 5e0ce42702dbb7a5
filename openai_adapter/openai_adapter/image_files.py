"""Pixels to image files."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image

# format -> (file extension, content type)
FORMATS = {
    "png": ("png", "image/png"),
    "jpeg": ("jpg", "image/jpeg"),
    "webp": ("webp", "image/webp"),
}
CONTENT_TYPES = dict(FORMATS.values())


def encode(pixels: npt.NDArray[np.uint8], output_format: str, quality: int) -> bytes:
    """An image file of ``pixels``, uint8 [H, W, 3]. The same pixels give the same bytes.

    ``quality`` (0 to 100) is the file's own and concerns JPEG and WebP; PNG is always exact.
    """
    image = Image.fromarray(pixels)
    file = io.BytesIO()
    if output_format == "png":
        # Level 1 is several times faster than the default and hardly larger for generated pictures.
        image.save(file, "PNG", compress_level=1)
    elif output_format == "jpeg":
        # Whoever asks for the best file does not want its colours at half the resolution.
        image.save(file, "JPEG", quality=quality, subsampling="4:4:4" if quality >= 90 else "4:2:0")
    else:
        image.save(file, "WEBP", quality=quality)
    return file.getvalue()
