"""Small films for tests: each frame has one colour that tells its number."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from launcher.training.rows import Video


def film(
    path: Path, *, frames: int = 40, fps: int = 10, width: int = 64, height: int = 64, turn: int = 0,
    times: Sequence[float] = (),
) -> Video:  # fmt: skip
    """`frames` frames of red 0, 6, 12, ... 234, 0, ...; a key frame every 12. `turn` is written as phones do.

    `times` has the second at which each is shown, tenths at the finest, where they don't follow one another evenly.
    """
    options = {"movflags": "faststart"} if path.suffix == ".mp4" else {}
    with av.open(str(path), "w", options=options) as container:
        stream: Any = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.gop_size, stream.codec_context.bit_rate = 12, 2_000_000
        stream.codec_context.time_base = Fraction(1, fps)
        if turn:
            stream.set_display_rotation(turn)
        for number in range(len(times) or frames):
            pixels = np.zeros((height, width, 3), dtype=np.uint8)
            pixels[..., 0] = number % 40 * 6
            pixels[: height // 2, :, 2] = 200  # the stored upper half is blue
            picture = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times:
                picture.pts, picture.time_base = round(times[number] * fps), Fraction(1, fps)
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return Video(str(path))


def number_of(frame: np.ndarray) -> float:
    """The number that a frame's colour tells, about."""
    return float(frame[..., 0].mean()) / 6
