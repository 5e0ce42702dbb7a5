"""Hostile, damaged and odd image files, and names of files."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

from PIL import Image, ImageCms


def picture(mode: str = "RGB") -> Image.Image:
    """A picture of 48x32 whose top left quarter is red."""
    image = Image.new("RGB", (48, 32), (0, 0, 255))
    image.paste((255, 0, 0), (0, 0, 24, 16))
    return image if mode == "RGB" else image.convert(mode)


def save(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, depth: int, colour: int, data: bytes, *more: bytes) -> bytes:
    """A PNG file by its parts; ``more`` are chunks before the pixels."""
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = (chunk(b"IHDR", head), *more, chunk(b"IDAT", zlib.compress(data)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def with_exif(orientation: object, kind: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return save(picture(), kind, exif=exif, quality=95)


FRAMES = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue")]
WHOLE_PNG = save(picture(), "PNG")
WHOLE_JPEG = save(picture(), "JPEG")
WHOLE_WEBP = save(picture(), "WEBP")
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'

REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "empty_file"),
    "zero bytes": (bytes(1000), "unsupported_image_format"),
    "text": (b"a picture of a fox", "unsupported_image_format"),
    "html": (b"<!doctype html><img src=x>", "unsupported_image_format"),
    "svg": (SVG, "unsupported_image_format"),
    "gif": (save(picture(), "GIF"), "unsupported_image_format"),
    "tiff": (save(picture(), "TIFF"), "unsupported_image_format"),
    "bmp": (save(picture(), "BMP"), "unsupported_image_format"),
    "ico": (save(picture(), "ICO"), "unsupported_image_format"),
    "ppm": (save(picture(), "PPM"), "unsupported_image_format"),
    "jpeg 2000": (save(picture(), "JPEG2000"), "unsupported_image_format"),
    "eps, which would start Ghostscript": (save(picture(), "EPS"), "unsupported_image_format"),
    "pdf": (save(picture(), "PDF"), "unsupported_image_format"),
    "mp4": (b"\0\0\0\x20ftypisom\0\0\2\0isomiso2avc1mp41", "unsupported_image_format"),
    "zip": (b"PK\3\4" + bytes(60), "unsupported_image_format"),
    "png's signature alone": (WHOLE_PNG[:8], "unsupported_image_format"),
    "png, cut": (WHOLE_PNG[:-30], "invalid_image"),
    "png, a bit changed": (WHOLE_PNG[:60] + bytes([WHOLE_PNG[60] ^ 1]) + WHOLE_PNG[61:], "invalid_image"),
    "png without pixels": (png(8, 8, 8, 2, b""), "invalid_image"),
    "png of no size": (png(0, 8, 8, 2, b""), "unsupported_image_format"),
    "png of 20000x20000": (png(20000, 20000, 8, 2, b""), "image_too_large"),
    "png of 2^31 - 1 squared": (png(2**31 - 1, 2**31 - 1, 8, 2, b""), "image_too_large"),
    "png above our limit, below Pillow's": (png(1001, 1000, 1, 0, bytes(126 * 1000)), "image_too_large"),
    "png with a text of 100 MB": (
        png(8, 8, 8, 2, bytes(200), chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(100_000_000)))),
        "invalid_image",
    ),
    "jpeg, cut": (WHOLE_JPEG[: len(WHOLE_JPEG) // 2], "invalid_image"),
    "jpeg's signature alone": (WHOLE_JPEG[:4], "unsupported_image_format"),
    "jpeg, a header of 65500x65500": (
        WHOLE_JPEG.replace(struct.pack(">HH", 32, 48), struct.pack(">HH", 65500, 65500), 1),
        "image_too_large",
    ),
    "webp, cut": (WHOLE_WEBP[: len(WHOLE_WEBP) // 2], "invalid_image"),
    "webp, animated": (save(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:]), "animated_image"),
    "png, animated": (save(FRAMES[0], "PNG", save_all=True, append_images=FRAMES[1:]), "animated_image"),
}

ALLOWED: dict[str, bytes] = {
    "as it should be": WHOLE_PNG,
    "jpeg": WHOLE_JPEG,
    "webp": WHOLE_WEBP,
    "jpeg, progressive": save(picture(), "JPEG", progressive=True),
    "jpeg, grey": save(picture("L"), "JPEG"),
    "jpeg of CMYK": save(picture("CMYK"), "JPEG", quality=100),
    "jpeg of a phone, with a second picture": save(
        picture(), "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8))]
    ),
    "jpeg, turned": with_exif(6),
    "webp, turned": with_exif(8, "WEBP"),
    "jpeg, with an orientation that means nothing": with_exif(65535),
    "jpeg, with a profile and a comment": save(
        picture(),
        "JPEG",
        icc_profile=ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(),
        comment=b"geheim",
    ),
    "jpeg, a damaged exif": with_exif(1)
    .replace(b"Exif\0\0MM", b"Exif\0\0XX")
    .replace(b"Exif\0\0II", b"Exif\0\0XX"),
    "png of 1x1": save(Image.new("RGB", (1, 1)), "PNG"),
    "png of 1x4000": save(Image.new("L", (1, 4000), 9), "PNG"),
    "png of 4000x1": save(Image.new("L", (4000, 1), 9), "PNG"),
    "png of 1 bit": save(picture("1"), "PNG"),
    "png of a palette": save(picture("P"), "PNG"),
    "png of a palette with a transparent colour": save(
        picture("P"), "PNG", transparency=picture("P").getpixel((0, 0))
    ),
    "png of grey with a transparent level": save(picture("L"), "PNG", transparency=29),
    "png of grey and alpha": save(picture("LA"), "PNG"),
    "png of alpha 255": save(picture("RGBA"), "PNG"),
    "png of alpha 1": save(Image.new("RGBA", (48, 32), (9, 9, 9, 1)), "PNG"),
    "png of alpha 0": save(Image.new("RGBA", (48, 32), (9, 9, 9, 0)), "PNG"),
    "png of 16 bits": png(8, 8, 16, 2, (b"\0" + struct.pack(">3H", 0x8000, 0xFFFF, 0) * 8) * 8),
    "png of 16 bits and alpha": png(
        8, 8, 16, 6, (b"\0" + struct.pack(">4H", 0x8000, 0xFFFF, 0, 0xFFFF) * 8) * 8
    ),
    "png of grey of 16 bits": png(8, 8, 16, 0, (b"\0" + struct.pack(">8H", *range(0, 0x10000, 0x2000))) * 8),
    "png that says it has a gamma of 0": png(
        8, 8, 8, 2, (b"\0" + bytes(24)) * 8, chunk(b"gAMA", struct.pack(">I", 0))
    ),
    "png with a text": png(8, 8, 8, 2, (b"\0" + bytes(24)) * 8, chunk(b"tEXt", b"a\0" + b"../../etc/passwd")),
    "png and then svg": WHOLE_PNG + SVG,
    "png and then zip": WHOLE_PNG + b"PK\3\4" + bytes(60),
    "webp with alpha": save(picture("RGBA"), "WEBP", lossless=True),
    "png of 4000x3000": save(Image.new("P", (4000, 3000)), "PNG"),
}

# "CANARY" is replaced by a name that can be looked for.
NAMES = {
    "up": "../../../../tmp/CANARY.png",
    "absolute": "/tmp/CANARY.png",
    "of the data": "data/CANARY.png",
    "of Windows": "..\\..\\CANARY.png",
    "with a drive": "C:\\CANARY.png",
    "of an environment": "$HOME/CANARY.png",
    "of a home": "~/CANARY.png",
    "of a URL": "file:///tmp/CANARY.png",
    "of a shell": "$(touch CANARY);`touch CANARY`|CANARY.png",
    "with an end": "CANARY\0.png",
    "of nothing": "",
    "of dots": "..",
    "long": "CANARY" * 1000 + ".png",
    "right to left": "\u202egnp.CANARY",
    "of no picture": "CANARY.svg",
    "with markup": "<img src=x onerror=alert(1)>CANARY",
}
