"""Films as frames: their length and size without decoding them, which frames a model sees, and those frames' pixels.

PyAV (FFmpeg) reads the files. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from launcher.spec import VideoOptions
from launcher.training.images import MediaError, check_aspect, check_image, image_size, open_image
from launcher.training.rows import Image, Video

if TYPE_CHECKING:
    from av.container import InputContainer

PAIR = 2  # frames that the towers of all Qwen-VL models merge into one temporal patch
ROUNDED_S = 0.05  # by so much a frame's own time may be later than its number tells
SEEK_S = 4.0  # a wanted frame further ahead than this is sought; a nearer one is decoded up to


class VideoError(MediaError):
    """A film that can't be used; the message names its path and the reason."""


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """What a file (or a list of frame files) says of itself, as it is shown: turned by its display matrix."""

    frames: int
    fps: float
    width: int
    height: int

    @property
    def duration_s(self) -> float:
        """Seconds from the first frame's beginning to the last one's end."""
        return self.frames / self.fps


@dataclass(frozen=True, slots=True)
class Clip:
    """The frames of a video that a model sees: their numbers in the file, ascending, even in number.

    `fps` is the file's own rate, so frame n is shown at n / fps seconds.
    """

    video: Video
    frames: tuple[int, ...]
    fps: float

    def __str__(self) -> str:
        return str(self.video)

    @property
    def times(self) -> list[float]:
        """Seconds of each temporal patch: the mean of its two frames, counted from the film's beginning."""
        seconds = [n / self.fps for n in self.frames]
        return [(seconds[i] + seconds[i + PAIR - 1]) / PAIR for i in range(0, len(seconds), PAIR)]

    @property
    def sampled_fps(self) -> float:
        """Frames taken from a second, as transformers' VideoMetadata counts them."""
        return len(self.frames) / (self.frames[-1] - self.frames[0] + 1) * self.fps


def video_facts(video: Video, options: VideoOptions) -> VideoFacts:
    """Read from the file's header and first frame; raises VideoError.

    Frame files stand at the row's own fps, else at dataset.video.fps.
    """
    if video.path is not None:
        return _file_facts(video.path)
    width, height = image_size(Image(video.frames[0]))
    return VideoFacts(len(video.frames), video.fps or options.fps, width, height)


def choose_frames(video: Video, options: VideoOptions) -> Clip:
    """The frames at the row's fps, else dataset.video.fps, spread evenly from the segment's first to its last.

    Their number is even and within min_frames and max_frames (a row's own max_frames wins) while the segment has so
    many. A single frame is seen twice. Raises VideoError.
    """
    facts = video_facts(video, options)
    first, last = 0, facts.frames - 1
    if video.start_s is not None:
        # A frame belongs to the segment in which it begins. Rounded: 0.3 * 10 is a bit more than 3.
        first = math.ceil(round(video.start_s * facts.fps, 6))
    if video.end_s is not None:
        last = min(last, math.ceil(round(video.end_s * facts.fps, 6)) - 1)
    if first > last and (video.start_s or 0.0) < facts.duration_s:
        first = last = math.floor(round((video.start_s or 0.0) * facts.fps, 6))  # the frame that is shown meanwhile
    if first > last:
        raise VideoError(video, f"no frame begins there; it is {facts.duration_s:g} s long")
    there = last - first + 1
    wanted = int(there / facts.fps * (video.fps or options.fps))
    fewest = options.min_frames + options.min_frames % PAIR
    most = video.max_frames or options.max_frames
    count = min(max(wanted, fewest), most, there)
    count = max(PAIR, count - count % PAIR)
    frames = np.linspace(first, last, count).round().astype(int).tolist()
    return Clip(video, tuple(frames), facts.fps)


def read_frames(clip: Clip) -> Iterator[np.ndarray]:
    """Each frame of a clip [height, width, 3] uint8 as it is shown, one at a time; raises VideoError or ImageError."""
    video = clip.video
    if video.path is None:
        for number in clip.frames:
            yield np.asarray(open_image(Image(video.frames[number])))
        return
    try:
        with _open(video.path) as container:
            yield from _decoded(container, clip)
    except VideoError:
        raise
    except Exception as error:  # FFmpeg's errors are of many kinds
        raise VideoError(video, _reason(error)) from error


