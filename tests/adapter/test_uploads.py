"""Hostile, damaged and odd image files."""

from __future__ import annotations

import io
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from diffusion_backend.errors import DiffusionError, Status
from hostile_files import (
    REFUSED,
    SVG,
    WHOLE_JPEG,
    WHOLE_PNG,
    WHOLE_WEBP,
    picture,
    png,
    save,
    with_exif,
)
from openai_adapter.uploads import decode, to_png
from PIL import Image, ImageCms

MAX_PIXELS = 1_000_000
Pixels = npt.NDArray[np.uint8]


def read(png: bytes) -> Pixels:
    with Image.open(io.BytesIO(png)) as image:
        assert (image.format, image.mode) == ("PNG", "RGB")
        assert set(image.info) == set()
        return np.asarray(image)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    data, code = REFUSED[name]
    with pytest.raises(DiffusionError) as caught:
        to_png(data, "input_reference", MAX_PIXELS)
    error = caught.value
    assert (error.status, error.param) == (Status.INVALID_ARG, "input_reference")
    assert error.message.startswith("the file in 'input_reference' ")
    assert error.message.endswith("; allowed: one PNG, JPEG or WebP picture")
    assert error.code == code


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_colours(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {"quality": 100, "subsampling": 0}
    pixels = read(to_png(save(picture(), kind, **options), "image", MAX_PIXELS))
    assert np.abs(pixels.astype(int) - np.asarray(picture()).astype(int)).max() <= (
        2 if kind == "JPEG" else 0
    )


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "CMYK"])
def test_modes(mode: str) -> None:
    kind = "JPEG" if mode == "CMYK" else "PNG"
    given = picture(mode)
    pixels = read(to_png(save(given, kind), "image", MAX_PIXELS))
    assert np.abs(pixels.astype(int) - np.asarray(given.convert("RGB")).astype(int)).mean() < 3
    assert decode(save(given, kind), "image", MAX_PIXELS).mode == ("RGBA" if "A" in mode else "RGB")


@pytest.mark.parametrize("with_alpha", [False, True])
def test_16_bits_a_channel(with_alpha: bool) -> None:
    samples = (0x8000, 0xFFFF, 0x0000, 0xFFFF)[: 4 if with_alpha else 3]
    row = b"\0" + struct.pack(f">{len(samples)}H", *samples) * 8
    pixels = read(to_png(png(8, 8, 16, 6 if with_alpha else 2, row * 8), "image", MAX_PIXELS))
    assert (pixels == (0x80, 0xFF, 0)).all()


def test_16_bit_grey_is_scaled() -> None:
    row = b"\0" + struct.pack(">8H", *range(0, 0x10000, 0x2000))
    pixels = read(to_png(png(8, 8, 16, 0, row * 8), "image", MAX_PIXELS))
    assert pixels[0, :, 0].tolist() == [round(level / 257) for level in range(0, 0x10000, 0x2000)]


def test_transparency_lies_on_white() -> None:
    image = Image.new("RGBA", (3, 1))
    for x, alpha in enumerate((0, 128, 255)):
        image.putpixel((x, 0), (200, 0, 0, alpha))
    data = save(image, "PNG")
    pixels = read(to_png(data, "image", MAX_PIXELS)).astype(int)
    assert np.abs(pixels[0] - [[255, 255, 255], [227, 127, 127], [200, 0, 0]]).max() <= 1
    assert decode(data, "mask", MAX_PIXELS).getchannel("A").tobytes() == bytes([0, 128, 255])


