"""A plan once its machines have been looked at: what is auto is chosen anew for the memory that is really free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.kernels import kernel_problems
from launcher.planning.auto import choose
from launcher.planning.batches import micro_steps
from launcher.planning.candidates import Ask
from launcher.planning.choices import choose_attention, choose_precision
from launcher.planning.facts import TextFile
from launcher.planning.fitting import MARK, host_problems, shortfall
from launcher.planning.gpus import kind_of
from launcher.planning.placement import Placement
from launcher.planning.rates import measured_on
from launcher.planning.room import Room, room_of
from launcher.planning.scaling import side_by_side
from launcher.planning.shapes import read_shape
from launcher.spec import RunPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenGpu:
    """A GPU of the run as its host tells of it."""

    host: str
    index: int
    name: str
    total_bytes: int
    used_bytes: int  # by others: nothing of the run has started
    users: str  # who they are, "" when that is not seen


@dataclass(frozen=True, kw_only=True, slots=True)
class Refitted:
    """The plan for the machines as they are, and what is to be told."""

    plan: RunPlan
    problems: tuple[tuple[str, Problem, bool], ...] = ()  # (host, problem, whether the configuration is to be edited)
    notes: tuple[str, ...] = ()


def refit(
    plan: RunPlan,
    gpus: Iterable[SeenGpu],
    ram: Mapping[str, int],
    files: Mapping[str, TextFile],
    own: TextFile | None,
    measured: Sequence[Mapping[str, Any]] = (),
) -> Refitted:
    """The plan with the settings that are auto chosen for the fullest of `gpus`; `ram`: bytes of each host.

    `files`: those of ds_configs/ by name; `own`: the user's DeepSpeed JSON; `measured`: Facts.measured. A CPU run stays
    as it is.
    """
    rooms = [(_room(plan, gpu), gpu) for gpu in gpus]
    if plan.device == "cpu" or not rooms:
        return Refitted(plan=plan)
    room, gpu = min(rooms, key=lambda pair: pair[0].usable)
    oldest = min((gpu for _, gpu in rooms), key=_capability)  # what it cannot compute in, no rank can
    if plan.gpu_kind is not None and plan.memory_capacity == room.whole and not _surprises(plan, oldest):
        return Refitted(plan=plan, problems=_of_hosts(plan, ram))  # all is as it was planned for
    try:
        ask = replace(_ask(plan, room, gpu, files, own, oldest), measured=measured_on(gpu.name, measured))
        decision = choose(ask)
    except ConfigError as error:
        return Refitted(plan=plan, problems=tuple((gpu.host, problem, True) for problem in error.problems))
    chosen = decision.chosen
    problems, warnings = shortfall(ask, chosen)
    warnings = [*(text for text in plan.warnings if not text.startswith(MARK)), *warnings]
    batch = replace(
        plan.batch,
        max_tokens=chosen.max_tokens,
        micro_steps=micro_steps(plan.data, plan.batch.global_size, plan.world_size, chosen.max_tokens),
    )
    reason = plan.precision_reason if ask.precision == plan.precision else f"{oldest.name} of {oldest.host}"
    fitted = replace(
        plan,
        gpu_kind=gpu.name,
        precision=ask.precision,
        precision_reason=reason,
        checkpointed_layers=chosen.layers,
        batch=batch,
        deepspeed=chosen.setting.deepspeed,
        memory=chosen.memory.gpu,
        memory_moment=chosen.memory.moment,
        memory_capacity=room.whole,
        host_memory=chosen.memory.host,
        disk=chosen.memory.disk,
        time=chosen.time,
        choices=decision.choices,
        scaling=side_by_side(ask, chosen),
        warnings=tuple(warnings),
    )
    held = gpu.used_bytes > 0 and _room(plan, replace(gpu, used_bytes=0)).usable >= chosen.memory.total
    told = tuple((gpu.host, _in_use(problem, gpu) if held else problem, not held) for problem in problems)
    return Refitted(plan=fitted, problems=(*told, *_of_hosts(fitted, ram)), notes=tuple(_notes(plan, fitted, room)))


def _room(plan: RunPlan, gpu: SeenGpu) -> Room:
    return room_of(
        gpu.total_bytes,
        headroom=plan.config.memory.headroom,
        device="cuda",
        kind=gpu.name,
        which=f"GPU {gpu.index} of {gpu.host}",
        used=gpu.used_bytes,
        users=gpu.users,
    )


def _capability(gpu: SeenGpu) -> tuple[int, int]:
    kind = kind_of(gpu.name)
    return (99, 0) if kind is None else kind.capability


def _surprises(plan: RunPlan, oldest: SeenGpu) -> bool:
    """Whether the number format was chosen for other GPUs than the oldest of the run."""
    kind = kind_of(oldest.name)
    return kind is not None and (plan.gpu_kind is None or kind_of(plan.gpu_kind) is not kind)


def _ask(
    plan: RunPlan, room: Room, gpu: SeenGpu, files: Mapping[str, TextFile], own: TextFile | None, oldest: SeenGpu
) -> Ask:
    config, shape = plan.config, read_shape(plan.config.model, plan.arch)
    precision = plan.precision
    if _surprises(plan, oldest):
        there = Placement(
            hosts=plan.hosts,
            source=plan.hosts_source,
            assumed=False,
            transport=plan.transport,
            device=plan.device,
            gpu_kind=oldest.name,
            memory_bytes=oldest.total_bytes,
            capability=_capability(oldest),
        )
        precision = choose_precision(config, there, shape.family)[0]
        choose_attention(config, there, precision, None)  # or refuse what these GPUs cannot compute
        if problems := kernel_problems(config, shape.family, there.capability):
            raise ConfigError(*problems)
    slots = tuple(host.slots for host in plan.hosts)
    return Ask(
        config=config,
        shape=shape,
        files=files,
        own=own,
        precision=precision,
        lr=plan.lr,
        device=plan.device,
        gpu_kind=gpu.name,
        attention=plan.attention,
        slots=slots,
        per_host=max(slots),
        room=room,
        data=plan.data,
        steps_per_epoch=plan.batch.steps_per_epoch,
        processors=int(threads) * max(slots) if (threads := plan.env.get("OMP_NUM_THREADS", "")).isdigit() else None,
    )


def _in_use(problem: Problem, gpu: SeenGpu) -> Problem:
    """What to do about somebody else's processes comes first."""
    away = f"cluster.exclude={gpu.host}:{gpu.index}   (leaves that GPU out)"
    return replace(
        problem, tries=(f"nvidia-smi   (on {gpu.host}: ends or moves what runs there)", away, *problem.tries)
    )


def _of_hosts(plan: RunPlan, ram: Mapping[str, int]) -> tuple[tuple[str, Problem, bool], ...]:
    if not plan.host_memory:
        return ()
    found = host_problems(
        ram, plan.hosts, plan.host_memory, config=plan.config, stage=plan.deepspeed["zero_optimization"]["stage"]
    )
    return tuple((host, problem, True) for host, problem in found.items())


def _notes(before: RunPlan, after: RunPlan, room: Room) -> Iterable[str]:
    """What was chosen otherwise than in the plan, and why."""
    old, new = _settings(before), _settings(after)
    changed = [f"{name} {new[name]} instead of {old[name]}" for name in new if new[name] != old[name]]
    if changed:
        yield f"{', '.join(changed)}: {room.gib} GiB are free to plan with of {room.whose}"


def _settings(plan: RunPlan) -> dict[str, str]:
    return {
        "precision": plan.precision,
        "zero": plan.zero_name,
        "recomputed layers": f"{plan.checkpointed_layers}",
        "batch.max_tokens": f"{plan.batch.max_tokens:,}",
    }
