"""A plan once its machines have been looked at: what is auto is chosen anew for the memory that is really free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.planning.auto import choose
from launcher.planning.batches import micro_steps
from launcher.planning.candidates import Ask
from launcher.planning.choices import choose_numerics
from launcher.planning.facts import TextFile
from launcher.planning.fitting import MARK, host_problems, of_host, shortfall
from launcher.planning.gpus import capability_of
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
    capability: tuple[int, int] | None = None  # CUDA compute capability, None where the driver does not tell it


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

    `files`: those of ds_configs/ by name; `own`: the user's DeepSpeed JSON; `measured`: Facts.measured. A CPU run is
    only held against main memory that nobody had seen.
    """
    rooms = [(_room(plan, gpu), gpu) for gpu in gpus]
    if plan.device == "cpu":
        return _on_cpus(plan, ram, files, own)
    if not rooms:
        return Refitted(plan=plan)
    room, gpu = min(rooms, key=lambda pair: pair[0].usable)
    known = [(capability, one) for _, one in rooms if (capability := _capability(plan, one)) is not None]
    # What the oldest cannot compute in, no rank can: ranks decide by it too.
    capability, oldest = min(known, key=lambda pair: pair[0]) if known else (None, gpu)
    ask = _ask(plan, room, files, own)
    if plan.gpu_kind is not None and plan.memory_capacity == room.whole and capability == plan.capability:
        return Refitted(plan=plan, problems=_of_hosts(plan, ram, ask))  # all is as it was planned for
    ask = replace(ask, gpu_kind=gpu.name, capability=capability, measured=measured_on(gpu.name, measured))
    refused: tuple[Problem, ...] = ()
    if capability is not None and capability != plan.capability:
        numerics = choose_numerics(plan.config, _placement(plan, oldest, capability), ask.shape.family)
        ask, refused = replace(ask, precision=numerics.precision[0]), numerics.problems
    early = tuple((oldest.host, problem, True) for problem in refused)
    try:
        decision = choose(ask)
    except ConfigError as error:
        return Refitted(plan=plan, problems=(*early, *((gpu.host, problem, True) for problem in error.problems)))
    chosen = decision.chosen
    problems, warnings = shortfall(ask, chosen, min(ram.values(), default=None))
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
        capability=capability,
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
    return Refitted(
        plan=fitted, problems=(*early, *told, *_of_hosts(fitted, ram, ask)), notes=tuple(_notes(plan, fitted, room))
    )


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


def _capability(plan: RunPlan, gpu: SeenGpu) -> tuple[int, int] | None:
    """As its driver tells it, else by its name, else what the plan knows of GPUs of this name."""
    planned = plan.capability if plan.gpu_kind == gpu.name else None
    return gpu.capability or capability_of(gpu.name) or planned


def _placement(plan: RunPlan, gpu: SeenGpu, capability: tuple[int, int]) -> Placement:
    return Placement(
        hosts=plan.hosts,
        source=plan.hosts_source,
        assumed=False,
        transport=plan.transport,
        device=plan.device,
        gpu_kind=gpu.name,
        memory_bytes=gpu.total_bytes,
        capability=capability,
    )


def _on_cpus(plan: RunPlan, ram: Mapping[str, int], files: Mapping[str, TextFile], own: TextFile | None) -> Refitted:
    shares = {host.name: ram[host.name] // host.slots for host in plan.hosts if host.name in ram}
    if plan.memory_capacity is not None or not shares:
        return Refitted(plan=plan)
    host, share = min(shares.items(), key=lambda pair: pair[1])
    headroom = plan.config.memory.headroom
    ask = _ask(plan, room_of(share, headroom=headroom, device="cpu", kind=None, which=f"a rank of {host}"), files, own)
    problems, warnings = shortfall(ask, choose(ask).chosen)
    seen = replace(plan, memory_capacity=share, warnings=(*plan.warnings, *warnings))
    return Refitted(plan=seen, problems=(*((host, problem, True) for problem in problems), *_of_hosts(plan, ram, ask)))


def _ask(plan: RunPlan, room: Room, files: Mapping[str, TextFile], own: TextFile | None) -> Ask:
    config, shape = plan.config, read_shape(plan.config.model, plan.arch)
    slots = tuple(host.slots for host in plan.hosts)
    return Ask(
        config=config,
        shape=shape,
        files=files,
        own=own,
        precision=plan.precision,
        lr=plan.lr,
        device=plan.device,
        gpu_kind=plan.gpu_kind,
        capability=plan.capability,
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


def _of_hosts(plan: RunPlan, ram: Mapping[str, int], ask: Ask) -> tuple[tuple[str, Problem, bool], ...]:
    needed = of_host(plan.host_memory, plan.device)
    found = host_problems(ram, plan.hosts, needed, ask) if needed else {}
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
