"""One walk over the schema: every value of the composed configuration is checked, every problem collected."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from launcher.datafiles import SUFFIXES, is_hub_name
from launcher.errors import Problem
from launcher.families import FAMILIES
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
        if source is not None and "${" in source.text:  # what was written is not the value
            source = dataclasses.replace(source, plain=False)
        if key.startswith("env.set.") and type(value) in (int, float):
            value = source.text if source and source.plain else str(value)
        if source is not None and source.plain and not isinstance(value, str | None):
            value = self._as_written(key, value, source)
        if not typed and keys.is_texts(key) and isinstance(value, list):
            value = [self._item(f"{key}.{number}", item) for number, item in enumerate(value)]
        problem = checks.type_problem(key, value) or checks.rule_problem(key, value)
        if value == "None" and source is not None and source.plain:
            problem, fit = "did you mean null?", None
        else:
            fit = checks.repaired(key, value) if problem else None
        if problem:
            tries = answers.instead(key, value) if fit is None else grammar.shell(f"{key}={grammar.as_typed(fit)}")
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

    def _item(self, place: str, item: Any) -> Any:
        """One of a list of texts: its text in the file where YAML reads it otherwise."""
        source = self.sources.get(place)
        if source is None or isinstance(item, str | None):
            return item
        if "${" in source.text:
            return str(item) if type(item) in (int, float) else item
        return source.text if source.plain else item

    def _resolved(self, key: str, plain: Any) -> Any:
        """The value with its ${...} replaced; a variable's text is read as if it were typed, a number as text."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        if not any("${" in text for text in _texts(plain)):
            return plain
        try:
            value = OmegaConf.select(self.composed, key)
            if OmegaConf.is_config(value):
                return OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as error:
            text = next(text for text in _texts(plain) if "${" in text)
            self._refuse(key, f"{key}={text}: {_why_unresolved(error)}", _tries_for_interpolation(key, text))
            return plain
        if keys.is_text(key):
            return str(value) if type(value) in (int, float) else value
        if not isinstance(value, str):
            return value
        read = grammar.parse_texts(value) if keys.is_texts(key) else grammar.parse(value).value
        return value if read is None else read

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


def _sources(data: dict[str, Any]) -> list[str]:
    """What the data set's keys name, one entry a source."""
    values = (data["dataset"]["train"], data["dataset"]["eval"])
    named = [name for value in values for name in (value if isinstance(value, list) else [value])]
    return [name for name in named if isinstance(name, str) and name != MISSING]


def _beside_held_out_rows(data: dict[str, Any]) -> tuple[str, str] | None:
    for key in ("eval", "eval_split"):
        if data["dataset"][key] is not None:
            return f"dataset.{key}={answers.shown(data['dataset'][key])}", f"dataset.{key}=null"
    return _on_digits(data)


def _of_one_source(data: dict[str, Any]) -> tuple[str, str] | None:
    train = data["dataset"]["train"]
    one = not isinstance(train, list) or len(train) < 2
    return ("one source of training rows", "'dataset.train=[FILE,FILE]'") if one else None


def _without_hub_names(data: dict[str, Any]) -> tuple[str, str] | None:
    named = any(is_hub_name(name) for name in _sources(data))
    return None if named else ("data that is on this machine", "dataset.train=OWNER/NAME")


def _of_files_alone(data: dict[str, Any]) -> tuple[str, str] | None:
    """For a key that chooses among the files of a folder or a hub's data set."""
    files = all(name.lower().endswith(SUFFIXES) for name in _sources(data))
    return ("single files", "dataset.train=FOLDER") if files else None


def _unless_it_sees(data: dict[str, Any]) -> tuple[str, str] | None:
    model = data["model"]
    family = FAMILIES.get(model["family"])
    blind = family is not None and not family.sees
    return (f"model={model['name']}, which reads text only", "model=qwen3_vl_reranker_8b") if blind else None


def _by_folder(data: dict[str, Any]) -> tuple[str, str] | None:
    path = data["model"]["path"]
    return (f"model.path={path}, whose config.json decides", "model.path=null") if path else None


def _without_lora(data: dict[str, Any]) -> tuple[str, str] | None:
    parts = [data["tune"][part] for part in ("language", "vision", "projector")]
    return (f"tune={data['tune']['name']}: no part is lora", "tune=lora") if "lora" not in parts else None


def _unless_named(group: str, *names: str) -> Callable[[dict[str, Any]], tuple[str, str] | None]:
    """For a key that only these options of a group read."""

    def rule(data: dict[str, Any]) -> tuple[str, str] | None:
        name = data[group]["name"]
        return None if name in names else (f"{group}={name}", f"{group}={names[0]}")

    return rule


def _of_frozen(part: str) -> Callable[[dict[str, Any]], tuple[str, str] | None]:
    """For a key about the training of one part."""

    def rule(data: dict[str, Any]) -> tuple[str, str] | None:
        classes = part == "head" and data["task"]["name"] == "classify"  # whose head always trains
        if data["tune"][part] != "frozen" or classes:
            return None
        return f"tune.{part}=frozen", f"tune.{part}=full"

    return rule


