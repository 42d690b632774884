"""Where prepared rows are kept, what they depend on, and what their summary says.

Standard library only: both planes ask.

    CACHE/launcher/prepared/ROWS/            rows of one split, read, checked and normalised
        rows.arrow  blob.bin  bad.json  media.json  summary.json
        LENGTHS/                             their tokens for one tokenizer, length and resize rule
            lengths.arrow  unfit.json  summary.json

A name is a hash of everything that what is inside depends on. `summary.json` is there once the rest is whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from launcher.datafiles import known_files, sources_of
from launcher.hubs import local_folder
from launcher.plain import to_data
from launcher.rundir import read_json
from launcher.spec import RunConfig

SPLITS = ("train", "eval")
MODALITIES = ("text", "image", "video", "mixed")
BAR = 40  # characters of the longest bar
SUMMARY = "summary.json"
# What reading a file raises that a crash or somebody who tidies up has left in pieces: it is made anew.
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)
VERSION = 3  # of what is written; raised when rows or lengths of the same input come out otherwise
# What a summary tells of rows, in the order of its lists: the fields of launcher.estimates.Load.
QUANTITIES = ("tokens", "visual", "patches", "key_rows", "documents", "answers", "pairs", "patch_pairs")
HASHED_BYTES = 4 * 2**20  # files up to this size count by content, larger ones by size and time of change
ROW_KEYS = (
    *("format", "source", "subset", "split", "eval_split", "eval_fraction", "columns", "image_root", "weights"),
    *("max_rows", "random_negatives", "min_pixels", "max_pixels", "on_bad", "shuffle_labels", "video"),
)
LENGTH_KEYS = ("max_length", "over_long")  # pixel limits and video options are in the rows
PROCESSOR_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json"),
    *("added_tokens.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("chat_template.json", "chat_template.jinja", "config.json"),
)


def cache_dir() -> Path:
    """Folder of everything that is prepared, in XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "launcher" / "prepared"


def rows_folder(config: RunConfig, split: str) -> Path:
    """Where the rows of a split are kept; a changed data file or setting is another folder.

    Images and videos that the rows name are no part of the name: `media.json` has what they were.
    """
    dataset = config.dataset
    content = {
        "version": VERSION,
        "split": split,
        "cwd": os.getcwd(),  # images may be relative to it
        "files": [_file_mark(path) for path in known_files(dataset, split)],
        "named": sources_of(dataset, split),
        "settings": {key: to_data(getattr(dataset, key)) for key in ROW_KEYS},
        "function": [_file_mark(path) for path in _own_code(dataset.format)],
        "task": to_data(config.task),
        "loss": config.loss.name,  # some need negatives, or a teacher's scores
        "taught": config.loss.name == "distill" and config.metric == "loss",  # held-out rows need those too
        "seed": config.train.seed,
    }
    return cache_dir() / _key(content)


def lengths_folder(config: RunConfig, rows: Path) -> Path:
    """Where the tokens of these rows are kept."""
    model, dataset = config.model, config.dataset
    content = {
        "version": VERSION,
        "processor": [_file_mark(path) for path in processor_files(config)],
        "model": [model.repo, model.arch],
        "family": model.family,
        "pixels": [model.min_pixels, model.max_pixels],
        "settings": {key: to_data(getattr(dataset, key)) for key in LENGTH_KEYS},
        "task": to_data(config.task),
        "shared_prefix": config.attention.shared_prefix,
    }
    return rows / _key(content)


def read_summary(config: RunConfig) -> dict[str, dict[str, Any]]:
    """What is known of each split that has been prepared for this configuration.

    The rows' summary; with that of their lengths in `lengths`, once these are counted.
    """
    found = {}
    for split in SPLITS:
        if not has_split(config, split):
            continue
        folder = rows_folder(config, split)
        rows = summary_of(folder)
        if rows is not None:
            found[split] = {**rows, "lengths": summary_of(lengths_folder(config, folder))}
    return found


def summary_of(folder: Path) -> dict[str, Any] | None:
    """The summary of a folder that is whole, else None."""
    try:
        found = read_json(folder / SUMMARY)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def has_split(config: RunConfig, split: str) -> bool:
    """Whether the run has training rows, or held-out ones."""
    return split == "train" or config.dataset.format == "digits" or bool(sources_of(config.dataset, split))


def processor_files(config: RunConfig) -> list[Path]:
    """Files of the model's tokenizer and image processor on this machine; none for those that are built."""
    model = config.model
    folder = Path(model.path) if model.path is not None else None
    if folder is None and model.weights == "pretrained" and model.repo is not None:
        folder = local_folder(model.repo, model.source, "models")
    return [folder / name for name in PROCESSOR_FILES if (folder / name).is_file()] if folder else []


def _own_code(format_name: str) -> Iterator[Path]:
    """The file that a format `package.module:function` is in; found without importing it."""
    if ":" not in format_name:
        return
    parts = format_name.partition(":")[0].split(".")
    for entry in sys.path:
        base = Path(entry or ".", *parts)
        yield from (path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file())


def _file_mark(path: Path) -> list[Any]:
    """What tells a file from another of the same name."""
    known = path.stat()
    if known.st_size > HASHED_BYTES:
        return [str(path), known.st_size, known.st_mtime_ns]
    return [str(path), hashlib.sha256(path.read_bytes()).hexdigest()]


def media_marks(paths: Iterable[str]) -> dict[str, list[int] | None]:
    """Size and time of change of each file; None for one that is not there."""
    found: dict[str, list[int] | None] = {}
    for path in paths:
        try:
            known = os.stat(path)
            found[path] = [known.st_size, known.st_mtime_ns]
        except OSError:
            found[path] = None
    return found


def columns(rows: Sequence[Sequence[str]], right: tuple[int, ...] = ()) -> list[str]:
    """Lines of a table, columns two spaces apart, those of `right` aligned at their end."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    padded = (
        [c.rjust(w) if at in right else c.ljust(w) for at, (c, w) in enumerate(zip(row, widths, strict=True))]
        for row in rows
    )
    return ["  ".join(cells).rstrip() for cells in padded]


def modality_lines(summary: dict[str, Any]) -> list[str]:
    """A table of what queries, documents or messages are made of."""
    rows = [("", *MODALITIES)]
    rows += [(what, *(f"{counts[kind]:,}" for kind in MODALITIES)) for what, counts in summary["modality"].items()]
    return columns(rows, right=(1, 2, 3, 4)) if len(rows) > 1 else []


def histogram_lines(summary: dict[str, Any]) -> list[str]:
    """A table of tokens a row, with bars; none while they are not counted."""
    bins = (summary.get("lengths") or {}).get("histogram", [])
    if not bins:
        return []
    most = max(count for _, _, count in bins)
    rows = [("tokens", "rows", "")]
    rows += [(f"{low:,}-{high - 1:,}", f"{n:,}", "#" * math.ceil(BAR * n / most)) for low, high, n in bins]
    return columns(rows, right=(0, 1))


def _key(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]
