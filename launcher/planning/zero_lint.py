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
    AIO_KEYS,
    BATCH_KEYS,
    BF16_KEYS,
    DATA_TYPES,
    FORMAT_NAMES,
    FORMATS,
    FP16_KEYS,
    FP16_ONLY,
    NVME_ONLY,
    OFFLOAD_KEYS,
    OPTIMIZERS,
    OWNED_KEYS,
    PASSED_KEYS,
    REFUSED_KEYS,
    REMOVED_OPTIMIZERS,
    UNUSED_KEYS,
    ZERO_KEYS,
    ZERO_OTHERS,
    ZERO_SIZES,
)
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

    def problem(self, key: str, text: str, *tries: str) -> None:
        """Note one thing the user must change, and the line of its key."""
        self.problems.append(Problem(text, self.file.where(key), tries or ("remove the key",)))

    def clean(self) -> dict[str, Any]:
        """The file's own sharding and communication keys; problems are noted, those that hide others raised."""
        raw = modernised(self.file.value, self.problem, self._notice)
        self._check_names(raw, (*BATCH_KEYS, *PASSED_KEYS, *OWNED_KEYS, *REFUSED_KEYS, *UNUSED_KEYS), "")
        self._check_unused(raw)
        self._check_numbers_as_text(raw, "")
        self._check_batch(raw)
        self._check_precision(raw)
        self._check_optimizer(raw)
        self._check_formats(raw)
        self._check_names(_object(raw.get("aio")), AIO_KEYS, "aio")
        zero = raw.get("zero_optimization", {})
        if not isinstance(zero, dict):
            text = f"zero_optimization is {json.dumps(zero)}, but must be an object"
            self.problem("zero_optimization", text, '"zero_optimization": {"stage": 2}')
            raise ConfigError(*self.problems)
        self._check_zero(zero)
        cleaned: dict[str, Any] = self._without_auto({key: raw[key] for key in raw if key in PASSED_KEYS}, "")
        for name, known in (("bf16", BF16_KEYS), ("fp16", FP16_KEYS)):
            given = _object(raw.get(name))
            extra = {k: v for k, v in given.items() if k in known and k != "enabled" and v != "auto"}
            if extra and self.settings.precision == name:
                cleaned[name] = extra
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
            self.problem(path, f"unknown key {key}{place}" + (f"; did you mean {near[0]}?" if near else ""), *near)

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
        elif isinstance(value, str) and _NUMBER.fullmatch(value):
            text = f'{path} is the text "{value}", but must be a number'
            self.problem(path, text, f"{path}: {value} without quotes")

    def _check_batch(self, raw: dict[str, Any]) -> None:
        numbers = [raw.get(key) if raw.get(key) != "auto" else None for key in BATCH_KEYS]
        if not any(key in raw for key in BATCH_KEYS):
            return
        world, size = self.settings.world_size, self.settings.config.batch.global_size
        for key, number in zip(BATCH_KEYS, numbers, strict=True):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                self.problem(
                    key, f"{key} is {json.dumps(number)}, but must be a whole number of at least 1", f'"{key}": 1'
                )
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
            if enabled != "auto" and not both and enabled is not (self.settings.precision == name):
                text = f"{name}.enabled is {json.dumps(enabled)}, and this run computes in {self.settings.precision}"
                self.problem(f"{name}.enabled", text, f"precision={name if enabled is True else 'fp32'}")

    def _check_optimizer(self, raw: dict[str, Any]) -> None:
        optim = self.settings.config.optim
        self._compare(raw.get("gradient_clipping", "auto"), optim.max_grad_norm, "gradient_clipping", "max_grad_norm")
        optimizer = _object(raw.get("optimizer"))
        if optimizer.get("type", "AdamW") not in OPTIMIZERS:
            name, known = optimizer["type"], " and ".join(OPTIMIZERS)
            gone = ", which DeepSpeed no longer has" if name in REMOVED_OPTIMIZERS else ""
            text = f"optimizer.type is {name}{gone}; known are {known} (torch's AdamW is used)"
            self.problem("optimizer.type", text, "optim=adamw", "optim=adamw8bit")
        params = _object(optimizer.get("params"))
        if "max_grad_norm" in params:
            text = "optimizer.params.max_grad_norm is refused by DeepSpeed: optim.max_grad_norm decides"
            self.problem("optimizer.params.max_grad_norm", text, _try("max_grad_norm", params["max_grad_norm"]))
        ours = {"lr": self.settings.lr, "betas": optim.betas, "eps": optim.eps, "weight_decay": optim.weight_decay}
        for key, value in params.items():
            if key in ours and not isinstance(value, str):
                self._compare(value, ours[key], f"optimizer.params.{key}", key)
        if optimizer:
            self.notices.append(f"optimizer of {self.file.path} is not used: optim.* decides")
        scheduler = _object(raw.get("scheduler"))
        fixed = [key for key, value in _object(scheduler.get("params")).items() if value != "auto"]
        if fixed:
            text = f"scheduler.params.{fixed[0]} is set, but optim.* decides the schedule"
            self.problem(f"scheduler.params.{fixed[0]}", text, "optim.schedule=linear")

    def _compare(self, theirs: Any, ours: Any, path: str, key: str) -> None:
        if theirs != "auto" and theirs != ours and not isinstance(theirs, str):
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
        self._check_names(zero, ZERO_KEYS, "zero_optimization")
        stage = zero.get("stage", "auto")
        if stage != "auto" and (isinstance(stage, bool) or stage not in (0, 1, 2, 3)):
            text = f"zero_optimization.stage is {json.dumps(stage)}, but must be 0, 1, 2 or 3"
            self.problem("zero_optimization.stage", text, "zero=stage2")
            raise ConfigError(*self.problems)
        for key, value in zero.items():
            if key in ZERO_KEYS and value not in (None, "auto"):
                self._check_kind(key, value)
        for name in ("offload_optimizer", "offload_param"):
            if isinstance(zero.get(name), dict):
                self._check_offload(f"zero_optimization.{name}", zero[name])
            elif zero.get(name) not in (None, "auto"):
                path = f"zero_optimization.{name}"
                text = f"{path} is {json.dumps(zero[name])}, but must be an object"
                self.problem(path, text, f'"{name}": {{"device": "cpu"}}')
                zero[name] = None

    def _check_kind(self, key: str, value: Any) -> None:
        path, text = f"zero_optimization.{key}", ""
        if key in ZERO_SIZES and not isinstance(value, str):  # numbers as text are told already
            whole = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 and value % 1 == 0
            text = "" if whole else "a whole number of at least 0"
        elif key not in (*ZERO_SIZES, *ZERO_OTHERS) and not isinstance(value, bool):
            text = "true or false"
        if text:
            self.problem(
                path,
                f"{path} is {json.dumps(value)}, but must be {text}",
                f'"{key}": {"5e8" if "whole" in text else "true"}',
            )

    def _check_offload(self, path: str, offload: dict[str, Any]) -> None:
        self._check_names(offload, OFFLOAD_KEYS, path)
        device = offload.get("device", "none")
        if device not in ("none", "cpu", "nvme"):
            text = f"{path}.device is {json.dumps(device)}, but must be none, cpu or nvme"
            self.problem(f"{path}.device", text, '"device": "cpu"')
        if device == "nvme" and not offload.get("nvme_path"):
            text = f"{path}.device is nvme, and nvme_path is missing"
            self.problem(f"{path}.device", text, '"nvme_path": "/local/nvme"')
        without = [key for key in offload if key in NVME_ONLY and device == "cpu"]
        if without:
            self._notice(f"{path}: {', '.join(without)} have no effect with device cpu, and are dropped")
            for key in without:
                del offload[key]

    def _without_auto(self, value: Any, path: str) -> Any:
        """`value` without its `auto` entries, so that the launcher's explicit numbers stand in their place."""
        if not isinstance(value, dict):
            return value
        kept = {}
        for key, item in value.items():
            name = f"{path}.{key}" if path else key
            if item == "auto":
                self.notices.append(f"{name}: auto in {self.file.path} is replaced by the launcher's value")
            else:
                kept[key] = self._without_auto(item, name)
        return kept


def batch_error(train: int | None, micro: int | None, accum: int | None, *, world: int) -> str | None:
    """Why the three numbers do not multiply out at `world` ranks, with the nearest ones that do; None if they do.

    Example:
        >>> batch_error(8, 2, 2, world=1)
        'train_batch_size 8 is not 2 x 2 x 1 rank = 4; gradient_accumulation_steps 4 would fit'
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
        return f"train_batch_size {train} is not {product}; {fitting}"
    unit = (micro or accum or 1) * world
    if train % unit:
        named = f"{micro or accum} x {world} = {unit}" if micro or accum else f"{world} ranks"
        return f"train_batch_size {train} is not divisible by {named}; nearest: {_nearest(train, unit)}"
    return None


def _nearest(number: int, unit: int) -> str:
    below, above = number // unit * unit, -(-number // unit) * unit
    return " or ".join(str(n) for n in sorted({below, above}) if n > 0)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _try(key: str, value: Any) -> str:
    text = f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
    return f"optim.{key}={text}"
