"""One walk over the schema: every value of the composed configuration is checked, every problem collected."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from launcher.errors import Problem
from launcher.planning import answers, checks, grammar, keys
from launcher.planning.overrides import CommandLine
from launcher.planning.sources import Source
from launcher.spec import MISSING, RunConfig


class Walk:
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
            if key.startswith("sweep.") and not self.line.sweep:
                word = self.line.words[key][0]
                self._refuse(key, f"{word} has no effect without -m", (f"python -m launcher -m {grammar.shell(word)}",))
            rule = _INEFFECTIVE.get("model.arch" if key.startswith("model.arch.") else key)
            instead = rule(data) if rule else None
            if instead:
                word = self.line.words[key][0]
                self._refuse(key, f"{word} has no effect with {instead[0]}", (f"{instead[1]} {grammar.shell(word)}",))
        return data

    def _section(self, cls: type, plain: Any, prefix: str) -> dict[str, Any]:
        names = [f.name for f in dataclasses.fields(cls)]
        if not isinstance(plain, dict):
            section = prefix.rstrip(".")
            first = next(key for key in keys.kinds() if key.startswith(prefix) and not keys.names_option(key))
            self._refuse(section, f"{section}={answers.shown(plain)}: keys are expected", (answers.example(first),))
            plain = {}
        for name in plain:
            if name not in names:
                self._unknown(f"{prefix}{name}", plain[name])
        data: dict[str, Any] = {}
        for name in names:
            key = prefix + name
            kind = type(keys.default(key))
            if dataclasses.is_dataclass(kind):
                data[name] = self._section(kind, plain.get(name, {}), f"{key}.")
            elif name in plain:
                data[name] = self._value(key, plain[name])
            else:
                data[name] = keys.default(key)
                if data[name] == MISSING:
                    self._missing(key)
        return data

    def _value(self, key: str, plain: Any) -> Any:
        """The checked value of one key."""
        if plain == MISSING:
            self._missing(key)
            return plain
        if isinstance(plain, dict) and keys.is_mapping(key) and key not in self.line.spoiled:
            items = {name: self._resolved(f"{key}.{name}", item) for name, item in plain.items()}
            return {name: self._checked(f"{key}.{name}", item) for name, item in items.items()}
        value = self._resolved(key, plain)
        return value if key in self.line.spoiled else self._checked(key, value)

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


def _by_folder(data: dict[str, Any]) -> tuple[str, str] | None:
    path = data["model"]["path"]
    return (f"model.path={path}, whose config.json decides", "model.path=null") if path else None


def _without_lora(data: dict[str, Any]) -> tuple[str, str] | None:
    parts = [data["tune"][part] for part in ("language", "vision", "projector")]
    return (f"tune={data['tune']['name']}: no part is lora", "tune=lora") if "lora" not in parts else None


def _with_loss(name: str, other: str) -> Callable[[dict[str, Any]], tuple[str, str] | None]:
    return lambda data: (f"loss={name}", f"loss={other}") if data["loss"]["name"] == name else None


def _unless_profiled(*tools: str) -> Callable[[dict[str, Any]], tuple[str, str] | None]:
    """For a key that only these tools of group profile read."""
    why = {"deepspeed": "deepspeed, one step of rank 0", "comms": "comms, which records every rank"}

    def rule(data: dict[str, Any]) -> tuple[str, str] | None:
        name = data["profile"]["name"]
        return None if name in tools else (f"profile={why.get(name, name)}", f"profile={tools[0]}")

    return rule


def _only_over(transport: str) -> Callable[[dict[str, Any]], tuple[str, str] | None]:
    """For a key of one transport, that must be named: with auto it is chosen by what is found when planning."""

    def rule(data: dict[str, Any]) -> tuple[str, str] | None:
        chosen = data["cluster"]["transport"]
        return None if chosen == transport else (f"cluster.transport={chosen}", f"cluster.transport={transport}")

    return rule


def _not_over(*transports: str) -> Callable[[dict[str, Any]], tuple[str, str] | None]:
    """For a key that these transports do not read."""

    def rule(data: dict[str, Any]) -> tuple[str, str] | None:
        chosen = data["cluster"]["transport"]
        return (f"cluster.transport={chosen}", "cluster.transport=ssh") if chosen in transports else None

    return rule


# Key -> what makes a typed value useless, and what to type beside it; None where it has an effect.
_INEFFECTIVE: dict[str, Callable[[dict[str, Any]], tuple[str, str] | None]] = {
    "model.arch": _by_folder,
    "dataset.train": _on_digits,
    "dataset.eval": _on_digits,
    "loss.temperature": _with_loss("pointwise", "listwise"),
    "loss.positive_weight": _with_loss("listwise", "pointwise"),
    "cluster.slurm_args": _only_over("slurm"),
    "cluster.pdsh_args": _only_over("pdsh"),
    "cluster.connect_s": _not_over("local", "env"),
    "cluster.lost_contact_s": _not_over("local"),
    "cluster.sync": _not_over("local"),
    "profile.first_step": _unless_profiled("torch", "nsys", "deepspeed", "comms"),
    "profile.steps": _unless_profiled("torch", "nsys", "comms"),
    "profile.ranks": _unless_profiled("torch", "nsys"),
    **{f"tune.{name}": _without_lora for name in ("r", "lora_alpha", "lora_dropout", "target_modules")},
}


def _why_unresolved(error: Exception) -> str:
    text = sentence(error)
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


def _texts(plain: Any) -> Iterator[str]:
    """Every text inside a value."""
    if isinstance(plain, str):
        yield plain
    elif isinstance(plain, dict | list):
        for item in plain.values() if isinstance(plain, dict) else plain:
            yield from _texts(item)


def sentence(error: Exception) -> str:
    """The message of a library's error, without its blank lines and internal names."""
    lines = [part.strip() for part in str(error).splitlines()]
    keep = [part for part in lines if part and not part.startswith(("full_key:", "object_type=", "reference_type="))]
    return "\n".join(keep)