def _without_temperature(data: dict[str, Any]) -> tuple[str, str] | None:
    name, form = data["loss"]["name"], data["loss"]["form"]
    if name == "distill":
        return None if form == "kl" else (f"loss=distill loss.form={form}", "loss.form=kl")
    return None if name == "listwise" else (f"loss={name}", "loss=listwise")


def _without_margin(data: dict[str, Any]) -> tuple[str, str] | None:
    name, form = data["loss"]["name"], data["loss"]["form"]
    if name == "pairwise":
        return None if form == "margin" else (f"loss=pairwise loss.form={form}", "loss.form=margin")
    return f"loss={name}", "loss=pairwise loss.form=margin"


def _on_digits_or_chats(data: dict[str, Any]) -> tuple[str, str] | None:
    """For segments of videos, which only documents of a query are cut into."""
    return _on_digits(data) or _unless_named("task", "rerank")(data)


def _without_segments(data: dict[str, Any]) -> tuple[str, str] | None:
    """For what is done with the scores of a video's segments."""
    whole = data["dataset"]["video"]["segment_s"] is None
    return ("dataset.video.segment_s=null", "dataset.video.segment_s=60") if whole else None


def _without_top_k(data: dict[str, Any]) -> tuple[str, str] | None:
    fuse = data["dataset"]["video"]["fuse"]
    other = None if fuse == "top_k" else (f"dataset.video.fuse={fuse}", "dataset.video.fuse=top_k")
    return _without_segments(data) or other


def _with_auto_zero(data: dict[str, Any]) -> tuple[str, str] | None:
    """For the file of ds_configs/, which zero=auto chooses."""
    return ("zero=auto", "zero=stage2") if data["zero"]["name"] == "auto" else None


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


VIDEO = ("fps", "min_frames", "max_frames", "max_pixels", "total_pixels")
SAMPLING = ("max_positives", "max_negatives", "random_negatives")  # of dataset: which documents of a query are used

# Key -> what makes a typed value useless, and what to type beside it; None where it has an effect.
_INEFFECTIVE: dict[str, Callable[[dict[str, Any]], tuple[str, str] | None]] = {
    "model.arch": _by_folder,
    "model.min_pixels": _unless_it_sees,
    "model.max_pixels": _unless_it_sees,
    "memory.vision_cache_gib": _unless_it_sees,
    "tune.vision": _unless_it_sees,
    "tune.projector": _unless_it_sees,
    "dataset.train": _on_digits,
    "dataset.eval": _on_digits,
    "dataset.eval_fraction": _beside_held_out_rows,
    "dataset.weights": _of_one_source,
    "dataset.source": _without_hub_names,
    "dataset.subset": _of_files_alone,
    "dataset.split": _of_files_alone,
    "dataset.eval_split": _of_files_alone,
    "loss.temperature": _without_temperature,
    "loss.positive_weight": _unless_named("loss", "pointwise"),
    "loss.form": _unless_named("loss", "pairwise", "distill"),
    "loss.margin": _without_margin,
    "loss.function": _unless_named("loss", "custom"),
    "loss.unit": _unless_named("loss", "custom"),
    **{f"dataset.{name}": _unless_named("task", "rerank") for name in SAMPLING},
    **{f"dataset.video.{name}": _on_digits for name in VIDEO},
    "dataset.video.segment_s": _on_digits_or_chats,
    "dataset.video.fuse": _without_segments,
    "dataset.video.top_k": _without_top_k,
    "task.instruction": _unless_named("task", "rerank"),
    "task.system": _unless_named("task", "sft", "classify"),
    "task.classes": _unless_named("task", "classify"),
    "tune.double_quant": _unless_named("tune", "qlora"),
    "tune.head": _unless_named("task", "rerank", "sft"),
    "model.adapter": _without_lora,
    **{f"optim.lr_{part}": _of_frozen(part) for part in ("language", "vision", "projector", "head")},
    "zero.file": _with_auto_zero,
    "precision.force": _unless_named("precision", "fp16"),
    "nccl.hca": _unless_named("nccl", "auto", "ib", "roce", "nvlink", "pcie", "debug"),
    "nccl.gid_index": _unless_named("nccl", "auto", "roce", "nvlink", "pcie", "debug"),
    "nccl.traffic_class": _unless_named("nccl", "auto", "roce", "nvlink", "pcie", "debug"),
    "nccl.service_level": _unless_named("nccl", "auto", "ib", "nvlink", "pcie", "debug"),
    "nccl.cross_nic": _unless_named("nccl", "auto", "ib", "roce", "nvlink", "pcie", "debug"),
    "cluster.slurm_args": _only_over("slurm"),
    "cluster.pdsh_args": _only_over("pdsh"),
    "cluster.connect_s": _not_over("local", "env"),
    "cluster.lost_contact_s": _not_over("local"),
    "cluster.sync": _not_over("local"),
    "profile.first_step": _unless_profiled("torch", "nsys", "deepspeed", "comms"),
    "profile.steps": _unless_profiled("torch", "nsys", "comms"),
    "profile.ranks": _unless_profiled("torch", "nsys"),
    **{
        f"tune.{name}": _without_lora
        for name in ("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora")
    },
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
