"""What to type instead: answers to unknown keys, options, flags and words."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import Problem
from launcher.planning import checks, grammar, habits, keys
from launcher.planning.help import VERBS

Options = Mapping[str, Sequence[str]]

_CONFIG = "python -m launcher config"
_HYDRA_FLAGS = {
    "--cfg": ("python -m launcher plan",),
    "-c": ("python -m launcher plan",),
    "--info": ("python -m launcher plan", _CONFIG),
    "--resolve": ("python -m launcher plan",),
    "--config-path": ("--config-dir FOLDER",),
    "-cp": ("--config-dir FOLDER",),
    "--config-name": ("--config-dir FOLDER", "experiment=NAME"),
    "-cn": ("--config-dir FOLDER", "experiment=NAME"),
    "--hydra-help": ("python -m launcher help",),
    "--json": ("python -m launcher plan --json",),
}
# A file where an option is expected -> the keys that take files.
_FILES = {
    "dataset": "dataset=jsonl dataset.train={}",
    "train": "dataset=jsonl dataset.train={}",
    "eval": "dataset.eval={}",
    "model": "model.path={}",
    "zero": "zero.config={}",
    "cluster": "cluster.hostfile={}",
    "checkpoint": "resume={}",
}


def takes_list(key: str) -> bool:
    """Whether several values of `key` make sense in one run."""
    return key in ("gpus", *keys.SOURCES) or typing.get_origin(keys.base(keys.kind_of(key))) is list


_EXAMPLES = {
    "nodes": "2",
    "gpus": "2",
    "dataset.train": "FILE.jsonl",
    "loss.function": "package.module:function",
    "optim.lr": "1e-5",
    "train.max_steps": "1000",
    "cluster.master_port": "29500",
    "nccl.interface": "eth0",
    "nccl.hca": "[mlx5_0,mlx5_3]",
    "cluster.activate": "/opt/conda/bin/activate NAME",
    "cluster.wrap": "[docker,exec,-i,NAME]",
    "cluster.slurm_args": "[--partition=gpu,--time=08:00:00]",
    "cluster.pdsh_args": "[-f,64]",
    "env.forward": "[HF_*,NCCL_DEBUG]",
    "notify.command": "[/usr/local/bin/tell,--team,vision]",
}


def example(key: str) -> str:
    """`key` with its default, or with a value of its type."""
    if key in _EXAMPLES:
        return grammar.shell(f"{key}={_EXAMPLES[key]}")
    value = keys.default(key) if key in keys.kinds() else None
    if value is not None and value != "???":
        return grammar.shell(f"{key}={grammar.as_typed(value)}")
    if value is None and keys.is_optional(keys.kind_of(key)):
        return f"{key}=null"
    return placeholder(key)


def placeholder(key: str) -> str:
    """`key` with a word for what belongs there."""
    folder = key in ("model.path", "zero.nvme_path", "dataset.image_root", "run.dir", "run.root", "resume")
    return f"{key}={'FOLDER' if folder else 'FILE' if key in keys.PATHS else 'VALUE'}"


# Keys that take exact names, and NCCL's variable, which also takes what is left out and beginnings of names.
_WHOLE_NAMES = {"nccl.interface": "NCCL_SOCKET_IFNAME", "nccl.hca": "NCCL_IB_HCA"}


def spelled(key: str, raw: str, options: Options) -> str:
    """`key=raw` with names of ours where `raw` is a habitual one, safe for a shell."""
    synonyms = habits.VALUES.get(key, {})
    if key in options:
        option = keys.nearest_option(raw, key, options[key], synonyms)
        return file_key(key, raw) or f"{key}={option or 'NAME'}"
    value = synonyms.get(raw.lower(), raw)
    if key == "tune.target_modules":
        value = as_expression(value)
    if key in _WHOLE_NAMES:
        value = re.sub(r"^(\[?)=", r"\1", value)  # NCCL's own mark for whole names, which these keys always mean
    if value not in ("", "VALUE") and (instead := _allowed(key, value)) is not None:
        return instead
    if value and keys.is_text(key) and grammar.top_level_commas(value) and not grammar.parse(value).quoted:
        value = grammar.in_quotes(value)
    if not value:
        value = "true" if keys.kind_of(key) is bool else "VALUE"
    return grammar.shell(f"{key}={value}")


def _allowed(key: str, raw: str) -> str | None:
    """What to type where `key=raw` would be refused; None where it would not."""
    parsed = grammar.parse(raw)
    texts = grammar.parse_texts(raw) if keys.is_texts(key) else None
    text = raw if keys.is_text(key) and not isinstance(parsed.value, str) else parsed.value
    value = text if texts is None else texts
    if checks.type_problem(key, value) is None and checks.rule_problem(key, value) is None:
        return None
    if key in _WHOLE_NAMES:  # NCCL's grammar says more than ours
        return spelled(f"env.set.{_WHOLE_NAMES[key]}", raw.strip("[]"), {})
    fit = checks.repaired(key, value)
    return example(key) if fit is None else grammar.shell(f"{key}={grammar.as_typed(fit)}")


def instead(key: str, value: Any) -> str:
    """What to type where no value near `value` fits `key`."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    if key in _WHOLE_NAMES and re.fullmatch(r"[\^=]*[\w.:-]+(,[\w.:-]+)*", text):  # NCCL's grammar says more than ours
        return spelled(f"env.set.{_WHOLE_NAMES[key]}", text, {})
    return example(key)


