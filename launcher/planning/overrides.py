"""The words of a command line -> choices of groups and values of keys; all that is wrong, collected."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.errors import Problem
from launcher.planning import answers, checks, foreign, grammar, keys, secrets
from launcher.resources import conf_dir

CONFIG_DIR_FLAGS = ("--config-dir", "-cd")
SWEEP_FLAGS = ("-m", "--multirun")
SLOT_LISTS = ("cluster.include", "cluster.exclude")  # their values hold commas, so that no comma of theirs is a sweep
_ONE_VALUE = "one run takes one value"


@dataclass(slots=True)
class CommandLine:
    """What was typed, as far as it could be read, and every problem with it."""

    folders: list[Path]  # of configuration: the shipped one, then the user's
    options: Mapping[str, Sequence[str]]
    choices: dict[str, str | None] = field(default_factory=dict)  # group -> option
    values: dict[str, Any] = field(default_factory=dict)  # full key -> value
    words: dict[str, list[str]] = field(default_factory=dict)  # group or key -> the words that set it
    problems: list[Problem] = field(default_factory=list)
    spoiled: set[str] = field(default_factory=set)  # groups and keys with a problem; no other is reported for them
    sweep: bool = False  # these are the words of one job of a sweep

    def refuse(self, problem: Problem, *names: str) -> None:
        """Record a problem; `names` are the groups or keys it is about."""
        self.problems.append(problem)
        self.spoiled.update(names)

    def recorded(self) -> tuple[str, ...]:
        """The same command line in a form that means the same from every folder, secrets masked."""
        folders = (f"--config-dir={folder}" for folder in self.folders[1:])
        choices = (f"{group}={grammar.as_typed(option)}" for group, option in self.choices.items())
        variables = {key: value for key, value in self.values.items() if key.startswith("env.set.")}
        if isinstance(self.values.get("env.set"), dict):  # env.set={A:1}, one variable a word from here on
            variables |= {f"env.set.{name}": value for name, value in self.values["env.set"].items()}
        shown = {key: value for key, value in self.values.items() if key != "env.set"} | secrets.masked(variables)
        values = (f"{key}={grammar.as_typed(value)}" for key, value in shown.items())
        return (*folders, *choices, *values)


def read_command_line(words: Sequence[str], *, sweep: bool = False) -> CommandLine:
    """Read all words; nothing is raised, problems are in the result."""
    rest, folders, problems = take_config_dirs(words)
    line = CommandLine(folders=folders, options=keys.options(folders), problems=problems, sweep=sweep)
    command = foreign.split(rest)
    rest = command.rest
    if command.verb and (whole := foreign.in_one_line(command, line.options)) is not None:
        line.refuse(whole)
    while rest:
        word = rest.pop(0)
        if word.startswith("-"):
            _read_flag(line, word, rest)
        elif "=" not in word or word == "=":
            _read_bare(line, word, rest)
        else:
            _read_override(line, word)
    _refuse_repeated(line)
    return line


def is_sweep(words: Sequence[str]) -> bool:
    """Whether `words` ask for a sweep."""
    return any(word in SWEEP_FLAGS for word in words)


def take_config_dirs(words: Sequence[str]) -> tuple[list[str], list[Path], list[Problem]]:
    """Words without `--config-dir FOLDER`; the shipped folder and the named ones; those that are not there."""
    rest, folders, problems = [], [conf_dir()], []
    left = list(words)
    while left:
        word = left.pop(0)
        flag, equals, folder = word.partition("=")
        if flag not in CONFIG_DIR_FLAGS:
            rest.append(word)
            continue
        if not equals:
            folder = left.pop(0) if left else ""
        path = Path(os.path.expanduser(folder)).absolute()
        if folder and path.is_dir():
            folders.append(path)
        else:
            problems.append(Problem(f"--config-dir {folder}: no such folder", str(path), ("--config-dir FOLDER",)))
    return rest, folders, problems


def _read_flag(line: CommandLine, word: str, rest: list[str]) -> None:
    """A word that starts with a dash: never ours, answered with what is."""
    if word in SWEEP_FLAGS:
        text = f"{word} starts a sweep, which only run and plan can do"
        line.refuse(Problem(text, tries=("python -m launcher -m KEY=VALUE,VALUE",)))
        return
    flag, equals, raw = word.partition("=")
    if not equals and rest and _is_value(line, rest[0]):
        raw = rest.pop(0)
        word = f"{word} {raw}"
    name = flag.lstrip("-").replace("-", "_")
    line.refuse(answers.for_flag(flag, name, word, raw, line.options), name)


def _is_value(line: CommandLine, word: str) -> bool:
    """Whether `word` after a flag is its value, not an override of its own."""
    if word.startswith("-") and not re.match(r"-\.?\d", word):
        return False
    key, equals, _ = word.partition("=")
    return not equals or not (key in line.options or keys.kind_of(key))


def _read_bare(line: CommandLine, word: str, rest: list[str]) -> None:
    """A word without `=`."""
    if rest[:1] == ["="] and len(rest) > 1:  # KEY = VALUE, three words
        rest.pop(0)
        value = rest.pop(0)
        text = f"{word} = {value}: no blanks around ="
        line.refuse(Problem(text, tries=(grammar.shell(f"{word}={value}"),)), word)
        return
    line.refuse(answers.for_bare_word(word, line.options), word.lstrip("~+"))


def _read_override(line: CommandLine, word: str) -> None:
    """KEY=VALUE or GROUP=OPTION; a leading + or ++ means nothing, since every key exists."""
    typed_key, _, raw = word.partition("=")
    key = typed_key.strip().lstrip("+")
    if key.startswith("~"):
        line.refuse(answers.for_bare_word(key, line.options), key.lstrip("~"))
    elif key in line.options:
        line.words.setdefault(key, []).append(word)
        _read_choice(line, key, raw)
    elif keys.names_option(key):
        line.refuse(answers.for_option_name(key, word, raw, line.options), key)
    elif keys.kind_of(key) is not None:
        line.words.setdefault(key, []).append(word)
        _read_value(line, key, raw)
    else:
        line.refuse(answers.for_unknown_key(key, word, raw, line.options), key)


def _read_choice(line: CommandLine, group: str, raw: str) -> None:
    """GROUP=OPTION."""
    names = line.options[group]
    parsed = grammar.parse(raw)
    if parsed.sweep is not None:
        first = next((name for name in parsed.sweep if name in names), names[0])
        tries = (f"{group}={first}", _as_sweep(group, raw))
        line.refuse(Problem(f"{group}={raw}: {_ONE_VALUE}", tries=tries), group)
    elif parsed.value is None and parsed.readable and group == keys.EXPERIMENT:
        line.choices[group] = None
    elif isinstance(parsed.value, str) and parsed.value in names:
        shipped = parsed.value in keys.options(line.folders[:1])[group]
        again = [f for f in line.folders[1:] if shipped and keys.option_file([f], group, parsed.value)]
        for folder in again:  # Hydra takes the first it finds; an ignored file must not go unnoticed
            text = f"{group}={parsed.value} ships with the launcher, so a file of that name would be ignored"
            where = str(keys.option_file([folder], group, parsed.value))
            line.refuse(Problem(text, where, ("another file name",)), group)
        line.choices[group] = parsed.value
    else:
        line.refuse(answers.for_unknown_option(group, raw, line.options), group)


def _read_value(line: CommandLine, key: str, raw: str) -> None:
    """KEY=VALUE; the type is checked later, together with values from files."""
    problem = _misread(key, raw)
    if problem is not None:
        line.refuse(problem, key)
        return
    parsed = grammar.parse(raw)
    if keys.is_text(key):
        null = parsed.readable and parsed.value is None
        line.values[key] = None if null else parsed.value if isinstance(parsed.value, str) else raw
    elif keys.is_texts(key) and (texts := grammar.parse_texts(raw)) is not None:
        line.values[key] = texts
    elif parsed.readable:
        line.values[key] = parsed.value
    elif key in keys.SOURCES and (texts := grammar.parse_texts(raw)) is not None:  # [a.jsonl,~/b.jsonl]
        line.values[key] = texts
    else:
        found = grammar.parse_json(raw)
        line.values[key] = raw if found is None else found


def _misread(key: str, raw: str) -> Problem | None:
    """Why a value does not say what was probably meant, with the form that does; None when it does."""
    parsed = grammar.parse(raw)
    text, literal = keys.is_text(key), key.startswith("env.set.")
    if not raw.strip() and not literal:
        return Problem(f"{key}={raw} has no value (an unset shell variable?)", tries=(answers.example(key),))
    if "\n" in raw:  # a run's words are recorded one a line
        return Problem(f"{key}: a value is one line", tries=(f"{key}=VALUE",))
    if raw == "None":
        return _none(key)
    if not parsed.quoted:
        problem = _unfinished(key, raw, parsed)
        if problem is not None:
            return problem
    if text and not literal and _is_collection(parsed, raw):
        inner = parsed.value[0] if isinstance(parsed.value, list) and len(parsed.value) == 1 else None
        single = isinstance(inner, str) and key != "tune.target_modules"
        one = answers.spelled(key, str(inner), {}) if single else _without_sweep(key, raw)
        return Problem(f"{key}={raw}: text is expected", tries=(one,))
    if parsed.sweep is not None or (text and not parsed.readable and grammar.top_level_commas(raw)):
        return _refused_sweep(key, raw, parsed)
    return None


def _none(key: str) -> Problem:
    null = f"{key}=null" if keys.is_optional(keys.kind_of(key)) else answers.example(key)
    quoted = (grammar.shell(f'{key}="None"'),) if keys.is_text(key) else ()
    return Problem(f"{key}=None is the text None; did you mean null?", tries=(null, *quoted))


def _unfinished(key: str, raw: str, parsed: grammar.Parsed) -> Problem | None:
    """A value that looks cut off: it ends in a backslash or a comma, or its quote is not closed."""
    left = raw.rstrip("\\, ")
    whole = _without_sweep(key, left) if left else answers.example(key)
    if raw.endswith("\\"):
        return Problem(f"{key}={raw} ends in a backslash", tries=(whole,))
    if raw.endswith(",") and not parsed.readable:
        return Problem(f"{key}={raw} ends in a comma", tries=(whole,))
    if raw[:1] in ("'", '"') and not parsed.readable and keys.is_text(key):
        tries = (grammar.shell(f"{key}={grammar.in_quotes(raw[1:])}"),)
        return Problem(f"{key}={raw}: the quote is not closed", tries=tries)
    return None


def _is_collection(parsed: grammar.Parsed, raw: str) -> bool:
    return isinstance(parsed.value, list | dict) or (not parsed.readable and grammar.parse_json(raw) is not None)


def _refused_sweep(key: str, raw: str, parsed: grammar.Parsed) -> Problem:
    if keys.is_text(key) and checks.rule_problem(key, raw) is None:
        if key == "tune.target_modules":
            text = f"{key}={raw}: one regular expression over module names is expected"
            return Problem(text, tries=(_without_sweep(key, raw),))
        if _are_hosts(key, raw):
            return Problem(f"{key}={raw}: hosts are separated by @", tries=(_without_sweep(key, raw),))
        why = "text with a comma" if "," in raw else "text that looks like a sweep"
        sweep = (_as_sweep(key, raw),) if parsed.sweep and key not in SLOT_LISTS else ()
        return Problem(f"{key}={raw}: {why} is typed in quotes", tries=(_without_sweep(key, raw), *sweep))
    if answers.takes_list(key) and grammar.top_level_commas(raw):
        return Problem(f"{key}={raw}: a list is written in brackets", tries=(_without_sweep(key, raw),))
    typed = raw.split(",")[0].strip() if grammar.top_level_commas(raw) else ""
    if raw[:1] in ("^", "="):  # NCCL's marks, which are for the whole of a list
        typed = raw
    first = typed or (parsed.sweep[0] if parsed.sweep else "")
    sweep = (_as_sweep(key, raw),) if parsed.sweep else ()
    one = answers.spelled(key, first, {}) if first else answers.example(key)
    return Problem(f"{key}={raw}: {_ONE_VALUE}", tries=(one, *sweep))


def _are_hosts(key: str, raw: str) -> bool:
    """Whether `raw` is a list of hosts without slots, with commas for @."""
    return key in SLOT_LISTS and ":" not in raw and grammar.top_level_commas(raw)


def _as_sweep(key: str, raw: str) -> str:
    return f"python -m launcher -m {grammar.shell(f'{key}={raw}')}"


def _without_sweep(key: str, raw: str) -> str:
    """`key=raw` with its commas inside quotes or brackets, safe for a shell."""
    parsed, commas = grammar.parse(raw), grammar.top_level_commas(raw)
    if key == "tune.target_modules":
        raw = answers.as_expression(raw)
    elif _are_hosts(key, raw):
        raw = re.sub(r" *, *", "@", raw)
    elif keys.is_text(key) and (commas or parsed.sweep is not None or _is_collection(parsed, raw)):
        raw = grammar.in_quotes(raw)
    elif commas and answers.takes_list(key):
        raw = f"[{raw}]"
    return grammar.shell(f"{key}={raw}")


def _refuse_repeated(line: CommandLine) -> None:
    for key, words in line.words.items():
        if len(words) > 1:
            text = f"{key} is given {len(words)} times: {', '.join(words)}"
            line.refuse(Problem(text, tries=(grammar.shell(words[-1].lstrip("+")),)), key)
