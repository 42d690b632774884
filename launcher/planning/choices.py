"""Precision, attention kernel and learning rate, each by what was asked or by what is known, with the reason."""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher.attention_needs import attention_problem, missing_problem
from launcher.errors import ConfigError, Problem
from launcher.families import Family
from launcher.kernels import kernel_problems
from launcher.planning.consistency import uses_lora
from launcher.planning.placement import Placement
from launcher.spec import RunConfig, TuneConfig

LR = {"lora": 1e-4, "full": 1e-5}  # adapters start at zero and bear more; whole weights are easily spoilt
BF16_CAPABILITY = (8, 0)  # Ampere


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """What a run computes in and by which kernels, and what is wrong with those that were asked for."""

    precision: tuple[str, str]  # and why
    attention: tuple[str, str]  # and why
    problems: tuple[Problem, ...]


def choose_numerics(config: RunConfig, placement: Placement, family: Family, lacking: str | None = None) -> Numerics:
    """All of it. In place of what is refused stands what `auto` takes, so that the memory can be judged all the same.

    `lacking`: as in choose_attention.
    """
    problems = kernel_problems(config, family, placement.capability)
    try:
        precision = choose_precision(config, placement, family)
    except ConfigError as error:
        problems += error.problems
        auto = replace(config.precision, name="auto")
        precision = choose_precision(replace(config, precision=auto), placement, family)
    try:
        attention = choose_attention(config, placement, precision[0], lacking)
    except ConfigError as error:
        problems += error.problems
        any_kernel = replace(config.attention, name="auto")
        attention = choose_attention(replace(config, attention=any_kernel), placement, precision[0], None)
    return Numerics(precision=precision, attention=attention, problems=tuple(problems))


def choose_precision(config: RunConfig, placement: Placement, family: Family) -> tuple[str, str]:
    """(bf16 | fp16 | fp32, why)."""
    asked, capability = config.precision.name, placement.capability
    shown = f"compute capability {capability[0]}.{capability[1]}" if capability else ""
    overflows = f"{family.model_type} is known to overflow in float16"
    if asked == "fp16" and placement.device == "cpu":
        raise ConfigError(Problem("precision=fp16 needs a GPU", "", ("precision=fp32",)))
    if asked == "fp16" and family.overflows_fp16 and not config.precision.force:
        text = f"precision=fp16, but {overflows}: its loss becomes 0 and its gradients infinite"
        raise ConfigError(Problem(text, "", ("precision=fp32", "precision=fp16 precision.force=true")))
    if placement.device == "cpu":
        return ("fp32", "no GPU") if asked == "auto" else (asked, "as asked")
    fits = capability is None or capability >= BF16_CAPABILITY
    if asked == "bf16" and not fits:
        text = f"precision=bf16, but {placement.gpu_kind} has {shown}, and bf16 needs 8.0"
        tries = ("precision=fp32",) if family.overflows_fp16 else ("precision=fp16", "precision=fp32")
        raise ConfigError(Problem(text, "", tries))
    if asked != "auto":
        return asked, "as asked"
    if capability is None:
        what = f"compute capability of {placement.gpu_kind}" if placement.gpu_kind else "kind of GPU"
        return "bf16", f"the {what} is not known here; Ampere and newer compute in bf16"
    if fits:
        return "bf16", f"{placement.gpu_kind}, {shown}"
    if family.overflows_fp16:
        return "fp32", f"{shown} has no bf16, and {overflows}"
    return "fp16", f"{shown} has no bf16"


def choose_attention(config: RunConfig, placement: Placement, precision: str, lacking: str | None) -> tuple[str, str]:
    """(kernel, why). Which kernels are installed is known on the hosts only, so `auto` stays `auto` for GPUs.

    `lacking`: what to install on this machine for the kernel asked for. Raises ConfigError where a rank would refuse.
    """
    asked, here = config.attention.name, placement.transport == "local" and not placement.assumed
    problem = attention_problem(
        asked,
        device=placement.device,
        precision=precision,
        capability=placement.capability,
        deterministic=config.train.deterministic,
    )
    if problem is None and lacking is not None and here:
        problem = missing_problem(asked, lacking)
    if problem is not None:
        raise ConfigError(problem)
    if placement.device == "cpu":
        return "reference", "exact, for CPU"
    if asked == "auto":
        return "auto", "the fastest kernel that the ranks find installed; their log names it"
    return asked, "as asked"


def learning_rate(config: RunConfig) -> float:
    """`optim.lr`, else by what trains."""
    if config.optim.lr is not None:
        return config.optim.lr
    return LR["lora" if uses_lora(config.tune) and not _trains_whole_part(config.tune) else "full"]


def _trains_whole_part(tune: TuneConfig) -> bool:
    return any(getattr(tune, part) == "full" for part in ("language", "vision", "projector"))