def as_expression(names: str) -> str:
    """A list of module names, as peft takes it, as one regular expression over module names."""
    if names in ("all-linear", "all_linear"):
        return "all-linear"
    if not re.fullmatch(r"\[[\w.,\-'\" ]+\]|[\w.\-]+(,[\w.\-]+)+", names):
        return names
    modules = "|".join(re.findall(r"[\w.\-]+", names))
    return rf".*\.({modules})"


def usual(group: str, options: Options) -> str:
    """The option of `group` that is taken when none is named, or the first one."""
    return keys.default_options().get(group) or options[group][0]


# ms-swift's name of a data set, or of rows of a file: HF::owner/name:subset#500
_SWIFT_DATA = re.compile(r"((?P<hub>HF|MS)::)?(?P<name>[^:#\[\]]+)(:(?P<subset>[^:#]+))?(#(?P<rows>[0-9]+))?")
_SOURCES = {"HF": "hf", "MS": "modelscope"}


def swift_data(raw: str) -> str | None:
    """What to type for a data set as ms-swift names it; None for a plain word."""
    found = _SWIFT_DATA.fullmatch(raw)
    if not found or not ("/" in raw or found["rows"]):
        return None
    words = ["dataset=jsonl", f"dataset.train={found['name']}"]
    words += [f"dataset.source={_SOURCES[found['hub']]}"] if found["hub"] else []
    words += [f"dataset.subset={found['subset']}"] if found["subset"] else []
    words += [f"dataset.max_rows={found['rows']}"] if found["rows"] else []
    return " ".join(map(grammar.shell, words))


def file_key(group: str, raw: str) -> str | None:
    """The key that takes the file or folder `raw`, when an option of `group` was expected."""
    template = _FILES.get(group)
    if group == "dataset" and (words := swift_data(raw)):
        return words
    is_file = re.search(r"\.(jsonl?|txt)$", raw) or raw[:1] in ("/", "~", ".") or Path(raw).exists()
    if not (template and raw and is_file):
        return None
    return " ".join(grammar.shell(word.replace("{}", raw)) for word in template.split())


def _filled(template: str, raw: str, options: Options) -> str:
    """A template of habits.py with the typed value in place."""
    words = []
    for word in template.split():
        key, _, value = word.partition("=")
        value = "{}" if value == "[{}]" and raw[:1] == "[" else value  # a list was typed
        words.append(spelled(key, value.replace("{}", raw) if raw or value != "{}" else "", options))
    return " ".join(words)


