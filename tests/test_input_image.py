"""Image files of requests: what is made of them, and what is refused by name."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from diffusers.utils import load_image
from diffusion_backend import input_image
from diffusion_backend.errors import DiffusionError, Status
from PIL import Image

pytestmark = pytest.mark.parallel

WIDTH, HEIGHT = 24, 12
ORIENTATION = 0x0112


def picture(mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def saved(image: Image.Image, file_format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def read(data: bytes, width: int, height: int) -> Image.Image:
    given = input_image.open_images([data], None, takes_mask=False, largest=LARGEST)
    (image,) = given.fitted((width, height))
    return image


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header speaks of so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 64))


@pytest.mark.parametrize(
    ("mode", "file_format"),
    [
        ("RGB", "PNG"),
        ("RGBA", "PNG"),
        ("LA", "PNG"),
        ("P", "PNG"),
        ("1", "PNG"),
        ("L", "JPEG"),
        ("CMYK", "JPEG"),
        ("RGBA", "WEBP"),
    ],
)
def test_it_is_what_diffusers_own_loader_makes(mode: str, file_format: str) -> None:
    data = saved(picture(mode), file_format)
    expected = load_image(Image.open(io.BytesIO(data)))
    made = read(data, WIDTH, HEIGHT)
    assert (made.mode, made.size) == ("RGB", (WIDTH, HEIGHT))
    np.testing.assert_array_equal(np.asarray(made), np.asarray(expected))


def test_sixteen_bits_are_scaled_not_cut_off() -> None:
    grey = np.linspace(0, 65535, WIDTH * HEIGHT).reshape(HEIGHT, WIDTH).astype(np.uint16)
    made = np.asarray(read(saved(Image.fromarray(grey), "PNG"), WIDTH, HEIGHT))
    assert np.abs(made[..., 0] - grey / 257).max() <= 1


def test_it_is_turned_as_its_exif_says() -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6  # to be turned by 90 degrees clockwise
    made = read(saved(picture(), "PNG", exif=exif), HEIGHT, WIDTH)
    np.testing.assert_array_equal(np.asarray(made), np.rot90(np.asarray(picture()), -1))


def test_it_covers_the_size_and_is_cropped_about_its_centre() -> None:
    thirds = np.zeros((30, 90, 3), np.uint8)
    thirds[:, 30:60] = 255
    made = np.asarray(read(saved(Image.fromarray(thirds), "PNG"), 60, 60))
    assert made.shape == (60, 60, 3)
    assert made[:, 8:-8].min() > 250, "only the middle third is left"


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (b"", "invalid_image", "no image file that can be read; allowed: PNG, JPEG, WebP"),
        (b"GIF89a", "invalid_image", "no image file"),
        (saved(picture(), "BMP"), "invalid_image", "no image file"),
        (saved(picture(), "PNG")[:200], "invalid_image", "a PNG file that is damaged or cut short"),
        (saved(picture(), "JPEG")[:-200], "invalid_image", "a JPEG file that is damaged or cut short"),
        (saved(picture(), "WEBP")[:100], "invalid_image", "no image file|a WEBP file that is damaged"),
        (bomb(9000, 9000), "image_too_large", "9000x9000 pixels; allowed: at most 64,000,000 pixels"),
        (bomb(60000, 60000), "image_too_large", "allowed: at most 64,000,000 pixels"),
        (bomb(1, 0), "invalid_image", "no image file|damaged"),
    ],
)
def test_refusals_name_the_image(data: bytes, code: str, words: str) -> None:
    with pytest.raises(DiffusionError, match=words) as caught:
        read(data, WIDTH, HEIGHT)
    error = caught.value
    assert (error.param, error.code, error.status) == ("image", code, Status.INVALID_ARG)


def test_a_file_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_image, "MAX_BYTES", 10)
    with pytest.raises(DiffusionError, match=r"'image' has .* bytes; allowed: at most 10"):
        read(saved(picture(), "PNG"), WIDTH, HEIGHT)


def with_alpha(
    alpha: int, size: tuple[int, int] = (WIDTH, HEIGHT), box: tuple[int, int, int, int] = (0, 0, 0, 0)
) -> bytes:
    """A PNG of this alpha, but for a box of 0."""
    image = picture("RGBA").resize(size)
    image.putalpha(alpha)
    image.paste((1, 2, 3, 0), box)
    return saved(image, "PNG")


LARGEST = (1024, 1024)
LEFT = (0, 0, WIDTH // 2, HEIGHT)


@pytest.mark.parametrize(
    ("image", "mask"),
    [
        (saved(picture(), "JPEG"), with_alpha(255, box=LEFT)),
        (saved(picture(), "PNG"), with_alpha(1, box=LEFT)),  # what is hardly to be seen stays, too
        (with_alpha(255, box=LEFT), None),
        (
            with_alpha(255, box=(3, 3, 5, 5)),
            with_alpha(255, box=LEFT),
        ),  # the mask counts, and not the image's own
    ],
)
def test_what_is_transparent_may_change(image: bytes, mask: bytes | None) -> None:
    given = input_image.open_images([image], mask, takes_mask=True, largest=LARGEST)
    part = np.asarray(given.fitted_part((2 * WIDTH, 2 * HEIGHT)))
    assert (part[:, :WIDTH] == 255).all()
    assert (part[:, WIDTH:] == 0).all()


@pytest.mark.parametrize("image", [saved(picture(), "PNG"), with_alpha(255), with_alpha(1)])
def test_an_image_without_a_transparent_pixel_may_change_as_a_whole(image: bytes) -> None:
    assert (
        input_image.open_images([image], None, takes_mask=True, largest=LARGEST).fitted_part((WIDTH, HEIGHT))
        is None
    )


def test_colours_beneath_transparency_are_kept() -> None:
    (image,) = input_image.open_images(
        [with_alpha(255, box=LEFT)], None, takes_mask=True, largest=LARGEST
    ).fitted((WIDTH, HEIGHT))
    assert image.getpixel((0, 0)) == (1, 2, 3)


@pytest.mark.parametrize(
    ("mask", "code", "words"),
    [
        (with_alpha(255), "invalid_mask", "no pixel that is wholly transparent"),
        (saved(picture(), "PNG"), "invalid_mask", "no alpha channel"),
        (with_alpha(0, (WIDTH, HEIGHT + 1)), "invalid_mask", "'mask' is 24x13, and 'image' 24x12"),
        (b"GIF89a", "invalid_image", "'mask' is no image file"),
        (bomb(9000, 9000), "image_too_large", "'mask' has 9000x9000 pixels"),
    ],
)
def test_refusals_name_the_mask(mask: bytes, code: str, words: str) -> None:
    with pytest.raises(DiffusionError, match=words) as caught:
        input_image.open_images([saved(picture(), "PNG")], mask, takes_mask=True, largest=LARGEST)
    assert (caught.value.param, caught.value.code) == ("mask", code)


def test_further_images_keep_their_size_but_beyond_the_largest() -> None:
    for largest, size in {LARGEST: (WIDTH, HEIGHT), (12, 64): (12, 6)}.items():
        files = [saved(picture(), "PNG")] * 2
        given = input_image.open_images(files, None, takes_mask=True, largest=largest)
        assert given.size == (WIDTH, HEIGHT)
        assert [image.size for image in given.fitted((8, 8))] == [(8, 8), size]


def test_colours_beneath_transparency_of_further_images_are_kept() -> None:
    files = [saved(picture(), "PNG"), saved(Image.new("RGBA", (64, 64), (250, 0, 0, 0)), "PNG")]
    for largest in (LARGEST, (32, 32)):
        _, image = input_image.open_images(files, None, takes_mask=True, largest=largest).fitted((8, 8))
        assert image.getpixel((5, 5)) == (250, 0, 0)


@pytest.mark.parametrize("box", [(0, 0, 4, HEIGHT), (11, 0, 12, 1)])
def test_what_is_marked_and_not_left_is_said(box: tuple[int, int, int, int]) -> None:
    """Cropped away, or too thin."""
    given = input_image.open_images([with_alpha(255, box=box)], None, takes_mask=True, largest=LARGEST)
    assert given.fitted_part((WIDTH, HEIGHT)) is not None
    with pytest.raises(DiffusionError, match=r"marks nothing, .* of the 3x3 pixels") as caught:
        given.fitted_part((3, 3))
    assert (caught.value.param, caught.value.code) == ("mask", "invalid_mask")


def test_transparent_16_bit_grey_is_grey() -> None:
    """Its transparent level is one of 65536: there is none of it in 8 bits."""
    image = Image.fromarray(np.linspace(0, 65535, WIDTH * HEIGHT).astype(np.uint16).reshape(HEIGHT, WIDTH))
    read_back = input_image.open_upright(saved(image, "PNG", transparency=5000))
    assert read_back.mode == "RGB"
    levels = np.asarray(read_back)[..., 0].astype(float).ravel()
    np.testing.assert_allclose(levels, np.linspace(0, 255, WIDTH * HEIGHT), atol=0.51)


def test_damaged_exif_is_left_alone() -> None:
    """Only its orientation counts."""
    exif = Image.Exif()
    exif[0x0112] = 6
    whole = exif.tobytes()
    file = saved(picture(), "JPEG", exif=whole + b"\xff" * 7)
    assert input_image.open_upright(file).size == (HEIGHT, WIDTH)
