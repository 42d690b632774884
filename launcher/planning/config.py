"""Composed YAML and the command line -> RunConfig, or every problem at once.

Hydra composes the groups; the values typed on the command line are put on top; then one walk over
RunConfig checks every key. RunConfig is the schema, but it is not handed to Hydra: OmegaConf would
stop at the first problem, and would turn the `no` of a YAML file into the text `False`.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import shlex
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from launcher.datafiles import absolute_source
from launcher.errors import ConfigError, Problem
from launcher.plain import from_data, to_data
from launcher.planning import answers, grammar, keys, secrets, yamlfile
from launcher.planning.overrides import CommandLine, read_command_line
from launcher.planning.sources import find_sources
from launcher.planning.walk import Walk, sentence
from launcher.spec import RunConfig

_PROGRAMS = ("cluster.python", "cluster.activate")
DEMO = "digits"  # the experiment that runs when no model, dataset or experiment is named


@dataclass(frozen=True, slots=True)
class Composed:
    """A valid configuration, its text for people, and the words that give it again from any folder."""

    config: RunConfig
    yaml: str
    overrides: tuple[str, ...]


def read_config(words: Sequence[str], *, sweep: bool = False) -> Composed:
    """The configuration that a command line asks for; with `sweep`, that of one job of a sweep.

    Raises ConfigError with all problems. Paths are relative to the current folder.
    """
    line = read_command_line(words, sweep=sweep)
    _choose_by_default(line)
    composed, choices = _compose(line)
    data = Walk(line, composed, find_sources(line.folders, choices)).run()
    if line.problems:
        raise ConfigError(*line.problems)
    for key in keys.PATHS:
        _make_absolute(data, key)
    line.values.update({key: _get(data, key) for key in line.values if key in keys.PATHS})
    config: RunConfig = from_data(RunConfig, data)
    shown = to_data(config)
    shown["env"]["set"] = secrets.masked(shown["env"]["set"])
    return Composed(config, yamlfile.dump(shown), line.recorded())


def _choose_by_default(line: CommandLine) -> None:
    """Add what is meant when a model, dataset or experiment is not named."""
    named = {"model", "dataset", keys.EXPERIMENT} & ({*line.words} | line.spoiled)
    files = {key.split(".")[0] for key in ("model.path", "dataset.train") if key in line.words}
    if "model.path" in line.words and "model" not in named and "local" in line.options["model"]:
        line.choices["model"] = "local"
    if "dataset.train" in line.words and "dataset" not in named and keys.EXPERIMENT not in named:
        line.choices["dataset"] = "jsonl"
    if not named and not files:
        line.choices[keys.EXPERIMENT] = DEMO


def _compose(line: CommandLine) -> tuple[Any, dict[str, str | None]]:
    """The DictConfig of all files and typed values, and the option taken in each group."""
    from hydra.errors import HydraException
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import GrammarParseError, OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]

    words = [f"{group}={option}" for group, option in line.choices.items() if option is not None]
    if line.folders[1:]:
        folders = ",".join(grammar.in_quotes(f"file://{folder}") for folder in line.folders[1:])
        words.append(f"hydra.searchpath=[{folders}]")
    try:
        # Jobs of a sweep differ in what is typed, and mostly not in their files.
        config = copy.deepcopy(_from_files(line.folders[0], tuple(words), _state(line.folders)))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        # A file of the user's own is wrong in a way that Hydra cannot pass; nothing behind it can be checked.
        raise ConfigError(*line.problems, _about_files(line, error)) from error
    choices = {str(key): value for key, value in config.hydra.runtime.choices.items()}
    with open_dict(config):
        del config["hydra"]
        for key, value in line.values.items():
            misfits = list(_arch_misfits(config, key, value)) if _sets_arch(key, value) else []
            if misfits:
                for misfit in misfits:
                    line.refuse(misfit, key)
                continue
            merge = isinstance(value, dict) and keys.is_mapping(key)
            literal = key == "env.set" or key.startswith("env.set.")
            try:
                OmegaConf.update(config, key, _unexpanded(value) if literal else value, merge=merge, force_add=True)
            except OmegaConfBaseException as error:
                incomplete = isinstance(error, GrammarParseError)
                why = "${ must begin a ${KEY} or ${oc.env:VARIABLE}" if incomplete else sentence(error)
                line.refuse(Problem(f"{line.words[key][-1]}: {why}", tries=(answers.example(key),)), key)
    return config, choices


@lru_cache(maxsize=32)
def _from_files(folder: Path, words: tuple[str, ...], state: Hashable) -> Any:
    """What Hydra makes of the files, whose `state` is part of the question; values are resolved later."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(version_base="1.3", config_dir=str(folder)):
        return compose("config", overrides=list(words), return_hydra_config=True)