def _suggestion(name: str, raw: str, options: Options) -> tuple[str, tuple[str, ...]]:
    """A remark and lines to try for a key, flag or group that does not exist."""
    dotted = name.replace("/", ".")
    known = habits.meant(dotted, raw) or habits.meant(dotted.rsplit(".", 1)[-1], raw)
    if not known:
        dotted = keys.spelled(dotted) or dotted
    if dotted in options or keys.kind_of(dotted) is not None:
        return "", (spelled(dotted, raw, options),)
    inside = dotted.split(".")[0] in options and "." in dotted
    if inside and dotted.count(".") == 1 and (option := _option_of(dotted.split(".")[0], raw, options)):
        return "", (option,)
    same_leaf = dotted.rsplit(".", 1)[-1] in {key.rsplit(".", 1)[-1] for key in keys.kinds()}
    if known and not (inside and same_leaf):
        template, remark = known
        return remark, (_filled(template, raw, options),) if template else ()
    nccl = re.fullmatch(r"nccl\.(\w+)", dotted)
    if nccl:
        name = f"NCCL_{nccl.group(1).upper()}"
        raw = raw[1:-1] if re.fullmatch(r"\[[^][]*\]", raw) else raw  # NCCL's own lists have commas only
    if re.fullmatch(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+", name):
        return "variables of the ranks are set with env.set", (spelled(f"env.set.{name}", raw, options),)
    group = keys.nearest(dotted, options, cutoff=0.75) if "." not in dotted else None
    if group:
        return "", (spelled(group, raw, options),)
    meant = keys.meant_keys(dotted)
    habit = keys.nearest(dotted, [name for name in habits.HABITS if "." in name], cutoff=0.85)
    if habit:
        return "", (_filled(habits.HABITS[habit], raw, options),)
    return "", tuple(spelled(key, raw, options) for key in meant)


def _option_of(group: str, raw: str, options: Options) -> str | None:
    """GROUP=OPTION where `raw` is the name of an option, ours or another's."""
    known = raw in options[group] or raw.lower() in habits.VALUES.get(group, {})
    return spelled(group, raw, options) if known else None


def for_unknown_key(key: str, word: str, raw: str, options: Options) -> Problem:
    """KEY=VALUE with a key that does not exist."""
    if re.match(r"hydra[./]", key):
        ours = {"hydra.run.dir": (f"run.dir={raw}",), "hydra.searchpath": ("--config-dir FOLDER",)}
        text = f"{word}: Hydra only composes here; its own settings have no effect"
        return Problem(text, tries=ours.get(key, ("python -m launcher help",)))
    if key.startswith("env.set."):
        return Problem(
            f"{word}: {key.removeprefix('env.set.')} is no name of a variable", tries=("env.set.NAME=VALUE",)
        )
    remark, tries = _suggestion(key, raw, options)
    text = f"{word}: there is no key {key}" + (f"; {remark}" if remark else "")
    return Problem(text, tries=tries or (_no_match(key, options),) if not remark or tries else ())


def for_option_name(key: str, word: str, raw: str, options: Options) -> Problem:
    """GROUP.name=OPTION, which would change the name and nothing else."""
    group = key.partition(".")[0]
    return Problem(f"{word}: an option is chosen with {group}=OPTION", tries=(spelled(group, raw, options),))


def for_flag(flag: str, name: str, word: str, raw: str, options: Options) -> Problem:
    """A word that starts with a dash."""
    if flag in _HYDRA_FLAGS:
        return Problem(f"{word} is not an option here", tries=_HYDRA_FLAGS[flag])
    remark, tries = _suggestion(name, raw, options)
    text = f"{word}: options are written KEY=VALUE" + (f"; {remark}" if remark else "")
    return Problem(text, tries=tries or (() if remark else (_no_match(name, options),)))


def for_unknown_option(group: str, raw: str, options: Options) -> Problem:
    """GROUP=OPTION with an option that does not exist."""
    names = options[group]
    file = file_key(group, raw)
    if file:
        return Problem(f"{group}={raw}: {group} takes the name of an option, not a file", tries=(file,))
    inside = [key for key in keys.kinds() if key.startswith(f"{group}.") and not keys.names_option(key)]
    near = keys.nearest_option(raw, group, names, habits.VALUES.get(group, {}))
    if near is None and raw[:1] == "{" and inside:
        return Problem(f"{group}={raw}: keys of {group} are set one by one", tries=(f"{inside[0]}=VALUE",))
    text = f"{group}={raw}: no such option; {group} has {', '.join(names)}"
    return Problem(text, tries=(f"{group}={near or names[0]}",) if near or names else ())


def for_bare_word(word: str, options: Options) -> Problem:
    """A word without `=`."""
    if not word.strip() or word == "\\":
        text = "an empty word on the command line (an unset shell variable, or a blank after a backslash?)"
        return Problem(text, tries=("the command without it",))
    if word.startswith("~"):
        return _for_removal(word, word[1:].partition("=")[0], options)
    name, colon, raw = word.partition(":")
    if word == "=" or colon:
        tries = _suggestion(name, raw.strip(), options)[1] if colon else ()
        return Problem(f"{word}: a value is set with =, without blanks", tries=tries or ("KEY=VALUE",))
    if word in VERBS:
        return Problem(f"{word}: a verb goes first", tries=(f"python -m launcher {word} ...",))
    return _for_name(word, options)


def _for_name(word: str, options: Options) -> Problem:
    """A word that may be a group, a key, or an option, without the rest."""
    if word in options:
        choices = ", ".join(options[word])
        return Problem(f"{word}: which one? {word} has {choices}", tries=(f"{word}={usual(word, options)}",))
    if keys.kind_of(word) is not None:
        return Problem(f"{word} has no value", tries=(example(word),))
    groups = [group for group, names in options.items() if word in names]
    if groups:
        return Problem(f"{word}: options are written GROUP=OPTION", tries=tuple(f"{group}={word}" for group in groups))
    if re.search(r"\.(jsonl?|csv|tsv|parquet)$", word):
        one, several = grammar.shell(f"dataset.train={word}"), grammar.shell(f"dataset.train=[a.jsonl,{word}]")
        text = f"{word}: a file of rows goes after dataset.train=, several as one list"
        return Problem(text, tries=(f"dataset=jsonl {one}", several))
    if re.search(r"\.(ya?ml|py)$", word):
        ours = (
            "its keys can be typed here one by one" if word[-1] == "l" else "the launcher has its own training program"
        )
        return Problem(f"{word}: a file of another tool is not read; {ours}")
    remark, tries = _suggestion(word, "", options)
    text = f"{word}: neither a verb nor KEY=VALUE" + (f"; {remark}" if remark else "")
    return Problem(text, tries=tries or ("python -m launcher help",))


def _for_removal(word: str, name: str, options: Options) -> Problem:
    """`~NAME`: nothing can be removed, since every group and key is needed."""
    if name == keys.EXPERIMENT:
        tries: tuple[str, ...] = (f"{name}=null",)
    elif name in options:
        tries = (f"{name}={usual(name, options)}",)
    else:
        tries = (example(name),) if keys.kind_of(name) is not None else ()
    has = f"; {name} has {', '.join(options[name])}" if name in options else ""
    return Problem(f"{word}: groups and keys cannot be removed{has}", tries=tries)


def _no_match(name: str, options: Options) -> str:
    group = name.replace("/", ".").split(".")[0]
    return f"{_CONFIG} {group}" if group in options else _CONFIG


def shown(value: Any) -> str:
    """A value as it is shown in a problem."""
    return grammar.as_typed(value) if not isinstance(value, str) else value
