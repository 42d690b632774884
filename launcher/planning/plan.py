"""RunConfig + Facts -> RunPlan: everything that will happen, decided before anything does.

Pure: the same configuration and facts give the same plan. All problems are reported together.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from launcher import __version__
from launcher.arithmetic import steps_per_epoch, warmup_steps
from launcher.errors import ConfigError, Problem
from launcher.families import PARTS
from launcher.fingerprint import fingerprint, misfits
from launcher.planning.auto import Decision, choose, own_beside_auto
from launcher.planning.batch_script import slurm_problems
from launcher.planning.batches import plan_batch, train_rows
from launcher.planning.candidates import AUTO, Ask
from launcher.planning.choices import Numerics, choose_numerics, learning_rate
from launcher.planning.command import with_port
from launcher.planning.consistency import contradictions, oddities, profile_problems, withheld
from launcher.planning.environ import RankEnvironment, declare, rank_environment
from launcher.planning.facts import Facts
from launcher.planning.fitting import host_problems, of_host, shortfall
from launcher.planning.memory import disk_bytes
from launcher.planning.models import (
    check_targets,
    data_problems,
    head_problems,
    parameter_counts,
    remarks,
    trainable_counts,
)
from launcher.planning.nccl_plan import at_plan
from launcher.planning.placement import Placement, meeting_address, place
from launcher.planning.pool import DEFAULT_GPUS
from launcher.planning.rates import measured_on
from launcher.planning.room import room_of
from launcher.planning.scaling import side_by_side
from launcher.planning.shapes import Shape, read_shape
from launcher.planning.speed import cost_model
from launcher.spec import RunConfig, RunPlan

__all__ = ["Facts", "make_plan"]

GB = 10**9

T = TypeVar("T")


class _Problems:
    """Problems of several independent decisions."""

    def __init__(self, *found: Problem) -> None:
        self.found = list(found)

    def attempt(self, decide: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
        """The decision, or None with its problems noted."""
        try:
            return decide(*args, **kwargs)
        except ConfigError as error:
            self.found.extend(error.problems)
            return None

    def error(self) -> ConfigError:
        """All of them; the same problem found twice is said once."""
        return ConfigError(*dict.fromkeys(self.found))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Decided:
    """The independent decisions that a plan is put together from."""

    arch: dict[str, Any]
    shape: Shape
    placement: Placement
    numerics: Numerics
    env: RankEnvironment
    notices: list[str]
    ask: Ask
    decision: Decision
    tight: list[str]  # warnings about memory


def make_plan(config: RunConfig, facts: Facts, *, now: datetime) -> RunPlan:
    """The plan of one run; `now` is UTC. Raises ConfigError with every problem that can be seen at once."""
    problems = _Problems(*facts.problems, *contradictions(config, facts))
    if config.zero.name == AUTO and config.zero.config is not None:
        problems.found.append(own_beside_auto(config))
    decided = _decide(config, facts, problems)
    if decided is None:
        raise problems.error()
    plan = _assemble(config, facts, now, decided)
    problems.found.extend(profile_problems(config, plan.device, plan.world_size, plan.batch.total_steps))
    problems.found.extend([*_disk_problems(plan, facts), *_finished_problems(plan, facts)])
    if problems.found:
        raise problems.error()
    return plan


def _decide(config: RunConfig, facts: Facts, problems: _Problems) -> _Decided | None:
    """Every decision that can be made; None when one is missing, with the reason in `problems`."""
    arch = config.model.arch if config.model.path is None else facts.arch
    declared = problems.attempt(declare, config, facts)
    cpu_only = declared is not None and declared.cpu_only
    placement = problems.attempt(place, config, facts, cpu_only=cpu_only)
    # Without arch the missing folder is a problem already.
    shape = None if arch is None else problems.attempt(read_shape, config.model, arch)
    if arch is not None and facts.resume is not None:
        saved = facts.resume.state.get("fingerprint", {})
        problems.found.extend(misfits(saved, fingerprint(config, arch), facts.resume.checkpoint))
    if shape is not None:
        problems.found.extend(check_targets(shape, config.tune))
        problems.found.extend(head_problems(shape, config.tune, config.task))
        problems.found.extend(data_problems(shape, config))
    if placement is not None:
        problems.found.extend(slurm_problems(config, placement.hosts[0].slots))
    nccl = problems.attempt(at_plan, config, declared, placement, facts.fabric) if placement and declared else None
    variables = nccl.variables() if nccl else {}
    env = problems.attempt(rank_environment, declared, facts, placement, variables) if placement and declared else None
    if arch is None or shape is None or placement is None:
        return None
    numerics = choose_numerics(config, placement, shape.family, facts.lacking)
    problems.found.extend([*numerics.problems, *_bits_problems(config, facts, placement)])
    ask = _ask(facts, placement, shape, config, numerics)
    decision = None if ask is None else problems.attempt(choose, ask)
    if ask is None or decision is None:
        return None
    ram = facts.ram_bytes if placement.transport == "local" and not placement.assumed else None
    too_small, tight = shortfall(ask, decision.chosen, ram)
    if ram is not None:
        needed = of_host(decision.chosen.memory.host, placement.device)
        too_small += host_problems({placement.hosts[0].name: ram}, placement.hosts, needed, ask).values()
    problems.found.extend(too_small)
    if declared is None or env is None:
        return None
    return _Decided(
        arch=arch,
        shape=shape,
        placement=placement,
        numerics=numerics,
        env=env,
        notices=[*declared.warnings, *(nccl.warnings if nccl else ()), *decision.notices],
        ask=ask,
        decision=decision,
        tight=tight,
    )


def _ask(facts: Facts, placement: Placement, shape: Shape, config: RunConfig, numerics: Numerics) -> Ask | None:
    """The question that `auto` settings answer; None without the file of `zero=`, which is a problem already."""
    files = dict(facts.zero_files)
    if facts.zero_file is not None:
        files[config.zero.file] = facts.zero_file
    if config.zero.name != AUTO and config.zero.file not in files:
        return None
    most = max(host.slots for host in placement.hosts)
    seen = DEFAULT_GPUS if placement.assumed else len(facts.gpus) if placement.transport == "local" else 0
    rows = train_rows(config, facts)
    return Ask(
        config=config,
        shape=shape,
        files=files,
        own=facts.zero_config,
        precision=numerics.precision[0],
        lr=learning_rate(config),
        device=placement.device,
        gpu_kind=placement.gpu_kind,
        capability=placement.capability,
        attention=numerics.attention[0],
        slots=tuple(host.slots for host in placement.hosts),
        per_host=max(most, seen),
        room=room_of(
            placement.memory_bytes,
            headroom=config.memory.headroom,
            device=placement.device,
            kind=placement.gpu_kind,
        ),
        data=facts.prepared,
        measured=measured_on(placement.gpu_kind, facts.measured),
        steps_per_epoch=None if rows is None else steps_per_epoch(rows, config.batch.global_size),
        processors=facts.cpu_count if placement.transport == "local" and not placement.assumed else None,
    )


def _assemble(config: RunConfig, facts: Facts, now: datetime, decided: _Decided) -> RunPlan:
    """Put the decisions together, and what follows from them."""
    placement, shape, chosen = decided.placement, decided.shape, decided.decision.chosen
    run_dir = run_folder(config, facts, now)
    batch = plan_batch(config, facts, chosen.max_tokens, placement.world_size)
    warmup = config.optim.warmup_steps if batch.total_steps is None else warmup_steps(config.optim, batch.total_steps)
    plan = RunPlan(
        run_id=f"{now:%Y%m%d-%H%M%S}-{hashlib.sha256(f'{now.isoformat()} {run_dir}'.encode()).hexdigest()[:6]}",
        created_at=now.isoformat(timespec="seconds"),
        version=__version__,
        run_dir=run_dir,
        resume_from=facts.resume.checkpoint if facts.resume else None,
        config=config,
        hosts=placement.hosts,
        hosts_source=placement.source,
        hosts_assumed=placement.assumed,
        transport=placement.transport,
        device=placement.device,
        gpu_kind=placement.gpu_kind,
        master_addr=meeting_address(placement.hosts, config.cluster.master_addr),
        master_port=config.cluster.master_port,
        precision=decided.numerics.precision[0],
        precision_reason=decided.numerics.precision[1],
        attention=decided.numerics.attention[0],
        attention_reason=decided.numerics.attention[1],
        checkpointed_layers=chosen.layers,
        lr=decided.ask.lr,
        warmup_steps=warmup,
        arch=decided.arch,
        parameters=parameter_counts(shape),
        trainable=trainable_counts(shape, config.tune, config.task),
        batch=batch,
        cost=cost_model(shape),
        deepspeed=chosen.setting.deepspeed,
        capability=placement.capability,
        memory=chosen.memory.gpu,
        memory_moment=chosen.memory.moment,
        host_memory=chosen.memory.host,
        disk=chosen.memory.disk,
        time=chosen.time,
        choices=decided.decision.choices,
        scaling=side_by_side(decided.ask, chosen) if placement.device == "cuda" else (),
        memory_capacity=placement.memory_bytes,
        env=decided.env.env,
        env_sources=decided.env.sources,
        env_reasons=decided.env.reasons,
        host_env={},  # these two differ by host: preflight asks the hosts
        cores={},
        commands={},
        data=dict(facts.prepared),
        warnings=(
            *placement.warnings,
            *withheld(placement.transport, decided.env.env),
            *decided.notices,
            *(facts.resume.state.get("notes", ()) if facts.resume else ()),
            *oddities(config, facts, placement.world_size),
            *remarks(shape, config),
            *_weights_warning(config, facts, shape),
            *decided.tight,
        ),
    )
    return with_port(plan, config.cluster.master_port)


def run_folder(config: RunConfig, facts: Facts, now: datetime) -> str:
    """Absolute path of the run folder: named, the resumed run's, else made of time, model, tuning and ZeRO."""
    if config.run.dir is not None:
        return str(Path(facts.cwd) / config.run.dir)
    if config.run.name is not None:
        return str(Path(facts.run_root) / config.run.name)
    if facts.resume is not None:
        return facts.resume.run_dir
    model = Path(config.model.path).name if config.model.path else config.model.name
    parts = f"{now:%Y%m%d-%H%M%S}-{model[:60]}-{config.tune.name}-{config.zero.name}"
    name = re.sub(r"[^A-Za-z0-9._+]+", "-", parts)  # one folder, that needs no quotes in a shell
    number = 1
    while (name if number == 1 else f"{name}-{number}") in facts.taken:
        number += 1
    return str(Path(facts.run_root) / (name if number == 1 else f"{name}-{number}"))


