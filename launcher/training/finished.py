"""A trained model on one device, from a checkpoint or an export: what `evaluate` and `score` run rows through."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from launcher.errors import ConfigError, Problem
from launcher.rundir import checkpoint_step, damages, read_json
from launcher.spec import RunPlan
from launcher.training import adapters, processors
from launcher.training.base import check_base
from launcher.training.checkpoint import read_masters
from launcher.training.encoding import make_encoder
from launcher.training.engine import build_scorer
from launcher.training.export import HEAD
from launcher.training.pixels import Pixels
from launcher.training.steps import StepMaker


@dataclass(frozen=True, slots=True)
class Alone:
    """The only rank: talks like `runtime.Rank`, without a process group."""

    device: torch.device
    rank: int = 0
    world_size: int = 1

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value: this one's."""
        return [value]

    def sum(self, *values: float) -> list[float]:
        """Each value summed over this rank."""
        return [float(value) for value in values]


@dataclass(frozen=True, slots=True)
class Finished:
    """A model that scores rows, what prepares them, and what was said about rows that were left out."""

    plan: RunPlan
    scorer: Any
    maker: StepMaker
    rank: Any  # Alone, in the place of a runtime.Rank
    said: list[str] = field(default_factory=list)


def check_whole(weights: Path) -> None:
    """Raises ConfigError for a checkpoint of which a file is missing or changed; exports keep no sums of theirs."""
    broken = damages(weights) if checkpoint_step(weights) is not None else []
    if broken:
        tries = ("another checkpoint of the run",)
        raise ConfigError(*(Problem(text, tries=tries) for text in broken), title="with this checkpoint")


def load(plan: RunPlan, weights: Path) -> Finished:
    """The model of a plan for one process with the weights of `weights`, a checkpoint or an export.

    A merged export is the plan's own `model.path` and brings nothing more. Raises ConfigError for a checkpoint that
    is damaged or of another model.
    """
    check_whole(weights)
    device = torch.device("cuda", 0) if plan.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = plan.precision != "fp32"
    processor = processors.load_processor(plan)
    scorer = build_scorer(plan, processor, device)
    if checkpoint_step(weights) is not None:
        check_base(plan, read_json(weights / "state.json"), weights)
        _put(scorer, read_masters(weights), weights)
    elif (weights / adapters.WEIGHTS).is_file():
        saved = _read(weights / adapters.WEIGHTS)
        _put(scorer, ((adapters.scorer_name(name), value) for name, value in saved.items()), weights)
    if (weights / HEAD).is_file():
        _put(scorer, _read(weights / HEAD).items(), weights, whole=False)
    scorer.to(device).eval()
    said: list[str] = []
    maker = StepMaker(
        plan,
        make_encoder(plan, processor),
        Pixels(processor),
        rank=0,
        padded=scorer.padded,
        warn=said.append,
        device=device,
        known=scorer.knows,
    )
    return Finished(plan, scorer, maker, Alone(device), said)


def _read(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        text = f"{file} is damaged: {str(error).strip()}"
        raise ConfigError(Problem(text, tries=("python -m launcher export RUN   (writes it again)",))) from error


@torch.no_grad()
def _put(scorer: Any, tensors: Iterable[tuple[str, torch.Tensor]], source: Path, *, whole: bool = True) -> None:
    """Copy tensors into the parameters they name; with `whole`, each that trains must come."""
    parameters = dict(scorer.named_parameters())
    wanted = {name for name, parameter in parameters.items() if parameter.requires_grad} if whole else set()
    found = set()
    for name, value in tensors:
        if name not in parameters or parameters[name].shape != value.shape:
            raise ConfigError(Problem(f"{source} is of another model: it has {name} {list(value.shape)}"))
        parameters[name].copy_(value)
        found.add(name)
    if wanted - found:
        raise ConfigError(
            Problem(f"{source} lacks {len(wanted - found)} trained tensors, such as {min(wanted - found)}")
        )
