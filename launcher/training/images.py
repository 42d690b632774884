"""Pictures as RGB pixels and their size without decoding. No torch."""

from __future__ import annotations

import io
import math
from functools import lru_cache

import PIL
import PIL.Image

from launcher.training.rows import Image, Video

MAX_ASPECT = 200  # longer side over shorter one, the limit of Qwen's own resize rule
BACKGROUND = (255, 255, 255)  # what shows through transparent pixels
ORIENTATION = 0x0112  # EXIF tag
SWAPS_SIDES = (5, 6, 7, 8)
TRANSPOSE = {
    2: PIL.Image.Transpose.FLIP_LEFT_RIGHT,
    3: PIL.Image.Transpose.ROTATE_180,
    4: PIL.Image.Transpose.FLIP_TOP_BOTTOM,
    5: PIL.Image.Transpose.TRANSPOSE,
    6: PIL.Image.Transpose.ROTATE_270,
    7: PIL.Image.Transpose.TRANSVERSE,
    8: PIL.Image.Transpose.ROTATE_90,
}
LARGE = 1 << 24  # pixels; no model's own limit is higher
STRIP = 1 << 22  # pixels converted at a time of a picture above that


class MediaError(ValueError):
    """A picture or film that can't be used; the message names its path and the reason."""

    def __init__(self, media: Image | Video, reason: str) -> None:
        super().__init__(f"{media}: {reason}")


class ImageError(MediaError):
    """A picture that can't be used."""


