"""The rows of a split, read, checked and written once, then memory-mapped by every process of the node. No torch.

What is in the folder is said in `launcher.prepared`.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, overload

from launcher.prepared import DAMAGED, MODALITIES, SUMMARY, cache_dir, media_marks, rows_folder, summary_of
from launcher.rundir import read_json, write_json
from launcher.spec import RunConfig, RunPlan, VideoOptions
from launcher.training.formats import assemble, parse, raw_rows, read_split
from launcher.training.images import MediaError, check_image, known_size
from launcher.training.jsonl import BadRow
from launcher.training.packed import media_of, modality, pack, unpack
from launcher.training.progress import Say
from launcher.training.rows import Group, Image, Row, Video

DECODED = 2000  # so many images are decoded fully, the headers of the rest are read; `check data` decodes all
CHUNK = 256  # rows that are checked and written together


class RowStore(Sequence[Row]):
    """The usable rows of a split, in the order of the data; `bad` are the others, `summary` counts both."""

    def __init__(self, folder: Path) -> None:
        import pyarrow as pa

        self.folder = folder
        self.summary: dict[str, Any] = read_json(folder / SUMMARY)
        self.bad = [BadRow(**row) for row in read_json(folder / "bad.json")]
        self._rows = pa.ipc.open_file(pa.memory_map(str(folder / "rows.arrow"))).read_all()["row"]
        self._blob = str(cache_dir() / "blobs" / self.summary["blob"])

    @property
    def has_media(self) -> bool:
        """Whether any of its rows, usable or not, shows an image or a video."""
        return bool(self.summary["images"] or self.summary["videos"])

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return unpack(self._rows[index].as_py(), self._blob)


def stored(plan: RunPlan, split: str, say: Say, *, decode: bool = False) -> RowStore:
    """The rows of a split, read now unless that has been done; `decode` wants every image decoded.

    The caller holds the folder's lock. Rows are read again when an image has changed since, and, as the cause may
    be mended, once a run when some are bad.
    """
    folder = rows_folder(plan.config, split)
    with suppress(*DAMAGED):
        if is_current(plan, folder, decode=decode):
            return RowStore(folder)
    known_size.cache_clear()  # this process may have seen the files as they were before
    _write(plan, split, folder, say, decode=decode)
    return RowStore(folder)


def is_current(plan: RunPlan, folder: Path, *, decode: bool) -> bool:
    """Whether what is in the folder may be used by this run."""
    summary = summary_of(folder)
    if summary is None or (decode and not summary["decoded"]):
        return False
    if summary["bad"] and summary["run_id"] != plan.run_id:
        return False
    known = read_json(folder / "media.json")
    return media_marks(known) == known and (cache_dir() / "blobs" / summary["blob"]).is_file()


def _write(plan: RunPlan, split: str, folder: Path, say: Say, *, decode: bool) -> None:
    """Read, check and write a split; the folder appears whole."""
    import pyarrow as pa

    aside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        tally = _Tally(None if decode else DECODED, plan.config.dataset.video)
        schema = pa.schema([("row", pa.large_binary())])
        with (
            _Blob(aside / "blob") as blob,
            pa.OSFile(str(aside / "rows.arrow"), "wb") as sink,
            pa.ipc.new_file(sink, schema) as writer,
        ):
            for rows in _chunks(_rows(plan.config, split), CHUNK):
                packed = pa.array([pack(row, blob.keep) for row in tally.check(rows)], pa.large_binary())
                writer.write_batch(pa.record_batch([packed], schema=schema))
                say(tally.rows + len(tally.bad), None)
        kept = cache_dir() / "blobs" / blob.name
        kept.parent.mkdir(exist_ok=True)
        os.replace(aside / "blob", kept)
        write_json(aside / "bad.json", [asdict(row) for row in tally.bad])
        write_json(aside / "media.json", media_marks(tally.paths))
        write_json(aside / SUMMARY, {"run_id": plan.run_id, "blob": blob.name, **tally.summary()})
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _rows(config: RunConfig, split: str) -> Iterator[Row | BadRow]:
    """Every row, as few as possible of them in memory at a time."""
    if config.dataset.format == "digits" or config.dataset.shuffle_labels:
        rows, bad = read_split(config, split)
        yield from (*bad, *rows)
        return
    parsed = _parsed(config, split)
    for chunk in _chunks(parsed, CHUNK):
        if any(isinstance(row, Group) and row.judged for row in chunk):
            yield from _assembled(config, split, [*chunk, *parsed])  # rows of one query may be anywhere
        else:
            yield from _assembled(config, split, chunk)


def _parsed(config: RunConfig, split: str) -> Iterator[Row | BadRow]:
    for raw in raw_rows(config, split):
        found = parse(config, split, raw)
        yield from [found] if isinstance(found, BadRow) else found


def _assembled(config: RunConfig, split: str, rows: list[Row | BadRow]) -> Iterator[Row | BadRow]:
    kept, bad = assemble(config, split, [row for row in rows if not isinstance(row, BadRow)])
    yield from (row for row in rows if isinstance(row, BadRow))
    yield from (*bad, *kept)


def _chunks(rows: Iterable[Row | BadRow], size: int) -> Iterator[list[Row | BadRow]]:
    remaining = iter(rows)
    while chunk := list(itertools.islice(remaining, size)):
        yield chunk


class _Blob:
    """Embedded pictures one after another in a file, each once; its name is a hash of what it holds.

    So a file that a running job reads is never replaced by another.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._size, self._spans = path, 0, dict[bytes, tuple[int, int]]()
        self._hash = hashlib.sha256()

    def __enter__(self) -> _Blob:
        self._file = open(self._path, "wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def keep(self, data: bytes) -> tuple[int, int]:
        """First byte and length of these bytes in the file."""
        key = hashlib.sha256(data).digest()
        if key not in self._spans:
            self._file.write(data)
            self._hash.update(data)
            self._spans[key] = (self._size, len(data))
            self._size += len(data)
        return self._spans[key]

    @property
    def name(self) -> str:
        """Of the finished file."""
        return f"{self._hash.hexdigest()[:32]}.bin"


class _Tally:
    """Checks the media of rows and counts what there is."""

    def __init__(self, decoded: int | None, video: VideoOptions) -> None:
        self._video = video
        self.bad: list[BadRow] = []
        self.rows = 0
        self._limit = decoded
        self._seen: dict[Image | Video, str | None] = {}  # why it cannot be used
        self._counts: Counter[str] = Counter()
        self._modality = {"queries": Counter[str](), "documents": Counter[str](), "messages": Counter[str]()}

    @property
    def paths(self) -> Iterator[str]:
        """Files of all images and videos."""
        for part in self._seen:
            if part.path is not None:
                yield part.path
            elif isinstance(part, Video):
                yield from part.frames

    def check(self, rows: Sequence[Row | BadRow]) -> list[Row]:
        """The usable ones; the others are noted in the order of the data."""
        named = [[] if isinstance(row, BadRow) else [(_name(part), part) for part in media_of(row)] for row in rows]
        # In the order of the data, as which ones are decoded must not vary.
        new = {name: part for parts in named for name, part in parts if name not in self._seen}
        decoding = len(new) if self._limit is None else max(0, self._limit - len(self._seen))
        with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:  # Pillow decodes outside the interpreter's lock
            decode = [number < decoding for number in range(len(new))]
            reasons = pool.map(lambda part, fully: why_not(part, self._video, decode=fully), new.values(), decode)
            self._seen.update(zip(new, reasons, strict=True))
        good = []
        for row, parts in zip(rows, named, strict=True):
            reason = next(filter(None, (self._seen[name] for name, _ in parts)), None)
            if isinstance(row, BadRow):
                self.bad.append(row)
            elif reason is not None:
                self.bad.append(BadRow(row.where, row.id, reason))
            else:
                good.append(row)
                self._count(row)
        return good

    def _count(self, row: Row) -> None:
        self.rows += 1
        if isinstance(row, Group):
            self._counts["documents"] += len(row.documents)
            self._counts["repeats"] += row.repeats
            self._counts["contradictory"] += row.contradictory
            self._modality["queries"][modality(row.query)] += 1
            self._modality["documents"].update(map(modality, row.documents))
        else:
            self._modality["messages"].update(modality(turn.content) for turn in row.turns)

    def summary(self) -> dict[str, Any]:
        """JSON-ready counts: of rows, of bad ones by reason, of what queries and documents are made of."""
        kinds = Counter(type(part).__name__ for part in self._seen)
        return {
            "rows": self.rows,
            "bad": dict(Counter(row.kind for row in self.bad).most_common()),
            "documents": self._counts["documents"],
            "repeats": self._counts["repeats"],
            "contradictory": self._counts["contradictory"],
            "images": kinds["Image"],
            "videos": kinds["Video"],
            "decoded": self._limit is None or len(self._seen) <= self._limit,
            "modality": {
                what: {name: counts[name] for name in MODALITIES} for what, counts in self._modality.items() if counts
            },
        }


def _name(part: Image | Video) -> Image | Video:
    """A picture or film as it is remembered: embedded bytes by their hash, or all of a table's would stay in memory."""
    if isinstance(part, Image) and part.data is not None:
        return replace(part, data=hashlib.sha256(part.data).digest())
    return part


def why_not(part: Image | Video, video: VideoOptions, *, decode: bool) -> str | None:
    """Why training could not use a picture or film; pixels are read only with `decode`."""
    try:
        if isinstance(part, Video):
            from launcher.training.video import check_video

            check_video(part, video, decode=decode)
        else:
            check_image(part, decode=decode)
    except MediaError as error:
        return f"unreadable {'video' if isinstance(part, Video) else 'image'}: {error}"
    return None
