"""Composed YAML and the command line -> RunConfig, or every problem at once.

Hydra composes the groups; the values typed on the command line are put on top; then one walk over
RunConfig checks every key. RunConfig is the schema, but it is not handed to Hydra: OmegaConf would
stop at the first problem, and would turn the `no` of a YAML file into the text `False`.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.planning import answers, checks, grammar, keys, secrets, yamlfile
from launcher.planning.overrides import CommandLine, read_command_line
from launcher.planning.sources import Source, find_sources
from launcher.spec import MISSING, RunConfig, from_data, to_data

DEMO = "digits"  # the experiment that runs when no model, dataset or experiment is named


@dataclass(frozen=True, slots=True)
class Composed:
    """A valid configuration, its text for people, and the words that give it again from any folder."""

    config: RunConfig
    yaml: str
    overrides: tuple[str, ...]


def read_config(words: Sequence[str]) -> Composed:
    """The configuration that a command line asks for.

    Raises ConfigError with all problems. Paths are relative to the current folder.
    """
    line = read_command_line(words)
    _choose_by_default(line)
    composed, choices = _compose(line)
    data = _Walk(line, composed, find_sources(line.folders, choices)).run()
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
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import GrammarParseError, OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]

    words = [f"{group}={option}" for group, option in line.choices.items() if option is not None]
    if line.folders[1:]:
        folders = ",".join(grammar.in_quotes(f"file://{folder}") for folder in line.folders[1:])
        words.append(f"hydra.searchpath=[{folders}]")
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(line.folders[0])):
            config = compose("config", overrides=words, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        # A file of the user's own is wrong in a way that Hydra cannot pass; nothing behind it can be checked.
        raise ConfigError(*line.problems, _about_files(line, error)) from error
    choices = {str(key): value for key, value in config.hydra.runtime.choices.items()}
    with open_dict(config):
        del config["hydra"]
        for key, value in line.values.items():
            merge = isinstance(value, dict) and keys.is_mapping(key)
            try:
                OmegaConf.update(config, key, value, merge=merge, force_add=True)
            except OmegaConfBaseException as error:
                incomplete = isinstance(error, GrammarParseError)
                why = "${ must begin a ${KEY} or ${oc.env:VARIABLE}" if incomplete else _sentence(error)
                line.refuse(Problem(f"{line.words[key][-1]}: {why}", tries=(answers.example(key),)), key)
    return config, choices


def _about_files(line: CommandLine, error: Exception) -> Problem:
    """What Hydra or the YAML reader says against the configuration files."""
    experiment = line.choices.get(keys.EXPERIMENT)
    file = keys.option_file(line.folders, keys.EXPERIMENT, experiment) if experiment else None
    unknown = re.search(r"Could not find '(\w+)/([^']+)'", str(error))
    if unknown and unknown.group(1) in line.options:
        problem = answers.for_unknown_option(unknown.group(1), unknown.group(2), line.options)
    else:
        problem = Problem(_sentence(error).partition("\nConfig search path")[0], tries=("another value in the file",))
    return dataclasses.replace(problem, where=str(file or ""))


def _sentence(error: Exception) -> str:
    """The message of a library's error, without its blank lines and internal names."""
    lines = [part.strip() for part in str(error).splitlines()]
    keep = [part for part in lines if part and not part.startswith(("full_key:", "object_type=", "reference_type="))]
    return "\n".join(keep)