def check_video(video: Video, options: VideoOptions, *, decode: bool) -> None:
    """Raise VideoError or ImageError for a film that training couldn't use.

    With `decode` its first and last frames are read, since what is cut short lacks its end; of frame files, all.
    """
    facts = video_facts(video, options)
    try:
        check_aspect(facts.height, facts.width)
    except ValueError as error:
        raise VideoError(video, str(error)) from None
    clip = choose_frames(video, options)
    if video.path is None:
        for name in video.frames:
            check_image(Image(name), decode=decode)
    elif decode:
        for _ in read_frames(Clip(video, (clip.frames[0], clip.frames[-1]), clip.fps)):
            pass


@lru_cache(maxsize=1 << 16)
def _file_facts(path: str) -> VideoFacts:
    video = Video(path)
    try:
        with _open(path) as container:
            stream = _stream(container, video)
            rate = stream.average_rate or stream.guessed_rate
            if not rate:
                raise VideoError(video, "its frame rate is not stated")
            frames = stream.frames or round(_duration_s(container, stream, video) * rate)
            picture = next(container.decode(stream), None)
            if picture is None or frames < 1:
                raise VideoError(video, "it holds no frame")
            width, height = picture.width, picture.height
            if picture.rotation % 180:
                width, height = height, width
            return VideoFacts(frames, float(rate), width, height)
    except VideoError:
        raise
    except Exception as error:
        raise VideoError(video, _reason(error)) from error


def _open(path: str) -> InputContainer:
    import av

    # A playlist in disguise must not make this machine fetch anything.
    return av.open(path, options={"protocol_whitelist": "file"})


def _stream(container: Any, video: Video) -> Any:
    if not container.streams.video:
        raise VideoError(video, "no video stream in this file")
    stream = container.streams.video[0]
    stream.thread_type = "AUTO"
    return stream


def _duration_s(container: Any, stream: Any, video: Video) -> float:
    if stream.duration is not None:
        return float(stream.duration * stream.time_base)
    if container.duration is not None:
        # Matroska's length is counted from 0, wherever its first frame stands.
        begin = (container.start_time or 0) if "matroska" in container.format.name else 0
        return float((container.duration - begin) / 1_000_000)  # FFmpeg's AV_TIME_BASE
    raise VideoError(video, "its length is not stated; write it anew: ffmpeg -i OLD -c copy NEW.mp4")


def _decoded(container: Any, clip: Clip) -> Iterator[np.ndarray]:
    """What is shown at the time of each frame, which counts where frames don't follow one another evenly.

    Seeks to the key frame before a far frame, else decodes on.
    """
    stream = _stream(container, clip.video)
    begin = float((stream.start_time or 0) * stream.time_base)
    pictures, picture, following, at, after = container.decode(stream), None, None, 0.0, 0.0
    for number in clip.frames:
        target = number / clip.fps
        if target - after > SEEK_S:
            container.seek(int((begin + target) / stream.time_base), stream=stream)
            pictures, picture, following = container.decode(stream), None, None
        while True:
            following = following or next(pictures, None)
            if following is None:
                # A frame is shown as long as it says. Where the header doesn't count the frames, their number is the
                # length times the rate, rounded.
                shown_s = float((picture.duration or 0) * picture.time_base) if picture is not None else 0.0
                counted = 0.0 if stream.frames else 2 / clip.fps
                if picture is not None and target - at < max(shown_s, counted, 0.5 / clip.fps):
                    break
                raise VideoError(clip.video, f"its frames end before {target:.1f} s: it is cut short")
            after = at if following.time is None else following.time - begin
            if picture is not None and after > target + min(ROUNDED_S, 0.5 / clip.fps):
                break
            if following.is_corrupt:
                raise VideoError(clip.video, f"its frame at about {at:.1f} s is damaged")
            picture, at, following = following, after, None
        yield np.rot90(picture.to_ndarray(format="rgb24"), picture.rotation // 90)


def _reason(error: Exception) -> str:
    import av

    if isinstance(error, av.error.InvalidDataError):
        return "not a video that FFmpeg can read, or cut short"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
