"""Which files a data set is: of a folder, or of a hub's data set in the cache here. Both planes ask.

Nothing is downloaded. PyYAML reads the card of a hub's data set, pyarrow the number of rows of a Parquet file.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.hubs import local_folder
from launcher.spec import DatasetConfig

TEXTS = (".jsonl", ".json", ".csv", ".tsv")
SUFFIXES = (*TEXTS, ".parquet", ".arrow", *(f"{suffix}.gz" for suffix in TEXTS))
# Files beside the data that describe them.
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
KNOWN_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("eval", "evaluation"), "eval"),
}
SPLIT_WORD = re.compile(rf"(?:^|[-_. /])({'|'.join(KNOWN_SPLITS)})(?=[-_. /0-9]|$)", re.IGNORECASE)
SHARD = re.compile(r"([\w.]+)-\d{5}-of-\d{5}")
BEIR_TABLES = ("queries", "corpus", "qrels")


def absolute_source(value: str) -> str:
    """A path made absolute; the name of a hub's data set as it is, unless something here is called so."""
    return value if is_hub_name(value) else os.path.abspath(os.path.expanduser(value))


def is_hub_name(value: str) -> bool:
    """Whether `value` is meant as OWNER/NAME of a hub: it looks so, and nothing here is called so."""
    return HUB_NAME.fullmatch(value) is not None and not value.lower().endswith(SUFFIXES) and not os.path.exists(value)


def is_divided(data: DatasetConfig) -> bool:
    """Whether the held-out rows are a part of the training rows (dataset.eval_fraction)."""
    return data.eval is None and data.eval_split is None and data.eval_fraction > 0


def sources_of(data: DatasetConfig, split: str) -> tuple[str, ...]:
    """What the rows of "train" or "eval" come from; without dataset.eval that may be another split of the former."""
    same = data.eval is None and (data.eval_split is not None or data.eval_fraction > 0)
    return data.sources("train" if split == "train" or same else "eval")


def known_files(data: DatasetConfig, split: str, *, of_hubs: bool = True) -> list[Path]:
    """The data files of a split that are on this machine; `of_hubs=False` leaves out what any machine can fetch."""
    found: list[Path] = []
    for name in sources_of(data, split):
        if of_hubs or not is_hub_name(name):
            with contextlib.suppress(ConfigError):
                found += files_of(data, name, split)
    return found


def paths(data: DatasetConfig) -> list[tuple[str, str]]:
    """(key, path) of each source on a disk."""
    named = ((f"dataset.{split}", name) for split in ("train", "eval") for name in data.sources(split))
    return [(key, name) for key, name in named if data.format != "digits" and not is_hub_name(name)]


def hub_names(data: DatasetConfig) -> list[str]:
    """Each source that is a hub's data set, once."""
    named = (name for split in ("train", "eval") for name in data.sources(split))
    return list(dict.fromkeys(name for name in named if data.format != "digits" and is_hub_name(name)))


def locate(data: DatasetConfig, name: str, key: str) -> Path:
    """The file or folder that a source is. Raises ConfigError for what is not here."""
    if is_hub_name(name):
        folder = local_folder(name, data.source, "datasets")
        if folder is None:
            text = f"{key}={name}: no file or folder is called so, and no data set of {data.source} here is either"
            raise ConfigError(Problem(text, tries=(f"python -m launcher fetch {key}={name} ...", f"{key}=FILE.jsonl")))
        return folder
    path = Path(name)
    if not name or not path.exists():
        text = f"{key}={name} does not exist; a file, a folder, or OWNER/NAME of a hub's data set is expected"
        raise ConfigError(Problem(text, tries=(f"{key}=FILE.jsonl", f"{key}=OWNER/NAME")))
    if path.is_file() and not name.lower().endswith(SUFFIXES):
        text = f"{key}={name}: files of rows end in {', '.join(SUFFIXES)}"
        raise ConfigError(Problem(text, tries=(f"{key}=FILE.jsonl",)))
    return path


