"""A user's own DeepSpeed JSON: read strictly, every mistake named, what the launcher decides taken out.

DeepSpeed 0.19.8 ignores unknown top-level keys, treats `auto` as off or as a default, and accepts
several combinations without effect; here each of them is a problem with the key in it.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.planning.facts import TextFile
from launcher.planning.zero_keys import (
    BATCH_KEYS,
    BF16_KEYS,
    FP16_KEYS,
    FP16_ONLY,
    OFFLOAD_KEYS,
    OPTIMIZERS,
    OWNED_KEYS,
    PASSED_KEYS,
    REFUSED_KEYS,
    WHY_REFUSED,
    ZERO_KEYS,
)
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


class Linter:
    """Collects problems and notices about one file."""

    def __init__(self, file: TextFile, settings: Settings) -> None:
        self.file = file
        self.settings = settings
        self.problems: list[Problem] = []
        self.notices: list[str] = []

    def problem(self, text: str, *tries: str) -> None:
        """Note one thing the user must change."""
        self.problems.append(Problem(text, self.file.path, tries or ("remove the key",)))

    def clean(self) -> dict[str, Any]:
        """The file's own sharding and communication keys; ConfigError with everything that is wrong."""
        raw = parse_json(self.file)
        self._check_names(raw, (*BATCH_KEYS, *PASSED_KEYS, *OWNED_KEYS, *REFUSED_KEYS), "")
        for key in raw:
            if key in REFUSED_KEYS:
                why = WHY_REFUSED.get(key, "the launcher decides it")
                self.problem(f"{key} has no place here: {why}", REFUSED_KEYS[key])
        self._check_numbers_as_text(raw, "")
        self._check_batch(raw)
        self._check_precision(raw)
        self._check_optimizer(raw)
        zero = raw.get("zero_optimization", {})
        if not isinstance(zero, dict):
            self.problem(f"zero_optimization is {json.dumps(zero)}, but must be an object", '{"stage": 2}')
        else:
            self._check_zero(zero)
        cleaned: dict[str, Any] = _without_auto(
            {key: raw[key] for key in raw if key in PASSED_KEYS}, "", self.notices, self.file.path
        )
        for name, known in (("bf16", BF16_KEYS), ("fp16", FP16_KEYS)):
            given = _object(raw.get(name))
            extra = {k: v for k, v in given.items() if k in known and k != "enabled" and v != "auto"}
            if extra and self.settings.precision == name:
                cleaned[name] = extra
        if self.problems:
            raise ConfigError(*self.problems)
        return cleaned

    def _check_names(self, raw: dict[str, Any], known: tuple[str, ...], inside: str) -> None:
        for key in raw:
            if key in known:
                continue
            place = f" in {inside}" if inside else ""
            if not inside and key in ZERO_KEYS:
                self.problem(f"{key} belongs under zero_optimization", f'"zero_optimization": {{"{key}": ...}}')
                continue
            near = difflib.get_close_matches(key, known, n=1)
            self.problem(f"unknown key {key}{place}" + (f"; did you mean {near[0]}?" if near else ""), *near)

    def _check_numbers_as_text(self, value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                self._check_numbers_as_text(item, f"{path}.{key}" if path else key)
        elif isinstance(value, str) and _NUMBER.fullmatch(value):
            self.problem(f'{path} is the text "{value}", but must be a number', f"{path}: {value} without quotes")

    def _check_batch(self, raw: dict[str, Any]) -> None:
        numbers = [raw.get(key) if raw.get(key) != "auto" else None for key in BATCH_KEYS]
        if not any(key in raw for key in BATCH_KEYS):
            return
        world, size = self.settings.world_size, self.settings.config.batch.global_size
        for key, number in zip(BATCH_KEYS, numbers, strict=True):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                self.problem(f"{key} is {json.dumps(number)}, but must be a whole number of at least 1")
                return
        wrong = batch_error(*numbers, world=world)
        if wrong:
            self.problem(wrong, f"batch.global_size={size}  and remove the batch numbers")
            return
        self.notices.append(f"batch numbers of {self.file.path} are not used: batch.global_size={size} decides")

    def _check_precision(self, raw: dict[str, Any]) -> None:
        bf16, fp16 = _object(raw.get("bf16")), _object(raw.get("fp16"))
        both = bf16.get("enabled") is True and fp16.get("enabled") is True
        if both:
            self.problem("fp16 and bf16 are enabled, and a run has one precision", "precision=bf16", "precision=fp16")
        self._check_names(fp16, FP16_KEYS, "fp16")
        for key in bf16:
            if key in FP16_ONLY:
                self.problem(f"bf16.{key} is a key of fp16: bf16 needs no loss scale")
        self._check_names({k: v for k, v in bf16.items() if k not in FP16_ONLY}, BF16_KEYS, "bf16")
        for name, section in (("bf16", bf16), ("fp16", fp16)):
            enabled = section.get("enabled", "auto")
            if enabled != "auto" and not both and enabled is not (self.settings.precision == name):
                text = f"{name}.enabled is {json.dumps(enabled)}, and this run computes in {self.settings.precision}"
                self.problem(text, f"precision={name if enabled is True else 'fp32'}")

    def _check_optimizer(self, raw: dict[str, Any]) -> None:
        optim = self.settings.config.optim
        self._compare(raw.get("gradient_clipping", "auto"), optim.max_grad_norm, "gradient_clipping", "max_grad_norm")
        optimizer = _object(raw.get("optimizer"))
        if optimizer.get("type", "AdamW") not in OPTIMIZERS:
            known = " and ".join(OPTIMIZERS)
            self.problem(f"optimizer.type is {optimizer['type']}; known are {known} (torch's AdamW is used)")
        params = _object(optimizer.get("params"))
        ours = {"lr": self.settings.lr, "betas": optim.betas, "eps": optim.eps, "weight_decay": optim.weight_decay}
        for key, value in params.items():
            if key in ours and not isinstance(value, str):
                self._compare(value, ours[key], f"optimizer.params.{key}", key)
        if optimizer:
            self.notices.append(f"optimizer of {self.file.path} is not used: optim.* decides")
        scheduler = _object(raw.get("scheduler"))
        fixed = [key for key, value in _object(scheduler.get("params")).items() if value != "auto"]
        if fixed:
            self.problem(
                f"scheduler.params.{fixed[0]} is set, but optim.* decides the schedule", "optim.schedule=linear"
            )

    def _compare(self, theirs: Any, ours: Any, path: str, key: str) -> None:
        if theirs != "auto" and theirs != ours and not isinstance(theirs, str):
            self.problem(f"{path} is {json.dumps(theirs)}, and optim.{key} is {json.dumps(ours)}", _try(key, theirs))

    def _check_zero(self, zero: dict[str, Any]) -> None:
        self._check_names(zero, ZERO_KEYS, "zero_optimization")
        stage = zero.get("stage", "auto")
        if stage != "auto" and (isinstance(stage, bool) or stage not in (0, 1, 2, 3)):
            self.problem(f"zero_optimization.stage is {json.dumps(stage)}, but must be 0, 1, 2 or 3", "zero=stage2")
            return
        for name, lowest, better in (("offload_optimizer", 1, "zero=stage2"), ("offload_param", 3, "zero=stage3")):
            offload = zero.get(name)
            if isinstance(offload, dict):
                self._check_offload(f"zero_optimization.{name}", offload)
                if stage != "auto" and stage < lowest and offload.get("device", "none") != "none":
                    self.problem(f"zero_optimization.{name} needs stage {lowest}, and the stage is {stage}", better)
        if zero.get("overlap_comm") is True and stage in (0, 1):
            self.problem(f"overlap_comm fails in stage {stage} when the loop sets the accumulation boundary")

    def _check_offload(self, path: str, offload: dict[str, Any]) -> None:
        self._check_names(offload, OFFLOAD_KEYS, path)
        device = offload.get("device", "none")
        if device not in ("none", "cpu", "nvme"):
            self.problem(f"{path}.device is {json.dumps(device)}, but must be none, cpu or nvme", '"device": "cpu"')
        if device == "nvme" and not offload.get("nvme_path"):
            self.problem(f"{path}.device is nvme, and nvme_path is missing", '"nvme_path": "/local/nvme"')


def parse_json(file: TextFile) -> dict[str, Any]:
    """The object in `file`; duplicate keys, comments and NaN are a ConfigError with the line."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in items:
            if key in seen:
                line = file.text[: file.text.rfind(f'"{key}"')].count("\n") + 1
                raise ConfigError(Problem(f"key {key} stands twice", f"{file.path}:{line}", ("remove one of them",)))
            seen[key] = value
        return seen

    def constant(name: str) -> Any:
        raise ConfigError(Problem(f"{name} is no JSON number", file.path, ("a finite number",)))

    try:
        value = json.loads(file.text.removeprefix("\ufeff"), object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as error:
        hint = "JSON has no comments and no comma before a closing bracket"
        raise ConfigError(Problem(f"not JSON: {error.msg}", f"{file.path}:{error.lineno}", (hint,))) from None
    if not isinstance(value, dict):
        raise ConfigError(Problem("a DeepSpeed configuration is one JSON object", file.path, ("{ ... }",)))
    return value


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


def _without_auto(value: Any, path: str, notices: list[str], where: str) -> Any:
    """`value` without its `auto` entries, so that the launcher's explicit numbers stand in their place."""
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, item in value.items():
        name = f"{path}.{key}" if path else key
        if item == "auto":
            notices.append(f"{name}: auto in {where} is replaced by the launcher's value")
        else:
            kept[key] = _without_auto(item, name, notices, where)
    return kept


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _try(key: str, value: Any) -> str:
    text = f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
    return f"optim.{key}={text}"
