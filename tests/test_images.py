"""Pictures that trip loaders, and sizes known before decoding."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image as Pillow

from launcher.spec import VideoOptions
from launcher.training import processors
from launcher.training.images import ImageError, check_image, image_size, open_image, smart_resize
from launcher.training.media import media_rule
from launcher.training.patches import joined
from launcher.training.pieces import MediaSlot
from launcher.training.pixels import Pixels
from launcher.training.rows import Group, Image
from launcher.training.rowstore import _Tally
from tests.tiny import tiny_plan

RESIZE_CASES = json.loads((Path(__file__).parent / "cases" / "images" / "smart_resize.json").read_text())["cases"]


def encoded(picture: Pillow.Image, format: str, **options: object) -> Image:
    buffer = io.BytesIO()
    picture.save(buffer, format, **options)
    return Image(None, buffer.getvalue())


def ramp16() -> Pillow.Image:
    return Pillow.fromarray((np.arange(64 * 48).reshape(48, 64) * 20).astype("uint16"))


def transparent_palette() -> Pillow.Image:
    picture = Pillow.new("P", (64, 48), 0)
    picture.putpalette([0, 0, 0] + [255, 0, 0] * 255)
    return picture


PICTURES: dict[str, tuple[Callable[[], Image], tuple[int, int, int]]] = {
    "plain": (lambda: encoded(Pillow.new("RGB", (64, 48), (200, 30, 30)), "PNG"), (200, 30, 30)),
    "transparent": (lambda: encoded(Pillow.new("RGBA", (64, 48), (0, 0, 0, 0)), "PNG"), (255, 255, 255)),
    "half transparent": (lambda: encoded(Pillow.new("RGBA", (64, 48), (0, 0, 0, 128)), "PNG"), (127, 127, 127)),
    "palette": (lambda: encoded(transparent_palette(), "PNG", transparency=0), (255, 255, 255)),
    "grey and alpha": (lambda: encoded(Pillow.new("LA", (64, 48), (128, 0)), "PNG"), (255, 255, 255)),
    "one bit": (lambda: encoded(Pillow.new("1", (64, 48), 1), "PNG"), (255, 255, 255)),
    "16-bit, one value transparent": (
        lambda: encoded(Pillow.fromarray(np.full((48, 64), 5000, dtype="uint16")), "PNG", transparency=5000),
        (255, 255, 255),
    ),
    "16-bit grey": (lambda: encoded(ramp16(), "PNG"), (0, 0, 0)),
    "CMYK": (lambda: encoded(Pillow.new("CMYK", (64, 48), (0, 255, 255, 0)), "JPEG"), (255, 0, 0)),
    "animation": (
        lambda: encoded(
            Pillow.new("RGB", (64, 48), (0, 0, 0)),
            "GIF",
            save_all=True,
            append_images=[Pillow.new("RGB", (64, 48), (250, 0, 0))],
        ),
        (0, 0, 0),
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_every_mode_becomes_rgb_as_seen(name: str) -> None:
    """I04, I05, I12."""
    make, colour = PICTURES[name]
    image = make()
    picture = open_image(image)
    assert (picture.mode, picture.size) == ("RGB", image_size(image))
    assert picture.size == (64, 48)
    assert np.abs(np.subtract(picture.getpixel((0, 0)), colour)).max() <= 2  # JPEG, and Pillow's versions


def test_16_bit_grey_is_scaled_not_clipped() -> None:
    """I05."""
    values = np.asarray(open_image(encoded(ramp16(), "PNG")))[..., 0].reshape(-1)
    assert values.tolist() == (np.arange(64 * 48) * 20 // 257).tolist()


@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize(("orientation", "bar"), [(1, "left"), (3, "right"), (6, "top"), (8, "bottom")])
def test_pictures_stand_upright(format: str, orientation: int, bar: str) -> None:
    """I03."""
    pixels = np.zeros((32, 64, 3), dtype=np.uint8)
    pixels[:, :8] = (255, 0, 0)  # on the stored left edge
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    image = encoded(Pillow.fromarray(pixels), format, exif=exif)
    seen = np.asarray(open_image(image))[..., 0] > 128
    assert image_size(image) == (seen.shape[1], seen.shape[0]) == ((32, 64) if orientation in (6, 8) else (64, 32))
    edges = {"left": seen[:, :4], "right": seen[:, -4:], "top": seen[:4], "bottom": seen[-4:]}
    assert [name for name, edge in edges.items() if edge.all()] == [bar]


def test_orientation_equals_pillows_own() -> None:
    from PIL import ImageOps

    pixels = np.random.default_rng(0).integers(0, 255, (6, 9, 3), dtype=np.uint8)
    for orientation in range(1, 9):
        exif = Pillow.Exif()
        exif[0x0112] = orientation
        image = encoded(Pillow.fromarray(pixels), "PNG", exif=exif)
        assert image.data is not None
        expected = ImageOps.exif_transpose(Pillow.open(io.BytesIO(image.data)))
        assert np.array_equal(np.asarray(open_image(image)), np.asarray(expected)), orientation


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    """I01, I02."""
    noise = np.random.default_rng(0).integers(0, 255, (256, 256, 3), dtype=np.uint8)
    whole = encoded(Pillow.fromarray(noise), "JPEG").data
    assert whole is not None
    contents = {
        "truncated.jpg": (whole[: len(whole) // 2], "image file is truncated"),
        "cut_by_10_bytes.jpg": (whole[:-10], "image file is truncated"),
        "empty.jpg": (b"", "not an image that Pillow can read"),
        "html.jpg": (b"<html><body>404</body></html>", "not an image that Pillow can read"),
        "whole_numbers.tif": (encoded(Pillow.new("I", (8, 8), 200_000), "TIFF").data, "pixels of 32 bits"),
        "floats.tif": (encoded(Pillow.new("F", (8, 8), 0.5), "TIFF").data, "floating-point pixels"),
    }
    for name, (data, reason) in contents.items():
        path = tmp_path / name
        path.write_bytes(data or b"")
        with pytest.raises(ImageError, match=reason) as caught:
            check_image(Image(str(path)), decode=True)
        assert str(caught.value).startswith(f"{path}: ")
    with pytest.raises(ImageError, match=r"gone\.png: No such file"):
        open_image(Image("gone.png"))
    check_image(Image(str(tmp_path / "truncated.jpg")), decode=False)  # its header is whole


def test_the_contents_decide_not_the_name(tmp_path: Path) -> None:
    """I02."""
    path = tmp_path / "a name é.jpg"
    Pillow.new("RGB", (8, 8)).save(path, "PNG")
    assert open_image(Image(str(path))).size == (8, 8)


def test_bombs_are_refused_from_their_header() -> None:
    """I10."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = encoded(Pillow.new("1", (13400, 13400)), "PNG")
    with pytest.raises(ImageError, match="embedded image: more than 178,956,970 pixels"):
        image_size(image)


