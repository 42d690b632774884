"""Rows of one file: lines of JSON, a JSON array, CSV, Parquet, or Arrow as `datasets` saves it. No torch.

Each reader yields (number from 1, row); a row is a line of JSON not yet read, a dictionary, or a BadRow. Text is
never turned into a number or a date: what a file says is what a row holds.
"""

from __future__ import annotations

import csv
import gzip
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from launcher.training.jsonl import BadRow, RowError, describe, load_json, wrong_file

if TYPE_CHECKING:
    from datasets import Dataset  # type: ignore[import-untyped]

Item = tuple[int, "bytes | dict[str, Any] | BadRow"]
MARK = b"\xef\xbb\xbf"  # UTF-8's byte order mark
ROW_KEYS = {"query", "qry", "messages", "conversations", "anchor", "label"}  # a file of one row holds one of these
AT_ONCE = 64  # rows of a Parquet file turned into Python values together; pictures may be in them


def read_file(path: Path) -> Iterator[Item]:
    """The rows of a data file, by what its name ends in."""
    number = 0
    try:
        for number, row in READERS[_kind(path)](path):
            yield number, row
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        yield number + 1, BadRow(f"{path}:{number + 1}", str(number + 1), f"not gzip, or cut short: {error}")


def _kind(path: Path) -> str:
    """What a name ends in, without the .gz of a compressed file."""
    return Path(path.stem if path.suffix.lower() == ".gz" else path).suffix.lower()


def _opened(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path)) if path.suffix.lower() == ".gz" else open(path, "rb")


def _lines(path: Path) -> Iterator[Item]:
    """JSON lines; blank ones are skipped. A file that begins with `[` is one array, UTF-16 is a single BadRow."""
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(MARK)
                problem = wrong_file(line)
                if problem:
                    yield number, BadRow(f"{path}:{number}", str(number), problem)
                    return
                if line.lstrip().startswith(b"["):
                    yield from _document(path)
                    return
            if line.strip():
                yield number, line.rstrip(b"\r\n")


def _json(path: Path) -> Iterator[Item]:
    """An array, an object with a list of rows, or JSON lines by another name: then the first line is an object."""
    with _opened(path) as file:
        first, more = file.readline().removeprefix(MARK).strip(), file.readline().strip()
    by_lines = first.startswith(b"{") and first.endswith(b"}") and more.startswith(b"{")
    yield from _lines(path) if by_lines else _document(path)


def _document(path: Path) -> Iterator[Item]:
    try:
        with _opened(path) as file:
            data = file.read().removeprefix(MARK)
        if problem := wrong_file(data[:64]):
            raise RowError(problem)
        whole = load_json(data)
        rows = whole if isinstance(whole, list) else _rows_in(whole)
    except RowError as error:
        yield 1, BadRow(f"{path}:1", "1", str(error))
        return
    number = 0
    for entry in rows:
        for row in entry if isinstance(entry, list) else [entry]:  # packed chats are lists of chats
            number += 1
            problem = f"not an object: entry {number} of the array is {describe(row)}"
            yield number, row if isinstance(row, dict) else BadRow(f"{path}:{number}", str(number), problem)


def _rows_in(whole: Any) -> list[Any]:
    """The list of rows in an object that is no row itself."""
    if not isinstance(whole, dict):
        raise RowError(f"no rows: the file holds {describe(whole)}")
    lists = {key: value for key, value in whole.items() if isinstance(value, list)}
    if whole.keys() & ROW_KEYS:
        return [whole]
    if len(lists) != 1:
        raise RowError(f"no rows: one list of rows is expected; the file's keys are {', '.join(whole) or 'none'}")
    return next(iter(lists.values()))


def _csv(path: Path) -> Iterator[Item]:
    """A table with a heading; an empty cell is null."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    number = 1
    with _opened(path) as file:
        try:
            reader = csv.reader(_decoded(file), delimiter="\t" if _kind(path) == ".tsv" else ",", strict=True)
            heading = next(reader, [])
            if len(heading) == 1 and (other := next((mark for mark in ";\t|" if mark in heading[0]), None)):
                raise RowError(f"not CSV: its cells are divided by {other!r}; save it with commas, or tabs in a .tsv")
            if len(set(heading)) < len(heading):
                raise RowError(f"duplicate key: a name stands twice in the heading {', '.join(heading)}")
            for cells in reader:
                number = reader.line_num
                if cells and len(cells) != len(heading):
                    reason = f"wrong number of cells: {len(cells)}, and the heading has {len(heading)}"
                    yield number, BadRow(f"{path}:{number}", str(number), reason)
                elif cells:
                    yield number, {key: cell or None for key, cell in zip(heading, cells, strict=True)}
        except (RowError, csv.Error) as error:
            reason = str(error) if isinstance(error, RowError) else f"not CSV: {error}"
            at = number if isinstance(error, RowError) else reader.line_num
            yield at, BadRow(f"{path}:{at}", str(at), reason)


def _decoded(lines: Any) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if number == 1:
            line = line.removeprefix(MARK)
            problem = wrong_file(line)
            if problem:
                raise RowError(problem)
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise RowError(f"not UTF-8: byte 0x{byte:02x} in line {number}; save the file as UTF-8") from None


def _parquet(path: Path) -> Iterator[Item]:
    """Row groups are read one after another, some rows at a time."""
    import pyarrow.parquet as pq
    from pyarrow.lib import ArrowException

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (ArrowException, OSError) as error:
        yield number + 1, BadRow(f"{path}:{number + 1}", str(number + 1), f"not Parquet: {error}")


def read_saved(folder: Path) -> Iterator[Item]:
    """The rows of one split in a folder that `save_to_disk` of `datasets` wrote."""
    from datasets import Dataset

    return _of_datasets(folder, Dataset.load_from_disk)


def _arrow(path: Path) -> Iterator[Item]:
    """A single file of those that `datasets` writes."""
    from datasets import Dataset

    return _of_datasets(path, Dataset.from_file)


def _of_datasets(path: Path, load: Callable[[str], Dataset]) -> Iterator[Item]:
    """Rows as Arrow holds them: pictures stay encoded, classes stay numbers."""
    from pyarrow.lib import ArrowException

    number = 0
    try:
        for some in load(str(path)).with_format("arrow").iter(batch_size=AT_ONCE):
            for row in some.to_pylist():
                number += 1
                yield number, row
    except (ArrowException, OSError, ValueError, KeyError) as error:
        reason = f"not what datasets saves: {error}"
        yield number + 1, BadRow(f"{path}:{number + 1}", str(number + 1), reason)


READERS: dict[str, Callable[[Path], Iterator[Item]]] = {
    **{".jsonl": _lines, ".json": _json, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet, ".arrow": _arrow},
}
