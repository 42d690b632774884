"""A user's own DeepSpeed JSON: read as DeepSpeed reads it, every mistake named, what the launcher decides taken out.

DeepSpeed 0.19.8 ignores unknown top-level keys, treats `auto` as off or as a default, and accepts
several combinations without effect; here each of them is a problem or a notice with the key in it. What asks for
something and would not get it is a problem; tuning without effect is dropped with a notice. What does not go together
is a table of its own, `incompatible`, that looks at the finished configuration.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.planning.facts import TextFile
from launcher.planning.hjson_file import read_hjson
from launcher.planning.zero_keys import (
    BATCH_KEYS,
    BF16_KEYS,
    DATA_TYPES,
    FORMAT_NAMES,
    FORMATS,
    FP16_KEYS,
    FP16_ONLY,
    NVME_ONLY,
    OPTIMIZER_CHOICES,
    OPTIMIZER_PARAMS,
    OPTIMIZERS,
    OWNED_KEYS,
    PASSED_KEYS,
    REFUSED_KEYS,
    REMOVED_OPTIMIZERS,
    SCHEDULES,
    UNUSED_KEYS,
    ZERO_KEYS,
)
from launcher.planning.zero_kinds import COUNT, KINDS, NAMED, PATH, SCALE, SECTION, SWITCH, TEXT, ZERO, Kind
from launcher.planning.zero_old import asks_nothing, modernised
from launcher.spec import RunConfig

_NUMBER = re.compile(r"[-+]?[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the launcher decided, to compare a user's JSON with."""

    world_size: int
    precision: str
    lr: float
    config: RunConfig
    slots: tuple[int, ...] = ()  # ranks of each host
    device: str = "cuda"  # cuda | cpu