LOADS_LARGE = """
import resource, sys
from launcher.training.images import open_image
from launcher.training.rows import Group, Image
from launcher.training.rowstore import _Tally
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
picture = open_image(Image(sys.argv[1]), (1024, 512))
print(*picture.size, picture.getpixel((0, 0)), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("mode", "format"), [("1", "PNG"), ("CMYK", "JPEG")])
def test_large_pictures_take_bounded_memory(tmp_path: Path, mode: str, format: str) -> None:
    """I10. 9500 x 9500 px in a few kB: as RGB pixels 271 MB, in Pillow 361, and as much again to resize."""
    path = tmp_path / "large"
    Pillow.new(mode, (9500, 9500), 1 if mode == "1" else 0).save(path, format)
    command = [sys.executable, "-W", "ignore", "-c", LOADS_LARGE, str(path)]
    width, height, *colour, mib = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert 2048 <= int(width) < 4750 and 1024 <= int(height) < 4750
    assert "".join(colour) in ("(255,255,255)", "(0,0,0)")
    assert int(mib) < 200, f"{mib} MiB more"
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ImageError, match="is truncated"):
        check_image(Image(str(path)), decode=True)


def test_large_pictures_keep_their_colours_and_orientation() -> None:
    palette = Pillow.new("P", (4200, 4200))
    palette.putpalette([0, 0, 0, 255, 0, 0])
    palette.paste(1, (0, 0, 2100, 4200))
    exif = Pillow.Exif()
    exif[0x0112] = 6  # the stored left edge is shown at the top
    image = encoded(palette, "PNG", exif=exif, compress_level=1)
    picture = open_image(image, (500, 300))
    assert picture.size == (1050, 1050)  # the fourth part: still twice as wide
    seen = np.asarray(picture)[..., 0] > 128
    assert seen[:520].all() and not seen[530:].any()
    assert open_image(image).size == image_size(image) == (4200, 4200)


def test_embedded_bytes_are_not_kept() -> None:
    """A table of pages may hold more bytes than this machine has memory."""
    image = encoded(Pillow.new("RGB", (40, 30)), "PNG")
    before = sys.getrefcount(image)
    size = image_size(image)
    tally = _Tally(None, VideoOptions())
    good = len(tally.check([Group("1", "f:1", None, ("q",), ((image,), (image,)), (1.0, 0.0))]))
    assert (size, good, tally.summary()["images"]) == ((40, 30), 1, 1)
    assert sys.getrefcount(image) == before


def test_spans_of_a_file(tmp_path: Path) -> None:
    """Several pictures one after the other in a file, as prepared data keeps them."""
    pictures = [encoded(Pillow.new("RGB", (8 + n, 8), (n * 50, 0, 0)), "PNG").data or b"" for n in range(3)]
    path = tmp_path / "pictures.bin"
    path.write_bytes(b"".join(pictures))
    offset = 0
    for n, data in enumerate(pictures):
        image = Image(str(path), span=(offset, len(data)))
        assert image_size(image) == (8 + n, 8) and open_image(image).getpixel((0, 0)) == (n * 50, 0, 0)
        offset += len(data)
    with pytest.raises(ImageError, match=f"ends before byte {offset + 10}"):
        open_image(Image(str(path), span=(offset - 10, 20)))


@pytest.mark.parametrize(
    ("own", "data", "size", "tokens"),
    [
        ({}, {}, (1, 1), 1),  # scaled up to the smallest area that the model takes
        ({"min_pixels": 4096}, {}, (1, 1), 4),
        ({}, {"min_pixels": 2048}, (32, 32), 4),  # 1,024 px are too few; two a side are the next grid
        ({}, {}, (640, 640), 4),  # and down to the model's largest
        ({}, {"max_pixels": 16384}, (640, 640), 16),  # the data set's own wins
        ({"max_pixels": 65536}, {"max_pixels": 16384}, (640, 640), 64),  # and the picture's over both
        ({"min_pixels": 16384}, {}, (32, 32), 16),  # also above the model's largest
        ({"max_pixels": 10 * 1024}, {}, (31, 639), 14),  # a naive resize gives a side of 0 (I08)
    ],
)
def test_pixel_limits(tmp_path: Path, own: dict, data: dict, size: tuple[int, int], tokens: int) -> None:
    plan = tiny_plan(tmp_path, dataset=data)  # the model's: 1,024 to 4,096
    rule = media_rule(plan, processors.load_processor(plan))
    assert rule is not None and rule.factor == 32
    picture = encoded(Pillow.new("RGB", size), "PNG")
    _, rows, columns = rule.image(dataclasses.replace(picture, **own))
    assert rows >= 2 and columns >= 2
    assert rows * columns // 4 == tokens


@pytest.mark.parametrize("size", [(1, 1), (1, 3), (3, 1), (3, 600), (200, 1)])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_narrow_pictures_keep_their_channels(tmp_path: Path, size: tuple[int, int], mode: str) -> None:
    """I06: sides of 1 or 3 pixels are no channels."""
    processor = processors.load_processor(tiny_plan(tmp_path))
    rule = media_rule(tiny_plan(tmp_path), processor)
    image = encoded(Pillow.new(mode, size, (255, 0, 51) if mode == "RGB" else 51), "PNG")
    assert rule is not None
    pixels = Pixels(processor).rows(MediaSlot(0, 1, image, rule.image(image))).numbers()
    red, green, blue = (1.0, -1.0, -0.6) if mode == "RGB" else (-0.6,) * 3
    channels = pixels.reshape(len(pixels), 3, -1)
    for number, value in enumerate((red, green, blue)):
        assert np.allclose(channels[:, number], value, atol=1e-5)


def test_limits_that_exclude_each_other_are_named(tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path)
    rule = media_rule(plan, processors.load_processor(plan))
    image = encoded(Pillow.new("RGB", (64, 64)), "PNG")
    assert rule is not None
    with pytest.raises(ImageError, match="its min_pixels=9000 is above its max_pixels=5000"):
        rule.image(dataclasses.replace(image, min_pixels=9000, max_pixels=5000))


@pytest.mark.parametrize(
    ("size", "good"),
    [((200, 1), True), ((3, 600), True), ((201, 1), False), ((1000, 1), False), ((1, 1), True)],
)
def test_strips(size: tuple[int, int], good: bool) -> None:
    image = encoded(Pillow.new("RGB", size), "PNG")
    if good:
        check_image(image, decode=True)
    else:
        with pytest.raises(ImageError, match="more than 200 times"):
            check_image(image, decode=True)


@pytest.mark.parametrize("case", RESIZE_CASES, ids=lambda case: f"{case['h']}x{case['w']}")
def test_resize_rule_of_reports(case: dict) -> None:
    limits = (case["factor"], case["min"], case["max"])
    got = smart_resize(case["h"], case["w"], *limits)
    if isinstance(case["want"], list):
        assert list(got) == case["want"]
    assert min(got) >= case["factor"]
    tokens = got[0] * got[1] // case["factor"] ** 2
    assert tokens == case.get("tokens", tokens)


def test_resize_rule_equals_transformers() -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as theirs

    random = np.random.default_rng(0)
    for height, width in np.exp(random.uniform(0, 9, (500, 2))).astype(int).tolist():
        if max(height, width) > 200 * min(height, width):
            continue
        for limits in ((32, 4096, 1310720), (28, 3136, 12845056), (32, 1024, 4096)):
            assert smart_resize(height, width, *limits) == theirs(height, width, *limits), (height, width, limits)


def test_patches_equal_the_image_processors_own() -> None:
    import torch
    from transformers import Qwen2VLImageProcessor

    low, high, patch = 4096, 65536, 16
    processor = Qwen2VLImageProcessor(
        patch_size=patch, size={"shortest_edge": low, "longest_edge": high}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    random = np.random.default_rng(0)
    sizes = [(64, 64), (130, 96), (40, 300), (64, 64), (700, 500), (5, 9)]
    pictures = [Pillow.fromarray(random.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in sizes]
    resized = [smart_resize(*size, patch * 2, low, high) for size in sizes]
    grids = [(1, rows // patch, columns // patch) for rows, columns in resized]
    slots = [MediaSlot(0, 1, encoded(picture, "PNG"), grid) for picture, grid in zip(pictures, grids, strict=True)]
    pixels = Pixels(SimpleNamespace(image_processor=processor))
    ours = joined([pixels.rows(slot) for slot in slots])
    expected = processor(images=pictures, return_tensors="pt")
    assert ours.values.dtype == torch.uint8 and ours.values.shape[1] == 3 * patch**2  # one of its two equal frames
    assert expected["image_grid_thw"].tolist() == [list(grid) for grid in grids]
    assert torch.equal(ours.numbers(), expected["pixel_values"])
    assert torch.equal(ours.numbers(torch.bfloat16), expected["pixel_values"].bfloat16())
