from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
import pytest
from openai_adapter.image_files import encode
from PIL import Image

Pixels = npt.NDArray[np.uint8]


@pytest.fixture
def pixels() -> Pixels:
    """A picture with gradients and edges, uint8 [48, 64, 3]."""
    y, x = np.mgrid[:48, :64]
    return np.stack([x * 4, y * 5, (x // 8 + y // 8) % 2 * 255], axis=-1).astype(np.uint8)


def read(file: bytes) -> tuple[str | None, Pixels]:
    image = Image.open(io.BytesIO(file))
    return image.format, np.asarray(image.convert("RGB"))


def test_png_is_exact_and_repeatable(pixels: Pixels) -> None:
    file = encode(pixels, "png", 100)
    kind, decoded = read(file)
    assert kind == "PNG"
    assert (decoded == pixels).all()
    assert encode(pixels.copy(), "png", 100) == file


@pytest.mark.parametrize("output_format", ["jpeg", "webp"])
def test_compression_is_the_quality_of_the_file(pixels: Pixels, output_format: str) -> None:
    files = [encode(pixels, output_format, quality) for quality in (0, 20, 60, 100)]
    sizes = [len(file) for file in files]
    assert sizes == sorted(set(sizes))
    kind, decoded = read(files[-1])
    assert kind == output_format.upper()
    assert decoded.shape == pixels.shape
    assert np.abs(decoded.astype(int) - pixels.astype(int)).mean() < 16