@pytest.mark.parametrize(
    ("given", "colour"),
    [(Image.new("P", (4, 4), 1), 1), (Image.new("L", (4, 4), 7), 7), (Image.new("RGB", (4, 4)), (0, 0, 0))],
)
def test_a_transparent_colour_lies_on_white(given: Image.Image, colour: Any) -> None:
    if given.mode == "P":
        given.putpalette([0, 0, 0, 9, 9, 9])
    data = save(given, "PNG", transparency=colour)
    assert (read(to_png(data, "image", MAX_PIXELS)) == 255).all()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(orientation: int, kind: str) -> None:
    pixels = read(to_png(with_exif(orientation, kind), "image", MAX_PIXELS))
    assert pixels.shape == ((32, 48, 3) if orientation < 5 else (48, 32, 3))
    bottom, right = {1: (0, 0), 2: (0, 1), 3: (1, 1), 4: (1, 0), 5: (0, 0), 6: (0, 1), 7: (1, 1), 8: (1, 0)}[
        orientation
    ]
    height, width, _ = pixels.shape
    red, green, blue = map(int, pixels[height // 4 + bottom * height // 2, width // 4 + right * width // 2])
    assert red > 230
    assert green < 25
    assert blue < 25


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_means_nothing(orientation: int) -> None:
    assert read(to_png(with_exif(orientation), "image", MAX_PIXELS)).shape == (32, 48, 3)


def test_metadata_is_dropped() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    data = save(picture(), "JPEG", icc_profile=profile, comment=b"geheim", exif=Image.Exif(), dpi=(300, 300))
    assert b"geheim" in data
    read(to_png(data, "image", MAX_PIXELS))


def test_the_picture_of_a_phone_s_jpeg() -> None:
    data = save(picture(), "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8))])
    assert read(to_png(data, "image", MAX_PIXELS)).shape == (32, 48, 3)


def test_what_follows_the_picture_does_not_matter() -> None:
    assert to_png(WHOLE_PNG + SVG, "image", MAX_PIXELS) == to_png(WHOLE_PNG, "image", MAX_PIXELS)


def test_as_many_pixels_as_are_allowed() -> None:
    data = save(Image.new("1", (1000, 1000)), "PNG")
    assert read(to_png(data, "image", MAX_PIXELS)).shape == (1000, 1000, 3)


@pytest.mark.parametrize(
    "make", [lambda: WHOLE_PNG, lambda: WHOLE_JPEG, lambda: WHOLE_WEBP, lambda: with_exif(6)]
)
def test_random_damage_is_refused_or_survived(make: Callable[[], bytes]) -> None:
    """Nothing but our own error ever comes out."""
    random_numbers = random.Random(0)
    refused = 0
    for _ in range(300):
        data = bytearray(make())
        for _ in range(random_numbers.randint(1, 4)):
            data[random_numbers.randrange(len(data))] = random_numbers.randrange(256)
        try:
            to_png(bytes(data), "image", MAX_PIXELS)
        except DiffusionError:
            refused += 1
    assert refused


@pytest.mark.parametrize(
    ("mode", "kind", "options"),
    [
        ("P", "PNG", {"transparency": 0}),
        ("I;16", "PNG", {}),
        ("RGBA", "PNG", {}),
        ("RGB", "WEBP", {"lossless": True}),
        ("RGBA", "WEBP", {"lossless": True}),
    ],
)
def test_memory_is_bounded_by_pixels(mode: str, kind: str, options: dict[str, int]) -> None:
    """A header of 400 MP takes nothing, and the largest picture that is allowed 12 to 16 bytes a pixel."""
    script = f"""if True:
        from PIL import Image
        from peak_memory import peak_memory
        from openai_adapter.uploads import to_png
        from diffusion_backend.errors import DiffusionError
        from hostile_files import REFUSED, save
        data = save(Image.new("{mode}", (4000, 4000)), "{kind}", **{options})
        start = peak_memory()
        for name in ("png of 20000x20000", "png of 2^31 - 1 squared"):
            try:
                to_png(REFUSED[name][0], "image", 16_000_000)
            except DiffusionError:
                pass
        refused = peak_memory()
        to_png(data, "image", 16_000_000)
        print(refused - start, peak_memory() - start)
    """
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=__file__.rpartition("/")[0],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    refused, largest = map(int, done.stdout.split())
    assert refused < 4 * 2**20
    assert largest < 17 * 16_000_000
