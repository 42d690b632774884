"""Pictures that trip loaders, and sizes known before decoding."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from launcher.training.formats import Image
from launcher.training.images import ImageError, check_image, image_size, open_image, patchify, smart_resize

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
    make, colour = PICTURES[name]
    image = make()
    picture = open_image(image)
    assert (picture.mode, picture.size) == ("RGB", image_size(image))
    assert picture.size == (64, 48)
    assert np.abs(np.subtract(picture.getpixel((0, 0)), colour)).max() <= 2  # JPEG, and Pillow's versions


def test_16_bit_grey_is_scaled_not_clipped() -> None:
    values = np.asarray(open_image(encoded(ramp16(), "PNG")))[..., 0].reshape(-1)
    assert values.tolist() == (np.arange(64 * 48) * 20 // 257).tolist()


@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize(("orientation", "bar"), [(1, "left"), (3, "right"), (6, "top"), (8, "bottom")])
def test_pictures_stand_upright(format: str, orientation: int, bar: str) -> None:
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
    noise = np.random.default_rng(0).integers(0, 255, (256, 256, 3), dtype=np.uint8)
    whole = encoded(Pillow.fromarray(noise), "JPEG").data
    assert whole is not None
    contents = {
        "truncated.jpg": (whole[: len(whole) // 2], "image file is truncated"),
        "empty.jpg": (b"", "not an image that Pillow can read"),
        "html.jpg": (b"<html><body>404</body></html>", "not an image that Pillow can read"),
    }
    for name, (data, reason) in contents.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(ImageError, match=reason) as caught:
            check_image(Image(str(path)), decode=True)
        assert str(caught.value).startswith(f"{path}: ")
    with pytest.raises(ImageError, match=r"gone\.png: No such file"):
        open_image(Image("gone.png"))
    check_image(Image(str(tmp_path / "truncated.jpg")), decode=False)  # its header is whole


def test_the_contents_decide_not_the_name(tmp_path: Path) -> None:
    path = tmp_path / "a name é.jpg"
    Pillow.new("RGB", (8, 8)).save(path, "PNG")
    assert open_image(Image(str(path))).size == (8, 8)


def test_bombs_are_refused_from_their_header() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = encoded(Pillow.new("1", (13400, 13400)), "PNG")
    with pytest.raises(ImageError, match="embedded image: more than 178,956,970 pixels"):
        image_size(image)


@pytest.mark.parametrize(("size", "good"), [((200, 1), True), ((3, 600), True), ((201, 1), False), ((1, 1), True)])
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
    pixels, grid_thw = patchify(pictures, grids, processor)
    expected = processor(images=pictures, return_tensors="pt")
    assert torch.equal(grid_thw, expected["image_grid_thw"])
    assert pixels.dtype == torch.float32
    torch.testing.assert_close(pixels, expected["pixel_values"], atol=1e-6, rtol=0)
