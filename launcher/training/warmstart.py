"""model.adapter: a run begins with the LoRA weights of a peft folder; nothing else of that run is taken over."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from launcher.errors import ConfigError, Problem
from launcher.families import Family
from launcher.rundir import read_json
from launcher.spec import TuneConfig
from launcher.training.adapters import SETTINGS, WEIGHTS
from launcher.training.tuning import PEFT_PREFIX

SIZES = ("r", "lora_alpha", "use_rslora", "use_dora")  # that must be the run's
# What peft can do and a run here does not: setting -> values that mean it is off.
_OFF: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "fan_in_fan_out": (None, False),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
}
_FOLDER = "model.adapter=FOLDER as peft's save_pretrained writes it"


def check_settings(folder: Path, tune: TuneConfig) -> None:
    """Hold adapter_config.json to the run; ConfigError with every difference and what to type."""
    try:
        settings: dict[str, Any] = read_json(folder / SETTINGS)
    except (OSError, ValueError) as error:
        raise _unreadable(folder, SETTINGS, error) from None
    where, problems = str(folder / SETTINGS), []
    for key in SIZES:
        theirs, ours = settings.get(key, False), getattr(tune, key)
        if theirs != ours:
            text = f"{key} is {_shown(theirs)} there, and tune.{key}={_shown(ours)}"
            problems.append(Problem(text, where, (f"tune.{key}={_shown(theirs)}",)))
    for key, off in _OFF.items():
        value = settings.get(key, off[0])
        if value not in off:
            tries = ("an adapter of LoRA alone", "model.path=FOLDER of its base with it merged")
            problems.append(Problem(f"{key} is {value}, which a run cannot start from", where, tries))
    if problems:
        raise ConfigError(*problems)


@torch.no_grad()
def load_adapter(model: Any, folder: Path, tune: TuneConfig, family: Family) -> None:
    """Copy a folder's adapter weights into `model`, peft's wrapper with fresh adapters, none of them partitioned yet.

    Names are compared from the layers or the tower on, since what stands before them has changed between versions of
    transformers. A tensor that is missing, left over or of another shape is a ConfigError, with settings that fit.
    """
    live = {_core(name): (name, p) for name, p in model.named_parameters() if ".lora_" in name}
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            saved = {_core(name): (name, file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118  not a dict
    except (OSError, SafetensorError) as error:
        raise _unreadable(folder, WEIGHTS, error) from None
    problems = _misfits(live, saved, str(folder / WEIGHTS), tune, family)
    if problems:
        raise ConfigError(*problems)
    for core, (_, parameter) in live.items():
        parameter.copy_(saved[core][1])
    renamed = [(name, live[core][0]) for core, (name, _) in saved.items() if _bare(name) != _bare(live[core][0])]
    also = f", {len(renamed)} of them under another name: {renamed[0][0]} is {renamed[0][1]}" if renamed else ""
    print(f"adapter: {len(saved)} tensors of {folder}{also}")


def _unreadable(folder: Path, file: str, error: Exception) -> ConfigError:
    return ConfigError(Problem(f"model.adapter={folder}: {file} cannot be read: {error}", "", (_FOLDER,)))


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _bare(name: str) -> str:
    """Without what peft adds: its prefix, the adapter's name, and `.weight`, which a DoRA length lacks in files."""
    return re.sub(r"(\.lora_\w+?)(\.default)?(\.weight)?$", r"\1", name.removeprefix(PEFT_PREFIX))


def _core(name: str) -> str:
    """The name from the layers or the tower on: that of one module in every version.

    Example:
        >>> _core("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight")
        'layers.0.mlp.up_proj.lora_A'
    """
    return re.sub(r"^.*?(?=\b(?:layers|visual)\.)", "", _bare(name))


def _misfits(
    live: dict[str, tuple[str, Any]], saved: dict[str, tuple[str, Tensor]], where: str, tune: TuneConfig, family: Family
) -> list[Problem]:
    problems = []
    more, fewer = sorted(saved.keys() - live.keys()), sorted(live.keys() - saved.keys())
    there, here = ({_part(core, family) for core in names} for names in (saved, live))
    other = ("tune.target_modules=qwen" if tune.target_modules is None else "tune.target_modules=null",)
    if more:
        text = f"{len(more)} adapter tensors there have no place in this run: {saved[more[0]][0]}"
        problems.append(Problem(text, where, tuple(f"tune.{part}=lora" for part in sorted(there - here)) or other))
    if fewer:
        text = f"{len(fewer)} adapter tensors of this run are not there: {live[fewer[0]][0]}"
        problems.append(Problem(text, where, tuple(f"tune.{part}=frozen" for part in sorted(here - there)) or other))
    for core in sorted(live.keys() & saved.keys()):
        theirs, ours = tuple(saved[core][1].shape), tuple(live[core][1].shape)
        if theirs != ours:
            text = f"{saved[core][0]} is {theirs} there and {ours} here"
            return [*problems, Problem(text, where, ("model.path=FOLDER of that adapter's base model",))]
    return problems


def _part(core: str, family: Family) -> str:
    if core.startswith("visual."):
        return family.part_of(f"model.{core}") if family.sees else "vision"
    return "language"