class _Walk:
    """One pass over the schema, that checks each value and collects problems into the command line."""

    def __init__(self, line: CommandLine, composed: Any, sources: Mapping[str, Source]) -> None:
        from omegaconf import OmegaConf

        self.line = line
        self.composed = composed
        self.sources = sources
        self.plain = OmegaConf.to_container(composed, resolve=False)

    def run(self) -> dict[str, Any]:
        """The data of a RunConfig; worth using only when no problem was found."""
        data = self._section(RunConfig, self.plain, "")
        for key in self.line.values:
            instead = _INEFFECTIVE[key](data) if key in _INEFFECTIVE else None
            if instead:
                word = self.line.words[key][0]
                self._refuse(key, f"{word} has no effect with {instead[0]}", (f"{instead[1]} {grammar.shell(word)}",))
        return data

    def _section(self, cls: type, plain: Any, prefix: str) -> dict[str, Any]:
        fields = {f.name: f for f in dataclasses.fields(cls)}
        name = prefix.rstrip(".")
        if not isinstance(plain, dict):
            if plain is not None:  # a group whose file is empty
                self._refuse(
                    name, f"{name}={answers.shown(plain)}: keys are expected", (answers.example(next(_leaves(name))),)
                )
            plain = {}
        for key in plain:
            if key not in fields:
                self._unknown(f"{prefix}{key}", plain[key])
        data: dict[str, Any] = {}
        for key in fields:
            full = prefix + key
            section = type(keys.default(full))
            if dataclasses.is_dataclass(section):
                data[key] = self._section(section, plain.get(key, {}), f"{full}.")
            else:
                data[key] = self._value(full, plain[key]) if key in plain else keys.default(full)
                if data[key] == MISSING and key not in plain:
                    self._missing(full)
        return data

    def _value(self, key: str, plain: Any) -> Any:
        """The checked value of one key."""
        if plain == MISSING:
            self._missing(key)
            return plain
        value = self._resolved(key, plain)
        if key in self.line.spoiled:
            return value
        if isinstance(value, dict) and keys.is_mapping(key):
            return {name: self._checked(f"{key}.{name}", item) for name, item in value.items()}
        return self._checked(key, value)

    def _checked(self, key: str, value: Any) -> Any:
        typed = key in self.line.values
        source = None if typed else self.sources.get(key)
        if key.startswith("env.set.") and type(value) in (int, float):
            value = source.text if source and source.plain else str(value)
        if source is not None and source.plain and not isinstance(value, str | None):
            value = self._as_written(key, value, source)
        problem = checks.type_problem(key, value) or checks.rule_problem(key, value)
        if value == "None" and source is not None and source.plain:
            problem, fit = "did you mean null?", None
        else:
            fit = checks.repaired(key, value) if problem else None
        if problem:
            tries = answers.example(key) if fit is None else grammar.shell(f"{key}={grammar.as_typed(fit)}")
            as_read = answers.shown(value) if source is None or not source.plain else source.text
            word = self.line.words[key][-1] if key in self.line.words else f"{key}={as_read}"
            self._refuse(key, f"{word}: {problem}", (tries,))
        return value

    def _as_written(self, key: str, value: Any, source: Source) -> Any:
        """The text of the file where text belongs; a number that YAML misread is a problem."""
        written = source.text
        if keys.is_text(key):
            if key.startswith("env.set.") and written.lower() in ("true", "false"):
                text = f"{key}: {written} in a variable; programs read 1 and 0, or the text in quotes"
                self._refuse(key, text, (f"{key}={int(value)}", f'"{written}" in the file'))
            return written
        misread = ":" in written or re.fullmatch(r"[-+]?0[0-9_]+", written)
        if misread and type(value) is int:
            without = written.lstrip("+-0_").replace("_", "") or "0"
            tries = (f"{key}={without}",) if ":" not in written else (f"{key}={value}",)
            self._refuse(key, f"{key}: YAML reads {written} as {value}", tries)
        return value

    def _resolved(self, key: str, plain: Any) -> Any:
        """The value with its ${...} replaced."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        if not any("${" in text for text in _texts(plain)):
            return plain
        try:
            value = OmegaConf.select(self.composed, key)
            return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            text = next(text for text in _texts(plain) if "${" in text)
            self._refuse(key, f"{key}={text}: {_why_unresolved(error)}", _tries_for_interpolation(key, text))
            return plain

    def _missing(self, key: str) -> None:
        group = key.split(".")[0]
        if {key, group, keys.EXPERIMENT} & self.line.spoiled:
            return
        if key == "model.name":
            models = self.line.options["model"]
            text = f"no model is named; there are {', '.join(models)}"
            model = "qwen3_vl_reranker_8b" if "qwen3_vl_reranker_8b" in models else models[0]
            self._refuse("model", text, (f"model={model}",))
        else:
            self._refuse(key, f"{key} must be given", (answers.placeholder(key),))

    def _unknown(self, key: str, value: Any) -> None:
        """A key of a file that the schema lacks."""
        shown = "" if isinstance(value, dict) else answers.shown(value)
        problem = answers.for_unknown_key(key, f"{key}={shown}" if shown else key, shown, self.line.options)
        under = (place.where for name, place in self.sources.items() if name == key or name.startswith(f"{key}."))
        self.line.refuse(dataclasses.replace(problem, where=next(under, "")), key)

    def _refuse(self, key: str, text: str, tries: tuple[str, ...]) -> None:
        if key in self.line.spoiled:
            return
        source = self.sources.get(key) if key not in self.line.values else None
        self.line.refuse(Problem(text, source.where if source else "", tries), key)


def _on_digits(data: dict[str, Any]) -> tuple[str, str] | None:
    return ("dataset=digits", "dataset=jsonl") if data["dataset"]["name"] == "digits" else None


def _without_lora(data: dict[str, Any]) -> tuple[str, str] | None:
    parts = [data["tune"][part] for part in ("language", "vision", "projector")]
    return (f"tune={data['tune']['name']}: no part is lora", "tune=lora") if "lora" not in parts else None


def _with_loss(name: str, other: str) -> Callable[[dict[str, Any]], tuple[str, str] | None]:
    return lambda data: (f"loss={name}", f"loss={other}") if data["loss"]["name"] == name else None


# Key -> what makes a typed value useless, and what to type beside it; None where it has an effect.
_INEFFECTIVE: dict[str, Callable[[dict[str, Any]], tuple[str, str] | None]] = {
    "dataset.train": _on_digits,
    "dataset.eval": _on_digits,
    "loss.temperature": _with_loss("pointwise", "listwise"),
    "loss.positive_weight": _with_loss("listwise", "pointwise"),
    **{f"tune.{name}": _without_lora for name in ("r", "lora_alpha", "lora_dropout", "target_modules")},
}


def _why_unresolved(error: Exception) -> str:
    text = _sentence(error)
    for pattern, ours in (
        (r"Environment variable '(.+?)' not found", "the environment has no variable {}"),
        (r"Interpolation key '(.+?)' not found", "there is no key {}"),
    ):
        found = re.search(pattern, text)
        if found:
            return ours.format(found.group(1))
    return text


def _tries_for_interpolation(key: str, text: str) -> tuple[str, ...]:
    variable = re.search(r"\$\{oc\.env:([^,}]+)\}", text)
    if variable:
        return (f"export {variable.group(1)}=VALUE", answers.example(key))
    name = re.search(r"\$\{([\w.]+)\}", text)
    near = keys.nearest(name.group(1), keys.kinds()) if name else None
    return (grammar.shell(f"{key}=${{{near}}}"),) if near else (answers.example(key),)


def _leaves(section: str) -> Iterator[str]:
    """Keys of a group or section."""
    return (key for key in keys.kinds() if key.startswith(f"{section}."))


def _texts(plain: Any) -> Iterator[str]:
    """Every text inside a value."""
    if isinstance(plain, str):
        yield plain
    elif isinstance(plain, dict | list):
        for item in plain.values() if isinstance(plain, dict) else plain:
            yield from _texts(item)


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
    if data[name] is not None and (key != "cluster.python" or os.sep in data[name]):
        data[name] = os.path.abspath(Path(data[name]).expanduser())