def _state(folders: Iterable[Path]) -> Hashable:
    """When the options of every group were last written."""
    files = [file for folder in folders for pattern in ("*.yaml", "*/*.yaml") for file in folder.glob(pattern)]
    known = [(file, file.stat()) for file in files if file.is_file()]
    return tuple((str(file), stat.st_mtime_ns, stat.st_size) for file, stat in known)


def _unexpanded(value: Any) -> Any:
    """The value with each ${ written as OmegaConf reads it literally."""
    if isinstance(value, dict):
        return {name: _unexpanded(item) for name, item in value.items()}
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _sets_arch(key: str, value: Any) -> bool:
    return key.startswith("model.arch.") or (key == "model.arch" and isinstance(value, dict))


def _arch_misfits(config: Any, key: str, value: Any) -> Iterator[Problem]:
    """What of a typed model.arch the model's own has not, or has in another shape: it would be ignored or fail late."""
    from omegaconf import OmegaConf

    own = OmegaConf.select(config, key)
    if isinstance(value, dict) and OmegaConf.is_dict(own):
        for name, item in value.items():
            yield from _arch_misfits(config, f"{key}.{name}", item)
        return
    parent, _, name = key.rpartition(".")
    typed = f"{key}={answers.shown(value)}"
    if own is None:
        section = OmegaConf.select(config, parent)
        near = keys.nearest(name, [str(known) for known in section] if OmegaConf.is_dict(section) else [])
        tries = (
            grammar.shell(f"{parent}.{near}={grammar.as_typed(value)}") if near else "python -m launcher config model"
        )
        yield Problem(f"{typed}: there is no key {key}", tries=(tries,))
    elif OmegaConf.is_dict(own):
        yield Problem(f"{typed}: a mapping {{name: value}} is expected", tries=(f"{key}.{next(iter(own))}=VALUE",))
    elif OmegaConf.is_list(own) != isinstance(value, list):
        kind = "a list is" if OmegaConf.is_list(own) else "one value is"
        tried = grammar.as_typed(OmegaConf.to_container(own) if OmegaConf.is_list(own) else own)
        yield Problem(f"{typed}: {kind} expected", tries=(grammar.shell(f"{key}={tried}"),))


def _about_files(line: CommandLine, error: Exception) -> Problem:
    """What Hydra or the YAML reader says against the configuration files."""
    experiment = line.choices.get(keys.EXPERIMENT)
    file = keys.option_file(line.folders, keys.EXPERIMENT, experiment) if experiment else None
    unknown = re.search(r"Could not find '(\w+)/([^']+)'", str(error))
    if unknown and unknown.group(1) in line.options:
        problem = answers.for_unknown_option(unknown.group(1), unknown.group(2), line.options)
    else:
        problem = Problem(sentence(error).partition("\nConfig search path")[0], tries=("another value in the file",))
    return dataclasses.replace(problem, where=str(file or ""))


def _get(data: Mapping[str, Any], key: str) -> Any:
    value: Any = data
    for name in key.split("."):
        value = value[name]
    return value


def _make_absolute(data: dict[str, Any], key: str) -> None:
    """Replace a path by the absolute one; a bare program name stays for the PATH of its host."""
    *sections, name = key.split(".")
    for section in sections:
        data = data[section]
    value = data[name]
    if value is None or (key in _PROGRAMS and os.sep not in value.split()[0]):
        return
    if key in keys.SOURCES:
        data[name] = [absolute_source(one) for one in value] if isinstance(value, list) else absolute_source(value)
    elif key == "cluster.activate":
        script, *arguments = shlex.split(value)
        data[name] = shlex.join([os.path.abspath(os.path.expanduser(script)), *arguments])
    else:
        data[name] = os.path.abspath(os.path.expanduser(value))