def open_image(image: Image, size: tuple[int, int] | None = None) -> PIL.Image.Image:
    """Decode a picture fully, as RGB the way people see it; raises ImageError.

    Turned by its EXIF orientation, transparency on white, 16-bit grey scaled to 8 bits, CMYK and palettes
    converted; of an animation the first frame. With `size`, the (width, height) it will be scaled to, a picture of
    more than LARGE pixels comes in a smaller one that is still twice as wide and high, so that a file of a few kB
    can't take gigabytes.
    """
    try:
        with _open(image) as opened:
            orientation = _orientation(opened)
            spare = 1
            if size is not None and opened.width * opened.height > LARGE:
                stored = size[::-1] if orientation in SWAPS_SIDES else size
                opened.draft("RGB", (2 * stored[0], 2 * stored[1]))  # JPEG alone can decode a half, quarter or eighth
                spares = (side // (2 * wanted) for side, wanted in zip(opened.size, stored, strict=True))
                spare = max(1, min(*spares, 16))
            opened.load()
            picture = _to_rgb(opened) if spare == 1 else _reduced(opened, spare)
            return picture.transpose(TRANSPOSE[orientation]) if orientation in TRANSPOSE else picture
    except Exception as error:  # Pillow's decoders raise many kinds, struct.error and SyntaxError among them
        raise _explained(image, error) from error


def image_size(image: Image) -> tuple[int, int]:
    """(width, height) as `open_image` gives them, read from the file's header; raises ImageError.

    Remembered for files: a picture that is bytes would stay in memory with its size.
    """
    return _size(image) if image.data is not None else known_size(image)


@lru_cache(maxsize=1 << 16)
def known_size(image: Image) -> tuple[int, int]:
    """`image_size` of a picture in a file; `cache_clear` forgets what files were."""
    return _size(image)


def _size(image: Image) -> tuple[int, int]:
    try:
        with _open(image) as opened:
            width, height = opened.size
            return (height, width) if _orientation(opened) in SWAPS_SIDES else (width, height)
    except Exception as error:
        raise _explained(image, error) from error


def check_image(image: Image, *, decode: bool) -> None:
    """Raise ImageError for a picture that training couldn't use; its pixels are read only with `decode`."""
    width, height = image_size(image)
    try:
        check_aspect(height, width)
    except ValueError as error:
        raise ImageError(image, str(error)) from None
    if decode:
        open_image(image, (1, 1))


def check_aspect(height: float, width: float) -> None:
    """Raise ValueError for a strip that Qwen's resize rule refuses."""
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ValueError(f"{width} x {height} px: one side is more than {MAX_ASPECT} times the other")


def smart_resize(height: float, width: float, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(height, width) after Qwen-VL's resize: multiples of `factor`, area within the limits, shape kept.

    `factor` is patch size times merge size (32 for Qwen3-VL). Sides are never below one factor, so a long strip
    may exceed `max_pixels`. Raises ValueError for an aspect ratio above 200. Same numbers as transformers'
    Qwen2VLImageProcessor, without importing torch.

    Example:
        >>> smart_resize(1700, 2200, factor=32, min_pixels=4096, max_pixels=1310720)
        (992, 1280)
    """
    check_aspect(height, width)
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor**2 > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows, columns = (max(1, math.floor(side / shrink / factor)) for side in (height, width))
    elif rows * columns * factor**2 < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * grow / factor) for side in (height, width))
    return rows * factor, columns * factor


def _open(image: Image) -> PIL.Image.Image:
    if image.data is not None:
        return PIL.Image.open(io.BytesIO(image.data))
    assert image.path is not None
    if image.span is None:
        return PIL.Image.open(image.path)
    offset, length = image.span
    with open(image.path, "rb") as file:
        file.seek(offset)
        data = file.read(length)
    if len(data) < length:
        raise ValueError(f"{image.path} ends before byte {offset + length}")
    return PIL.Image.open(io.BytesIO(data))


def _orientation(opened: PIL.Image.Image) -> int:
    """EXIF orientation as the header tells it; 1 for TIFF, which Pillow turns by itself.

    The base class's reader: PNG's own would decode all pixels to look for EXIF behind them.
    """
    if opened.format == "TIFF":
        return 1
    return int(PIL.Image.Image.getexif(opened).get(ORIENTATION, 1))


def _to_rgb(picture: PIL.Image.Image) -> PIL.Image.Image:
    if picture.mode.startswith("I"):
        return _from_16_bit(picture)
    if picture.mode == "F":
        raise ValueError("floating-point pixels have no stated range; save it with 8 or 16 bits")
    if "A" in picture.mode or "a" in picture.mode or "transparency" in picture.info:
        layer = picture.convert("RGBA")
        paper = PIL.Image.new("RGBA", layer.size, (*BACKGROUND, 255))
        return PIL.Image.alpha_composite(paper, layer).convert("RGB")
    return picture.convert("RGB") if picture.mode != "RGB" else picture


def _reduced(picture: PIL.Image.Image, factor: int) -> PIL.Image.Image:
    """RGB at 1/factor of both sides, strip by strip: converted whole, a large picture takes many times its memory."""
    width, height = -(-picture.width // factor), -(-picture.height // factor)
    small = PIL.Image.new("RGB", (width, height))
    rows = max(1, STRIP // (picture.width * factor)) * factor
    for top in range(0, picture.height, rows):
        strip = picture.crop((0, top, picture.width, min(top + rows, picture.height)))
        strip.info = picture.info  # of a palette's transparency
        small.paste(_to_rgb(strip).reduce(factor), (0, top // factor))
    return small


def _from_16_bit(picture: PIL.Image.Image) -> PIL.Image.Image:
    """16-bit grey as 8-bit RGB: 65535 becomes 255. Pillow's own conversion would clip all above 255 to white."""
    import numpy as np

    values = np.asarray(picture).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise ValueError("pixels of 32 bits have no stated range; save it with 8 or 16 bits")
    grey = (values // 257).astype(np.uint8)
    if "transparency" in picture.info:  # the one value that is
        grey[values == picture.info["transparency"]] = BACKGROUND[0]
    return PIL.Image.fromarray(grey).convert("RGB")


def _explained(image: Image, error: Exception) -> ImageError:
    if isinstance(error, PIL.Image.DecompressionBombError):
        limit = (PIL.Image.MAX_IMAGE_PIXELS or 0) * 2
        return ImageError(image, f"more than {limit:,} pixels; scale it down")
    if isinstance(error, PIL.UnidentifiedImageError):
        return ImageError(image, "not an image that Pillow can read")
    if isinstance(error, OSError) and error.strerror:
        return ImageError(image, error.strerror)
    return ImageError(image, str(error) or type(error).__name__)