def _bits_problems(config: RunConfig, facts: Facts, placement: Placement) -> list[Problem]:
    """That this machine lacks bitsandbytes, where it runs the ranks; other hosts are asked before these start."""
    if not facts.lacks_bits or placement.transport != "local" or placement.assumed:
        return []
    text = f"{' and '.join(config.few_bits)}: bitsandbytes is needed, and is not installed"
    instead = [{"tune=qlora": "tune=lora", "optim=adamw8bit": "optim=adamw"}[word] for word in config.few_bits]
    return [Problem(text, "", ("pip install bitsandbytes", f"{' '.join(instead)}   (does without)"))]


def _finished_problems(plan: RunPlan, facts: Facts) -> list[Problem]:
    config, total = plan.config, plan.batch.total_steps
    step = facts.resume.state.get("step", 0) if facts.resume else 0
    if total is None or step < total or not facts.resume:
        return []
    if step == total and config.checkpoint.export and not facts.resume.exported:
        return []  # it was ended while it wrote the export
    text = f"the checkpoint is at step {step}, and this run ends at step {total}: nothing is left to train"
    return [Problem(text, facts.resume.checkpoint, (f"train.max_steps={2 * total}",))]


def _disk_problems(plan: RunPlan, facts: Facts) -> list[Problem]:
    needed, free = disk_bytes(plan), facts.disk_free_bytes
    if free is None or free >= needed or plan.hosts_assumed:
        return []
    text = (
        f"checkpoints and export need about {needed / GB:,.1f} GB, and {free / GB:,.1f} GB are free for {plan.run_dir}"
    )
    fewer = ("checkpoint.keep_last=1",) if plan.config.checkpoint.keep_last > 1 else ()
    later = ("checkpoint.export=false   (`python -m launcher export RUN -o FOLDER` makes it elsewhere)",)
    return [
        Problem(
            text, "", (*fewer, *(later if plan.config.checkpoint.export else ()), "run.root=FOLDER on a larger disk")
        )
    ]


def _weights_warning(config: RunConfig, facts: Facts, shape: Shape) -> list[str]:
    model = config.model
    if model.weights != "pretrained" or facts.weights_on_disk or model.path is not None:
        return []
    size = 2 * sum(parameter_counts(shape)[part] for part in PARTS) / GB
    return [
        f"the weights of {model.repo} ({size:.1f} GB) are not on this machine: they are fetched before the ranks start"
    ]
