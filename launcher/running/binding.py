"""How many threads a rank starts, and on which processors it runs, with the reason. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from launcher.running.findings import several
from launcher.spec import Host, RunPlan

THREADS = "OMP_NUM_THREADS"


def bind(
    plan: RunPlan, looks: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, tuple[tuple[int, ...], ...]], list[str]]:
    """Host -> threads a rank, host -> processors by local rank, and why. What the user set stays as it is."""
    threads: dict[str, str] = {}
    cores: dict[str, tuple[tuple[int, ...], ...]] = {}
    whys: dict[str, list[str]] = {}
    for host in plan.hosts:
        look = looks[host.name]
        if "allowed" not in look["processors"]:
            continue
        beside = _beside_gpus(plan, host, look)
        if beside is not None and plan.config.cluster.bind_cores == "auto":
            cores[host.name] = beside
            nodes = len(set(beside))
            why = f"each rank runs on the processors beside its GPU: {nodes} group{'s' if nodes > 1 else ''} of them"
            whys.setdefault(why, []).append(host.name)
        if THREADS not in plan.env:
            count, why = _threads(host, look, beside)
            threads[host.name] = str(count)
            whys.setdefault(f"{THREADS}={count}: {why}", []).append(host.name)
    return threads, cores, [f"{several(hosts)}: {why}" for why, hosts in whys.items()]


def _beside_gpus(plan: RunPlan, host: Host, look: Any) -> tuple[tuple[int, ...], ...] | None:
    """The allowed processors of the memory node beside each GPU; None when there is one node, or it is not told.

    The whole node, not a share of it: two jobs on the GPUs of one node would else fight for the same share.
    """
    nodes = look["numa"]
    if plan.device != "cuda" or not isinstance(look["gpus"], list) or "failed" in nodes:
        return None
    allowed = set(look["processors"]["allowed"])
    sets = {node: tuple(sorted(allowed & set(cores))) for node, cores in nodes.items()}
    if sum(bool(cores) for cores in sets.values()) < 2:
        return None
    of = {gpu["index"]: sets.get(str(gpu["node"]), ()) for gpu in look["gpus"]}
    found = tuple(of.get(slot, ()) for slot in host.gpus)
    return found if all(found) else None


def _threads(host: Host, look: Any, beside: tuple[tuple[int, ...], ...] | None) -> tuple[int, str]:
    ranks = host.slots
    allowed, quota = len(look["processors"]["allowed"]), look["processors"]["quota"]
    if quota is not None and quota < allowed:
        return max(1, int(quota / ranks)), f"the time of {quota:g} processors for {ranks} ranks"
    if beside is None:
        return max(1, allowed // ranks), f"{allowed} processors for {ranks} rank{'s' if ranks > 1 else ''}"
    # All GPUs of the machine share a node's processors, also those that another job has.
    on_node = Counter(gpu["node"] for gpu in look["gpus"])
    node_of = {gpu["index"]: gpu["node"] for gpu in look["gpus"]}
    count, slot = min(
        (len(cores) // on_node[node_of[slot]], slot) for cores, slot in zip(beside, host.gpus, strict=True)
    )
    size = len(beside[host.gpus.index(slot)])
    return max(1, count), f"{size} processors for the {on_node[node_of[slot]]} GPUs beside them"
