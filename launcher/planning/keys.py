"""Every key and group of the configuration, read off RunConfig, and the name a person probably meant."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher import spec
from launcher.planning import yamlfile
from launcher.resources import conf_dir

EXPERIMENT = "experiment"  # a group without keys of its own: its files set keys of other groups
SECTIONS = (
    "run",
    "sweep",
    "env",
    "restart",
    "notify",
)  # keys that are kept together but have no options to choose from

SOURCES = ("dataset.train", "dataset.eval")  # a path, or the name of a hub's data set, or a list of them
# Paths are relative to where the user stands, and `~` is the home folder.
PATHS = (
    "run.root",
    "run.dir",
    "model.path",
    "model.adapter",
    "dataset.train",
    "dataset.eval",
    "dataset.image_root",
    "zero.config",
    "zero.nvme_path",
    "cluster.hostfile",
    "cluster.python",
    "cluster.activate",  # with arguments behind the path
    "resume",
    "env.file",
)


@functools.cache
def kinds() -> dict[str, Any]:
    """Full key -> its type in the schema, in the order of RunConfig."""
    found: dict[str, Any] = {}

    def walk(cls: type, prefix: str) -> None:
        for name, kind in typing.get_type_hints(cls).items():
            if dataclasses.is_dataclass(kind) and isinstance(kind, type):
                walk(kind, f"{prefix}{name}.")
            else:
                found[prefix + name] = kind

    walk(spec.RunConfig, "")
    return found


@functools.cache
def groups() -> tuple[str, ...]:
    """Names of the groups, in the order of RunConfig, `experiment` last."""
    hints = typing.get_type_hints(spec.RunConfig)
    sections = [name for name, kind in hints.items() if dataclasses.is_dataclass(kind)]
    return (*(name for name in sections if name not in SECTIONS), EXPERIMENT)


def default(key: str) -> Any:
    """The value that `key` has when nothing sets it; MISSING when it must be set."""
    value: Any = spec.RunConfig()
    for name in key.split("."):
        value = getattr(value, name)
    return value


def kind_of(key: str) -> Any:
    """The type of `key`, None for an unknown one. Below a dictionary every key is allowed."""
    if key in kinds():
        return kinds()[key]
    if key.startswith("env.set.") and key.count(".") == 2:
        return str
    return Any if key.startswith("model.arch.") else None


def is_texts(key: str) -> bool:
    """Whether `key` holds a list of texts."""
    return bool(base(kind_of(key)) == list[str])


def base(kind: Any) -> Any:
    """`kind` without its Optional."""
    return next((a for a in typing.get_args(kind) if a is not type(None)), kind) if is_optional(kind) else kind


def is_optional(kind: Any) -> bool:
    """Whether null is a value of `kind`."""
    return type(None) in typing.get_args(kind) or kind is Any


def is_text(key: str) -> bool:
    """Whether the value of `key` is text, so that whatever is typed has one meaning only."""
    return base(kind_of(key)) is str


def is_mapping(key: str) -> bool:
    """Whether the value of `key` is a dictionary."""
    return typing.get_origin(base(kind_of(key))) is dict


def names_option(key: str) -> bool:
    """Whether `key` is the name that the files of a group give their option: it is chosen by GROUP=OPTION."""
    group, _, name = key.partition(".")
    return name == "name" and group in groups()


def options(folders: Sequence[Path]) -> dict[str, tuple[str, ...]]:
    """Group -> its options, over all configuration folders."""
    return {
        group: tuple(
            sorted(
                {
                    path.relative_to(folder / group).with_suffix("").as_posix()
                    for folder in folders
                    for path in (folder / group).rglob("*.yaml")
                }
            )
        )
        for group in groups()
    }


@functools.cache
def default_options() -> dict[str, str | None]:
    """Group -> the option that config.yaml takes when none is named."""
    composed = yamlfile.load(conf_dir() / "config.yaml")
    return {group: option for entry in composed["defaults"] if entry != "_self_" for group, option in entry.items()}


def option_file(folders: Sequence[Path], group: str, option: str) -> Path | None:
    """The file that Hydra takes for an option: that of the first folder that has one."""
    files = (folder / group / f"{option}.yaml" for folder in folders)
    return next((path for path in files if path.is_file()), None)


def spelled(word: str) -> str | None:
    """The key whose letters `word` has, in any case and with anything between them; None when there is none."""
    letters = re.sub(r"[^a-z0-9]", "", word.lower())
    every = (key for key in kinds() if not names_option(key))
    return next((key for key in every if re.sub(r"[^a-z0-9]", "", key) == letters), None)


def nearest(word: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The name most like `word`, None when nothing is."""
    return next(iter(difflib.get_close_matches(word, list(names), n=1, cutoff=cutoff)), None)


def nearest_option(word: str, group: str, names: Sequence[str], synonyms: Mapping[str, str]) -> str | None:
    """The option of `group` that `word` probably means; `Qwen/Qwen3-VL-8B-Instruct` is `qwen3_vl_8b`."""
    plain = word.rstrip("/").rsplit("/", 1)[-1].lower().replace("-", "_").replace(".", "_")
    for exact in (plain, plain.removesuffix("_instruct")):
        if exact in names:
            return exact
    known = synonyms.get(plain)
    if known is not None:
        return known if known in names else None
    return nearest(plain, names)


def meant_keys(word: str) -> tuple[str, ...]:
    """The keys that an unknown `word` probably means, best first; all that end in it when several do."""
    word = word.replace("/", ".").strip(".")
    every = [key for key in kinds() if not names_option(key)]
    if word in every:
        return (word,)
    last = word.rsplit(".", 1)[-1]
    same = tuple(key for key in every if key.rsplit(".", 1)[-1] == last)
    if same:
        inside = tuple(key for key in same if key.split(".")[0] == word.split(".")[0])
        return inside or same
    # A slip in the last part of a dotted key should not lead to another group, so that group's keys come first.
    section = word.split(".")[0]
    inside_section = [key for key in every if key.startswith(f"{section}.")]
    close = nearest(word, inside_section) or nearest(word, every, cutoff=0.6 if "." in word else 0.7)
    if close:
        return (close,)
    leaf = nearest(last, [key.rsplit(".", 1)[-1] for key in every], cutoff=0.7)
    return tuple(key for key in every if key.rsplit(".", 1)[-1] == leaf)
