"""CUDA_VISIBLE_DEVICES of the launching shell: it limits this machine, and is never dropped in silence."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.errors import ConfigError, Problem
from launcher.planning.facts import Facts
from launcher.planning.pool import Pool, is_this_machine
from launcher.spec import Host


def through_visible(host: Host, visible: Sequence[int]) -> Host:
    """The host with its slots, which count the visible GPUs from 0, replaced by the machine's own numbers.

    ConfigError when a slot is beyond them; a machine without GPUs has nothing to replace.

    Example:
        >>> through_visible(Host(name="a", gpus=(0, 1)), [4, 5, 6]).gpus
        (4, 5)
    """
    if not visible:
        return host
    beyond = [slot for slot in host.gpus if slot >= len(visible)]
    if beyond:
        text = f"{host.name} has no slot {beyond[0]}: {_have(visible)}"
        raise ConfigError(Problem(text, "", (f"gpus={len(visible)}",)))
    return host.taking({slot: visible[slot] for slot in host.gpus})


def check_slots(hosts: Sequence[Host], facts: Facts, pool: Pool, transport: str) -> list[Problem]:
    """Slots of a hostfile that this machine has not, or that CUDA_VISIBLE_DEVICES hides."""
    if pool.kind != "hostfile" or transport in ("env", "slurm") or not facts.gpus:
        return []
    problems = []
    for host in hosts:
        beyond = [slot for slot in host.gpus if slot >= len(facts.gpus)]
        if not beyond or not is_this_machine(host, facts.hostname, facts.addresses):
            continue
        indices = [gpu.index for gpu in facts.gpus]
        if facts.visible_devices is None:
            text = f"{pool.name} gives {host.name} slot {beyond[0]}, and {_have(indices)}"
            tries: tuple[str, ...] = (f"{host.name} slots={len(indices)}",)
        else:
            shown = f"CUDA_VISIBLE_DEVICES={facts.visible_devices}"
            text = f"{pool.name} gives {host.name} slot {beyond[0]}, and {shown} leaves slots 0 to {len(indices) - 1}"
            tries = (f"gpus={len(indices)}", "unset CUDA_VISIBLE_DEVICES")
        problems.append(Problem(text, "", tries))
    return problems


def visible_warnings(hosts: Sequence[Host], facts: Facts, pool: Pool, transport: str) -> list[str]:
    """What CUDA_VISIBLE_DEVICES does not reach: other hosts."""
    if facts.visible_devices is None or transport in ("local", "env") or pool.kind not in ("hostfile", "slurm"):
        return []
    here = [host.name for host in hosts if is_this_machine(host, facts.hostname, facts.addresses)]
    others = "the other hosts" if here else "all hosts"
    where = f"on {here[0]}, which is this machine" if here else "on this machine, which is none of the hosts"
    return [
        f"CUDA_VISIBLE_DEVICES={facts.visible_devices} counts only {where}: {pool.name} decides for {others} "
        "(gpus=2 or gpus=[0,1] takes fewer)"
    ]


def _have(indices: Sequence[int]) -> str:
    plural = "" if len(indices) == 1 else "s"
    return f"this machine has {len(indices)} GPU{plural}: {', '.join(map(str, indices))}"
