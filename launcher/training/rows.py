"""What a data file's row becomes, whatever its format: a reranker group or a chat, made of texts, images and videos.

No torch. Everything is hashable and survives pickling, so that rows travel to worker processes and equal
pictures are known as equal.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Image:
    """A picture: a file, a span of a file (`span` = first byte and length), or its encoded bytes in `data`.

    The pixel limits are this picture's own, else the data set's, else the model's.
    """

    path: str | None
    data: bytes | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    span: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.path if self.path is not None and self.span is None else "embedded image"


@dataclass(frozen=True, slots=True)
class Video:
    """A film: a file, or the files of its frames in order; `start_s` and `end_s` cut a segment out of it.

    None in the other fields means the data set's `dataset.video` options.
    """

    path: str | None
    frames: tuple[str, ...] = ()
    fps: float | None = None  # frames taken from a second
    max_frames: int | None = None
    min_pixels: int | None = None  # of a frame
    max_pixels: int | None = None
    start_s: float | None = None
    end_s: float | None = None

    def __str__(self) -> str:
        name = self.path if self.path is not None else f"{len(self.frames)} frames from {self.frames[0]}"
        return name if self.start_s is None else f"{name} from {self.start_s:g} s to {self.end_s:g} s"


Content = tuple[str | Image | Video, ...]  # in reading order


@dataclass(frozen=True, slots=True)
class Group:
    """A query with its documents (task rerank); positives first.

    `labels` are relevances: 0 for a negative, 1 (or a grade above 0) for a positive. `scores` are a teacher's,
    one a document, for loss distill.
    """

    id: str
    where: str  # file:line
    instruction: str | None
    query: Content
    documents: tuple[Content, ...]
    labels: tuple[float, ...]
    scores: tuple[float, ...] | None = None
    repeats: int = 0  # documents of the row that were dropped as exact repeats
    parts: tuple[int, ...] | None = None  # document of the row that each one is a segment of; None: they are whole
    contradictory: int = 0  # and those dropped because they stood on both sides (on_bad=skip)
    source: int = 0  # which entry of dataset.train (or eval) the row comes from
    judged: bool = False  # one document with its label: rows of the same query belong together


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a chat; `train` says whether its text is an answer that the loss is on."""

    role: str  # system | user | assistant | tool
    content: Content
    train: bool = False


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation (task sft), or what a class is told of (task classify: then `label` names the class)."""

    id: str
    where: str  # file:line
    turns: tuple[Turn, ...]
    label: str | None = None
    source: int = 0  # which entry of dataset.train (or eval) the row comes from


Row = Group | Chat


def too_large(row: Row, documents: int, tokens: int, limit: int) -> str:
    """Why a row fits into no micro-batch."""
    what = f"{documents} documents need {tokens} tokens" if documents > 1 else f"it needs {tokens} tokens"
    less = "give the row fewer documents" if documents > 1 else "take a dataset.max_length below it"
    return f"{row.where}: row {row.id}: {what} in one micro-batch and batch.max_tokens={limit}; raise it, or {less}"