class Linter:
    """Collects problems and notices about one file."""

    def __init__(self, file: TextFile, settings: Settings) -> None:
        self.file = read_hjson(file)
        self.settings = settings
        self.problems: list[Problem] = []
        self.notices: list[str] = []
        self.autos: list[str] = []

    def problem(self, key: str, text: str, *tries: str) -> None:
        """Note one thing the user must change, and the line of its key."""
        self.problems.append(Problem(text, self.file.where(key), tries or ("remove the key",)))

    def clean(self) -> dict[str, Any]:
        """The file's own sharding and communication keys; problems are noted, those that hide others raised."""
        raw = modernised(self.file.value, self.problem, self._notice)
        self._check_names(raw, (*BATCH_KEYS, *PASSED_KEYS, *OWNED_KEYS, *REFUSED_KEYS, *UNUSED_KEYS), "")
        self._check_unused(raw)
        self._check_numbers_as_text(raw, "")
        self._check_sections(raw)
        self._check_batch(raw)
        self._check_precision(raw)
        self._check_optimizer(raw)
        self._check_formats(raw)
        self._check_kinds(raw, "")
        for name in sorted({*PASSED_KEYS, "bf16", "fp16"} & {*KINDS} - {ZERO}):
            self._check_kinds(_object(raw.get(name)), name)
        for name in set(PASSED_KEYS) & {*KINDS} - {ZERO}:
            self._check_names(_object(raw.get(name)), tuple(KINDS[name]), name)
        zero = raw.get(ZERO, {})
        if not isinstance(zero, dict):
            text = f"zero_optimization is {json.dumps(zero)}, but must be an object"
            self.problem("zero_optimization", text, '"zero_optimization": {"stage": 2}')
            raise ConfigError(*self.problems)
        self._check_zero(zero)
        cleaned: dict[str, Any] = self._without_auto({key: raw[key] for key in raw if key in PASSED_KEYS}, "")
        for name, known in (("bf16", BF16_KEYS), ("fp16", FP16_KEYS)):
            given = self._without_auto({k: v for k, v in _object(raw.get(name)).items() if k in known}, name)
            extra = {k: v for k, v in given.items() if k != "enabled"}
            if extra and self.settings.precision == name:
                cleaned[name] = extra
        if self.autos:
            self._notice(f"auto is replaced by the launcher's value: {', '.join(self.autos)}")
        return cleaned

    def _notice(self, text: str) -> None:
        self.notices.append(f"{self.file.path}: {text}")

    def _check_names(self, raw: dict[str, Any], known: tuple[str, ...], inside: str) -> None:
        for key in raw:
            if key in known:
                continue
            path = f"{inside}.{key}" if inside else key
            if not inside and key in ZERO_KEYS:
                text = f"{key} belongs under zero_optimization"
                self.problem(path, text, f'"zero_optimization": {{"{key}": ...}}')
                continue
            if inside and key in (*PASSED_KEYS, *OWNED_KEYS, *BATCH_KEYS):
                self.problem(path, f"{key} in {inside} belongs at the top", f'"{key}": ... outside of {inside}')
                continue
            place = f" in {inside}" if inside else ""
            near = difflib.get_close_matches(key, known, n=1)
            shown = key if re.fullmatch(r"\S+", key) else json.dumps(key)
            self.problem(path, f"unknown key {shown}{place}" + (f"; did you mean {near[0]}?" if near else ""), *near)

    def _check_unused(self, raw: dict[str, Any]) -> None:
        for key, value in raw.items():
            if key in REFUSED_KEYS:
                why, instead = REFUSED_KEYS[key]
                if asks_nothing(value):
                    self._notice(f"{key} asks for nothing, and is dropped")
                else:
                    self.problem(key, f"{key} has no place here: {why}", instead)
            elif key in UNUSED_KEYS:
                self._notice(f"{key} is not used: {UNUSED_KEYS[key]}")

    def _check_numbers_as_text(self, value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                self._check_numbers_as_text(item, f"{path}.{key}" if path else key)
        elif path not in NAMED and _is_number_as_text(value):
            text = f'{path} is the text "{value}", but must be a number'
            self.problem(path, text, f"{path}: {value} without quotes")

    def _check_sections(self, raw: dict[str, Any]) -> None:
        """Take out sections that are none, and tell all but null and auto."""
        for name in (*(set(PASSED_KEYS) & {*KINDS} - {ZERO}), "bf16", "fp16", "data_types", "optimizer", "scheduler"):
            value = raw.get(name, {})
            if isinstance(value, dict):
                continue
            if value == "auto":
                self.autos.append(name)
            elif value is not None:
                self._wrong_kind(name, value, SECTION)
            del raw[name]

    def _check_kinds(self, section: dict[str, Any], path: str) -> None:
        """Tell values of the wrong kind and take them out: nothing may stumble over them."""
        for key, kind in KINDS[path].items():
            value = section.get(key)
            if value in (None, "auto") or kind.fits(value):
                continue
            if kind in (TEXT, PATH) or not _is_number_as_text(value):  # that is told already
                self._wrong_kind(f"{path}.{key}" if path else key, value, kind)
            del section[key]

    def _wrong_kind(self, path: str, value: Any, kind: Kind) -> None:
        text = f"{path} is {json.dumps(value)}, but must be {kind.text}"
        lower = str(value).lower()
        meant = "false" if kind is SWITCH and lower in ("false", "no", "off", "0") else kind.example
        if kind.fits(lower):
            meant = json.dumps(lower)
        self.problem(path, text, f'"{path.rpartition(".")[2]}": {meant}')

    def _check_batch(self, raw: dict[str, Any]) -> None:
        numbers = [raw.get(key) if raw.get(key) != "auto" else None for key in BATCH_KEYS]
        if not any(key in raw for key in BATCH_KEYS):
            return
        world, size = self.settings.world_size, self.settings.config.batch.global_size
        for key, number in zip(BATCH_KEYS, numbers, strict=True):
            if number is not None and not COUNT.fits(number):
                if not _is_number_as_text(number):
                    self._wrong_kind(key, number, COUNT)
                return
        wrong = batch_error(*numbers, world=world)
        if wrong:
            first = next(key for key in BATCH_KEYS if key in raw)
            self.problem(first, wrong, f"batch.global_size={size}  and remove the batch numbers")
            return
        self.notices.append(f"batch numbers of {self.file.path} are not used: batch.global_size={size} decides")

    def _check_precision(self, raw: dict[str, Any]) -> None:
        bf16, fp16 = _object(raw.get("bf16")), _object(raw.get("fp16"))
        both = bf16.get("enabled") is True and fp16.get("enabled") is True
        if both:
            text = "fp16 and bf16 are enabled, and a run has one precision"
            self.problem("bf16", text, "precision=bf16", "precision=fp16")
        self._check_names(fp16, FP16_KEYS, "fp16")
        for key in bf16:
            if key in FP16_ONLY:
                self.problem(f"bf16.{key}", f"bf16.{key} is a key of fp16: bf16 needs no loss scale")
        self._check_names({k: v for k, v in bf16.items() if k not in FP16_ONLY}, BF16_KEYS, "bf16")
        for name, section in (("bf16", bf16), ("fp16", fp16)):
            enabled = section.get("enabled", "auto")
            if isinstance(enabled, bool) and not both and enabled is not (self.settings.precision == name):
                text = f"{name}.enabled is {json.dumps(enabled)}, and this run computes in {self.settings.precision}"
                self.problem(f"{name}.enabled", text, f"precision={name if enabled else 'fp32'}")

    def _check_optimizer(self, raw: dict[str, Any]) -> None:
        optim = self.settings.config.optim
        clip = raw.get("gradient_clipping")
        if clip == "auto":
            self.autos.append("gradient_clipping")
        elif clip == 0 and clip is not False:
            text = f"gradient_clipping is 0, and optim.max_grad_norm is {optim.max_grad_norm}: gradients are clipped"
            self.problem("gradient_clipping", text, "optim.max_grad_norm=1e9   (in effect none)", "remove the key")
        elif clip is not None:
            self._compare(clip, optim.max_grad_norm, "gradient_clipping", "max_grad_norm")
        optimizer = _object(raw.get("optimizer"))
        self._check_names(optimizer, ("type", "params", "legacy_fusion"), "optimizer")
        name = optimizer.get("type", "AdamW")
        if not isinstance(name, str) or name.lower() not in map(str.lower, OPTIMIZERS):
            gone = ", which DeepSpeed no longer has" if name in REMOVED_OPTIMIZERS else ""
            shown = name if isinstance(name, str) else json.dumps(name)
            text = f"optimizer.type is {shown}{gone}; known are {' and '.join(OPTIMIZERS)} (torch's AdamW is used)"
            self.problem("optimizer.type", text, "optim=adamw", "optim=adamw8bit")
        params = _object(optimizer.get("params"))
        self._check_names(params, OPTIMIZER_PARAMS, "optimizer.params")
        if "max_grad_norm" in params:
            text = "optimizer.params.max_grad_norm is refused by DeepSpeed: optim.max_grad_norm decides"
            self.problem("optimizer.params.max_grad_norm", text, _try("max_grad_norm", params["max_grad_norm"]))
        ours = {"lr": self.settings.lr, "betas": optim.betas, "eps": optim.eps, "weight_decay": optim.weight_decay}
        for key, value in params.items():
            path = f"optimizer.params.{key}"
            if key in ours and value is not None:
                self._compare(value, ours[key], path, key)
            elif key in OPTIMIZER_CHOICES and value not in (None, "auto", OPTIMIZER_CHOICES[key]):
                ours_is = json.dumps(OPTIMIZER_CHOICES[key])
                text = f"{path} is {json.dumps(value)}, and torch's AdamW runs with {ours_is}"
                self.problem(path, text)
        if optimizer:
            self.notices.append(f"optimizer of {self.file.path} is not used: optim.* decides")
        self._check_schedule(_object(raw.get("scheduler")))

    def _check_schedule(self, scheduler: dict[str, Any]) -> None:
        self._check_names(scheduler, ("type", "params"), "scheduler")
        name = scheduler.get("type", "WarmupLR")
        ours = SCHEDULES.get(name) if isinstance(name, str) else None
        if ours is None:
            text = f"scheduler.type is {json.dumps(name)}; known are {', '.join(SCHEDULES)}"
            self.problem("scheduler.type", text, "optim.schedule=cosine", "optim.schedule=linear")
        nothing = {"last_batch_iteration": -1, "warmup_min_lr": 0, "warmup_max_lr": self.settings.lr}
        params = _object(scheduler.get("params"))
        fixed = [key for key, value in params.items() if value not in (None, "auto", nothing.get(key))]
        if fixed:
            text = f"scheduler.params.{fixed[0]} is set, but optim.* decides the schedule"
            steps = params.get("warmup_num_steps")
            warm = f" optim.warmup_steps={steps}" if COUNT.fits(steps) else ""
            tries = (f"optim.schedule={ours or 'linear'}{warm}   and remove the scheduler",)
            self.problem(f"scheduler.params.{fixed[0]}", text, *tries)
        elif scheduler and ours:
            self.notices.append(f"scheduler of {self.file.path} is not used: optim.schedule and its keys decide")

    def _compare(self, theirs: Any, ours: Any, path: str, key: str) -> None:
        if theirs in ("auto", ours) and not isinstance(theirs, bool):
            return
        if not isinstance(ours, list) and not SCALE.fits(theirs):
            if not _is_number_as_text(theirs):
                self._wrong_kind(path, theirs, SCALE)
        elif not _is_number_as_text(theirs):
            text = f"{path} is {json.dumps(theirs)}, and optim.{key} is {json.dumps(ours)}"
            self.problem(path, text, _try(key, theirs))

    def _check_formats(self, raw: dict[str, Any]) -> None:
        types = _object(raw.get("data_types"))
        self._check_names(types, DATA_TYPES, "data_types")
        asked = {f"data_types.{key}": types.get(key) for key in DATA_TYPES[:3]}
        asked["communication_data_type"] = raw.get("communication_data_type")
        for path, value in asked.items():
            if value is not None and value != "auto" and value not in FORMATS:
                known = FORMAT_NAMES.get(value) if isinstance(value, str) else None
                tries = (known,) if known else FORMATS
                text = f"{path} is {json.dumps(value)}, but must be fp32, bf16 or fp16"
                self.problem(path, text, *(f'"{path.rpartition(".")[2]}": "{name}"' for name in tries))
        weights = types.get("param_dtype")
        if weights in FORMATS and weights != self.settings.precision:
            text = f"data_types.param_dtype is {weights}, and this run computes in {self.settings.precision}"
            self.problem("data_types.param_dtype", text, f"precision={weights}")

    def _check_zero(self, zero: dict[str, Any]) -> None:
        self._check_names(zero, ZERO_KEYS, ZERO)
        stage = zero.get("stage", "auto")
        if stage != "auto" and not KINDS[ZERO]["stage"].fits(stage):
            text = f"zero_optimization.stage is {json.dumps(stage)}, but must be 0, 1, 2 or 3"
            if not _is_number_as_text(stage):
                self.problem("zero_optimization.stage", text, "zero=stage2")
            raise ConfigError(*self.problems)
        self._check_kinds(zero, ZERO)
        for name in ("offload_optimizer", "offload_param", "leaf_module"):
            if isinstance(zero.get(name), dict):
                path = f"{ZERO}.{name}"
                self._check_names(zero[name], tuple(KINDS[path]), path)
                if name != "leaf_module":
                    self._check_offload(path, zero[name])
                self._check_kinds(zero[name], path)

    def _check_offload(self, path: str, offload: dict[str, Any]) -> None:
        device = offload.get("device", "none")
        if device == "auto":
            self._wrong_kind(f"{path}.device", device, KINDS[path]["device"])
        if device == "nvme" and not offload.get("nvme_path"):
            text = f"{path}.device is nvme, and nvme_path is missing"
            self.problem(f"{path}.device", text, '"nvme_path": "/local/nvme"')
        without = [key for key in NVME_ONLY if device == "cpu" and key in offload]
        told = [key for key in without if offload[key] is not None]
        for key in without:
            del offload[key]
        if told:
            one = len(told) == 1
            said = f"{'has' if one else 'have'} no effect with device cpu, and {'is' if one else 'are'} dropped"
            self._notice(f"{path}: {', '.join(told)} {said}")

    def _without_auto(self, value: Any, path: str) -> Any:
        """`value` without its `auto` and null entries, so that the launcher's explicit numbers stand in their place."""
        if not isinstance(value, dict):
            return value
        kept = {}
        for key, item in value.items():
            name = f"{path}.{key}" if path else key
            if item == "auto" and key != "nvme_path":  # zero.nvme_path decides that one
                self.autos.append(name)
            elif item is not None:
                kept[key] = self._without_auto(item, name)
        return kept


def batch_error(train: int | None, micro: int | None, accum: int | None, *, world: int) -> str | None:
    """Why the three numbers do not multiply out at `world` ranks, with the nearest ones that do; None if they do.

    Example:
        >>> batch_error(8, 2, 2, world=1)
        'train_batch_size 8 is not 2 x 2 x 1 rank = 4; gradient_accumulation_steps 4 would fit, and so would 2 ranks'
    """
    if train is None:
        return None  # any micro-batch and accumulation multiply to something
    if micro is not None and accum is not None:
        unit = micro * accum * world
        if train == unit:
            return None
        product = f"{micro} x {accum} x {world} rank{'s' if world != 1 else ''} = {unit}"
        steps, rest = divmod(train, micro * world)
        fitting = (
            f"nearest: {_nearest(train, micro * world)}" if rest else f"gradient_accumulation_steps {steps} would fit"
        )
        if world == 1 and train % (micro * accum) == 0:
            fitting += f", and so would {train // (micro * accum)} ranks"
        return f"train_batch_size {train} is not {product}; {fitting}"
    unit = (micro or accum or 1) * world
    if train % unit:
        named = f"{micro or accum} x {world} = {unit}" if micro or accum else f"{world} ranks"
        return f"train_batch_size {train} is not divisible by {named}; nearest: {_nearest(train, unit)}"
    return None


def _nearest(number: int, unit: int) -> str:
    below, above = number // unit * unit, -(-number // unit) * unit
    return " or ".join(str(n) for n in sorted({below, above}) if n > 0)


def _is_number_as_text(value: Any) -> bool:
    return isinstance(value, str) and _NUMBER.fullmatch(value) is not None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _try(key: str, value: Any) -> str:
    text = f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
    return f"optim.{key}={text}"