def files_of(data: DatasetConfig, name: str, split: str) -> list[Path]:
    """The data files of one source of "train" or "eval", in their order. Raises ConfigError."""
    root = locate(data, name, _key(data, split))
    if root.is_file():
        return [root]
    wanted = wanted_split(data, name, split)
    tables = beir_tables(root, wanted)
    return [file for files in tables.values() for file in files] if tables else folder_files(data, root, wanted, split)


def wanted_split(data: DatasetConfig, name: str, split: str) -> str | None:
    """Which split of a source is meant; None is all of its files."""
    if split == "eval" and (data.eval is not None or data.eval_split is not None):
        return data.eval_split
    return data.split or ("train" if is_hub_name(name) else None)


def folder_files(data: DatasetConfig, root: Path, wanted: str | None, split: str) -> list[Path]:
    """The data files in a folder: of `datasets`' save_to_disk, as its README.md says, or all that are named so."""
    if (root / "dataset_dict.json").is_file():
        saved = json.loads((root / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        there: dict[str, list[Path]] = {str(name): _saved(root / str(name)) for name in saved}
    elif (root / "state.json").is_file():
        return _saved(root)
    else:
        there = _of_readme(data, root) or _of_names(data, root)
    if wanted is None and len(there) == 1:
        return next(iter(there.values()))
    if wanted in there:
        return there[wanted]
    if wanted == "train" and list(there) == [""]:
        return there[""]
    key = "dataset.split" if split == "train" or not (data.eval or data.eval_split) else "dataset.eval_split"
    if not there:
        text = f"{root} holds no data file ({', '.join(SUFFIXES)})"
        raise ConfigError(Problem(text, tries=(f"{_key(data, split)}=FILE",)))
    names = [name for name in there if name]
    text = f"{root} has the splits {', '.join(names) or 'of no name'}; {key}={'null' if wanted is None else wanted}"
    raise ConfigError(Problem(text, tries=tuple(f"{key}={name}" for name in names) or (f"{key}=null",)))


def beir_tables(root: Path, wanted: str | None) -> dict[str, list[Path]] | None:
    """Files of the tables queries, corpus and qrels, or None for a folder that is no such set.

    Raises ConfigError for judgements of other splits, which would be trained or measured on unawares.
    """
    if not root.is_dir():
        return None
    tables: dict[str, list[Path]] = {}
    for table in BEIR_TABLES:
        single = [root / f"{table}{suffix}" for suffix in SUFFIXES if (root / f"{table}{suffix}").is_file()]
        tables[table] = single[:1] or _listed(root / table)
        own = [file for file in tables[table] if split_of(file.relative_to(root)) == wanted]
        tables[table] = own or tables[table]
    if not all(tables.values()):
        return None
    judged = dict.fromkeys(split_of(file.relative_to(root)) for file in tables["qrels"])
    if len(judged) > 1 or (wanted is not None and not {wanted, ""} & judged.keys()):
        text = f"{root} has judgements for {', '.join(judged)}, and {wanted or 'none of them'} is asked for"
        keys = ("dataset.split", "dataset.eval_split")
        raise ConfigError(Problem(text, tries=tuple(f"{key}={name}" for name in judged if name for key in keys)))
    return tables


def split_of(path: Path) -> str:
    """The split that a file's name, else one of its folders', tells; empty for none."""
    for part in (path.stem, *reversed(path.parent.parts)):
        shard = SHARD.fullmatch(part)
        word = SPLIT_WORD.search(part)
        if word:
            return KNOWN_SPLITS[word.group(1).lower()]
        if shard:
            return shard.group(1)
    return ""


def count_rows(files: Iterable[Path]) -> int | None:
    """How many rows files hold, where that is quickly told: lines of JSON, and Parquet's own count. Raises OSError."""
    total = 0
    for file in files:
        suffix = file.suffix.lower()
        if suffix == ".jsonl":
            with open(file, "rb") as lines:
                for number, line in enumerate(lines):
                    if number == 0 and line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
                        return None
                    total += not line.isspace()
        elif suffix == ".parquet":
            import pyarrow.parquet as pq
            from pyarrow.lib import ArrowException

            try:
                total += pq.ParquetFile(file).metadata.num_rows
            except ArrowException:  # `check data` says what is wrong with it
                return None
        else:
            return None
    return total


def _key(data: DatasetConfig, split: str) -> str:
    return "dataset.eval" if split == "eval" and data.eval is not None else "dataset.train"


def _saved(folder: Path) -> list[Path]:
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return [folder / entry["filename"] for entry in state["_data_files"]]


def _listed(folder: Path) -> list[Path]:
    """All data files below a folder, sorted; none of hidden folders."""
    found: list[Path] = []
    seen: set[str] = set()  # a link may lead back to where it stands
    for where, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(where)
        folders[:] = [] if real in seen else [name for name in folders if not name.startswith(".")]
        for name in names if real not in seen else ():
            if name.lower().endswith(SUFFIXES) and name not in DESCRIPTIONS and not name.startswith("."):
                found.append(Path(where, name))
        seen.add(real)
    return sorted(found)


def _of_names(data: DatasetConfig, root: Path) -> dict[str, list[Path]]:
    """Split -> files, as their names tell; of a subset, those in its folder."""
    files = _listed(root)
    if data.subset is not None:
        files = [file for file in files if data.subset in file.relative_to(root).parent.parts]
        if not files:
            folders = sorted({part for file in _listed(root) for part in file.relative_to(root).parent.parts})
            raise _no_subset(data.subset, root, folders)
    found: dict[str, list[Path]] = {}
    for file in files:
        # What `datasets` saves is named alike in every folder.
        saved = file.suffix == ".arrow" and (file.parent / "state.json").is_file()
        found.setdefault(split_of((file.parent if saved else file).relative_to(root)), []).append(file)
    return found


def _of_readme(data: DatasetConfig, root: Path) -> dict[str, list[Path]] | None:
    """Split -> files, as the card of a hub's data set lists them; None when it lists none."""
    import yaml  # type: ignore[import-untyped]

    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    head = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    try:
        card = yaml.safe_load(head.group(1)) if head else None
    except yaml.YAMLError:
        card = None
    configs = card.get("configs") if isinstance(card, dict) else None
    configs = [c for c in configs or [] if isinstance(c, dict) and c.get("data_files")]
    if not configs:
        return None
    names = [str(config.get("config_name", "default")) for config in configs]
    chosen = data.subset or next((n for n, c in zip(names, configs, strict=True) if c.get("default")), None)
    chosen = chosen or ("default" if "default" in names else names[0] if len(names) == 1 else None)
    if chosen not in names:
        raise _no_subset(data.subset, root, names)
    return {split: _matching(root, patterns) for split, patterns in _patterns(configs[names.index(chosen)]).items()}


def _patterns(config: dict[str, Any]) -> dict[str, list[str]]:
    """Split -> patterns of one configuration of a card: a pattern, patterns, or {split, path} entries."""
    entries = config["data_files"]
    found: dict[str, list[str]] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        split, path = (entry.get("split", "train"), entry.get("path")) if isinstance(entry, dict) else ("train", entry)
        found.setdefault(str(split), []).extend(str(p) for p in (path if isinstance(path, list) else [path]))
    return found


def _matching(root: Path, patterns: Iterable[str]) -> list[Path]:
    files = {file.relative_to(root).as_posix(): file for file in _listed(root)}
    names = dict.fromkeys(name for pattern in patterns for name in files if fnmatch.fnmatch(name, pattern))
    return [files[name] for name in names]


def _no_subset(subset: str | None, root: Path, names: Iterable[str]) -> ConfigError:
    known = list(names)
    text = f"{root} has the subsets {', '.join(known) or '(none)'}, and dataset.subset={subset or 'null'}"
    tries = tuple(f"dataset.subset={name}" for name in known[:3]) or ("dataset.subset=null",)
    return ConfigError(Problem(text, tries=tries))
