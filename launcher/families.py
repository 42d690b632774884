"""Which modules a model family has, and which of them a tuning choice trains. Shared by both planes.

Standard library only. The plan counts what these tables say; training asks the same tables, so that
what is shown is what trains.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from launcher.spec import TuneConfig

PARTS = ("language", "embeddings", "head", "vision", "projector")
LORA_PARTS = ("language", "vision", "projector")


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Module names of one model family, as they are in the live model (not always in its files)."""

    model_type: str  # of config.json
    prefixes: tuple[tuple[str, str], ...]  # (part, start of the name); the first match decides
    lora: dict[str, str]  # part -> regular expression over whole module names, for peft's target_modules

    def part_of(self, name: str) -> str:
        """The part that a module or parameter belongs to; a name of no part is a KeyError.

        Example:
            >>> FAMILIES["qwen3_vl"].part_of("model.visual.merger.linear_fc1.weight")
            'projector'
        """
        for part, prefix in self.prefixes:
            if name.startswith(prefix):
                return part
        raise KeyError(name)


FAMILIES = {
    "qwen3_vl": Family(
        model_type="qwen3_vl",
        prefixes=(
            ("projector", "model.visual.merger"),
            ("projector", "model.visual.deepstack_merger_list"),
            ("vision", "model.visual"),
            ("embeddings", "model.language_model.embed_tokens"),
            ("language", "model.language_model"),
            ("head", "lm_head"),
        ),
        # "all-linear" would reach the vision tower, so every part has its own expression.
        lora={
            "language": r".*language_model\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)",
            "vision": r".*visual\.blocks\.\d+\.(attn\.(qkv|proj)|mlp\.linear_fc[12])",
            "projector": r".*visual\.(merger|deepstack_merger_list\.\d+)\.linear_fc[12]",
        },
    ),
}


def lora_pattern(family: Family, tune: TuneConfig) -> str | None:
    """The regular expression of modules that get adapters (peft's `target_modules`), None without LoRA.

    `tune.target_modules` replaces the family's expressions of all parts.
    """
    parts = [part for part in LORA_PARTS if getattr(tune, part) == "lora"]
    if not parts:
        return None
    if tune.target_modules is not None:
        return tune.target_modules
    return "|".join(f"(?:{family.lora[part]})" for part in parts)


def matched_modules(pattern: str | None, names: Iterable[str]) -> list[str]:
    """Names that `pattern` matches whole, as peft matches them."""
    return [] if pattern is None else [name for name in names if re.fullmatch(pattern, name)]


def trains_fully(part: str, tune: TuneConfig) -> bool:
    """Whether every weight of `part` trains; embeddings go with the language model.

    The head is special: `tune.head=full` trains an own two-row parameter and lm_head stays as it is.
    """
    if part == "head":
        return False
    choice = tune.language if part == "embeddings" else getattr(tune, part)
    return bool(choice == "full")
