"""The encoded image files that a request brings: read within limits, and made what the pipeline is given.

A file is turned as its EXIF orientation says, converted to RGB as diffusers' ``load_image`` does it (transparency is
dropped), scaled until it covers the size that was asked for, and cropped to that size about its centre. What is wholly
transparent, of a mask or of the image itself, is what may change; it is scaled and cropped alike. References beside the
first image keep their proportions, and are scaled down where they are larger than is of use.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from PIL import ExifTags, Image, ImageOps

from diffusion_backend.errors import DiffusionError, invalid

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_BYTES = 50 << 20
# Told by the header, before anything is decoded: a few bytes of PNG can hold a picture of gigabytes.
MAX_PIXELS = 64_000_000
_MAX_SIXTEEN_BITS = 65535
# What turns a picture of that EXIF orientation upright. Pillow's own ``exif_transpose`` writes the rest of the EXIF
# anew, and fails where that is damaged.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class GivenImages:
    """The images of a request, as they are to be seen, and which pixels of the first may change (None: all).

    The first becomes the result; further ones are references.
    """

    images: list[Image.Image]
    part: Image.Image | None

    @property
    def size(self) -> tuple[int, int] | None:
        """(width, height) of the first one; None where there is none."""
        return self.images[0].size if self.images else None

    def fitted(self, size: tuple[int, int]) -> list[Image.Image]:
        """RGB: the first of ``size`` (width, height), the others as they are."""
        first, *others = (image.convert("RGB") for image in self.images)
        return [fit(first, *size), *others]

    def fitted_part(self, size: tuple[int, int]) -> Image.Image | None:
        """``part`` as ``fit`` makes the image of it: no pixel of it is in between.

        Raises:
            DiffusionError: INVALID_ARG, naming ``mask``: nothing that it marks is left.
        """
        if self.part is None:
            return None
        part = ImageOps.fit(self.part, size, Image.Resampling.NEAREST)
        if not part.getbbox():
            raise _no_mask(
                f"marks nothing, or the image's own transparency does, of the {size[0]}x{size[1]} pixels that are "
                "left of 'image' when it is scaled and cropped to that; allowed: a part that is in there, and not "
                "too thin for it"
            )
        return part


def open_images(
    files: Sequence[bytes], mask: bytes | None, *, takes_mask: bool, largest: tuple[int, int]
) -> GivenImages:
    """The images of a request for a model; ``takes_mask``: their transparency is one where there is no ``mask``.

    ``largest`` (width, height): of references beside the first.

    Raises:
        DiffusionError: INVALID_ARG, naming ``image`` or ``mask``: what is wrong with it.
    """
    opened = (open_upright(file) for file in files)
    if not takes_mask:
        return gather(opened, largest)
    return gather(opened, largest, lambda: None if mask is None else open_upright(mask, "mask"))


def gather(
    images: Iterable[Image.Image],
    largest: tuple[int, int],
    mask: Callable[[], Image.Image | None] | None = None,
) -> GivenImages:
    """The images of a request, each of which is opened when its turn comes: there may be many, and each takes memory.

    ``mask`` opens the mask, if there is one; None: transparency marks nothing.

    Raises:
        DiffusionError: INVALID_ARG, naming ``mask``: it is of another size, or marks nothing.
    """
    given: list[Image.Image] = []
    for image in images:
        given.append(shrink(image.convert("RGB"), *largest) if given else image)
    part = editable_part(given[0], mask()) if given and mask is not None else None
    return GivenImages(given, part)


def open_upright(data: bytes, param: str = "image") -> Image.Image:
    """The whole image of a PNG, JPEG or WebP file, as it is to be seen: RGB, or RGBA where its format has transparency.

    Of an animation it is the first frame.

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
        return upright(image)
    except Exception as error:  # what the file holds decides what is raised
        raise invalid(
            param,
            f"'{param}' is a {image.format} file that is damaged or cut short ({error}); allowed: a whole one",
            "invalid_image",
        ) from None


def upright(image: Image.Image) -> Image.Image:
    """A picture that is loaded, as it is to be seen: 8-bit RGB, or RGBA where its format has transparency."""
    orientation = image.getexif().get(ExifTags.Base.Orientation)
    image = _eight_bits(image)
    mode = "RGBA" if image.has_transparency_data else "RGB"
    # A large picture takes hundreds of megabytes: no copy without need. A WebP file holds its decoder, which has three.
    if image.mode != mode or image.format == "WEBP":
        image = image.convert(mode)
    return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


def editable_part(image: Image.Image, mask: Image.Image | None) -> Image.Image | None:
    """Which pixels of an ``open_upright`` image may change: mode L, of its size, 255 where they may, else 0.

    Those where ``mask`` is wholly transparent, or where the image itself is if there is none; None where nothing marks
    any: then all may.

    Raises:
        DiffusionError: INVALID_ARG, naming ``mask``: it is of another size, or marks nothing.
    """
    if mask is None:
        part = _transparent(image)
        return part if part is not None and part.getbbox() else None
    if mask.size != image.size:
        raise _no_mask(
            f"is {mask.width}x{mask.height}, and 'image' {image.width}x{image.height}; allowed: the image's size"
        )
    part = _transparent(mask)
    if part is None or not part.getbbox():
        lacks = "no alpha channel" if part is None else "no pixel that is wholly transparent"
        raise _no_mask(
            f"has {lacks}; allowed: a PNG or WebP file, transparent (alpha 0) where 'image' may change"
        )
    return part


def shrink(image: Image.Image, width: int, height: int) -> Image.Image:
    """``image`` scaled down until it fits into ``width`` x ``height``, in its proportions."""
    scale = min(width / image.width, height / image.height)
    if scale >= 1:
        return image
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(size, Image.Resampling.LANCZOS)


def fit(image: Image.Image, width: int, height: int) -> Image.Image:
    """``image`` scaled until it covers ``width`` x ``height``, and cropped to that about its centre."""
    return ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 bits, which Pillow itself would cut off at 255."""
    if not image.mode.startswith("I"):
        return image
    grey = image.convert("I").point(lambda level: level * (255 / _MAX_SIXTEEN_BITS) + 0.5).convert("L")
    grey.info.pop("transparency", None)  # a level of 16 bits
    return grey


def _transparent(image: Image.Image) -> Image.Image | None:
    """255 where the alpha of an image is 0, else 0; None where it has no alpha."""
    if image.mode != "RGBA":
        return None
    return image.getchannel("A").point(lambda alpha: 255 if alpha == 0 else 0)


def _no_mask(what: str) -> DiffusionError:
    return invalid("mask", f"'mask' {what}", "invalid_mask")


def _too_large(param: str, what: str) -> DiffusionError:
    return invalid(param, f"'{param}' has {what}; allowed: at most {MAX_PIXELS:,} pixels", "image_too_large")
