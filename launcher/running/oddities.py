"""What probes saw that does not keep a run from starting, but that a person should know. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.planning.known_bad import known_bad
from launcher.running.findings import several
from launcher.running.machines import GB, MIB, Reference
from launcher.spec import Host, RunPlan

IDLE_BYTES = 1024 * MIB  # of a GPU that nobody is known to use: the driver and other users' contexts
CLOCK_S = 2.0  # by which clocks may differ before times in logs mislead
SMALL_SHM = 512 * MIB
Looks = Mapping[str, Any]


def oddities(plan: RunPlan, looks: Looks, reference: Reference) -> list[str]:
    """Warnings, one sentence each."""
    found: list[str] = []
    for host in plan.hosts:
        look = looks[host.name]
        found += [*_busy(plan, host, look), *_clock(host, look), *_leftovers(host, look), *_shm(plan, host, look)]
        found += _bad_versions(plan, host, look)
    return [*found, *_differing(plan, looks), *_weights(plan, looks, reference)]


def _busy(plan: RunPlan, host: Host, look: Any) -> Iterator[str]:
    gpus = look["gpus"] if plan.device == "cuda" and isinstance(look["gpus"], list) else []
    for gpu in gpus:
        if gpu["index"] not in host.gpus:
            continue
        used = gpu["used"] or 0
        users = [user_text(user) for user in gpu["users"]]
        if users or used > IDLE_BYTES:
            whom = f"by {several(users)}" if users else "by somebody who is not seen from there"
            size = f"{used / GB:.1f} GB of {(gpu['total'] or 0) / GB:.0f}"
            yield f"{host.name}: GPU {gpu['index']} is in use, {size}, {whom}"


def user_text(user: Any) -> str:
    """A process on a GPU, and whose it is."""
    size = f", {user['bytes'] / GB:.1f} GB" if user["bytes"] else ""
    owner = f" of {user['user']}" if user["user"] else ""
    return f"{user['name'].rpartition('/')[2]}{owner} (pid {user['pid']}{size})"


def _bad_versions(plan: RunPlan, host: Host, look: Any) -> Iterator[str]:
    for verdict in known_bad(plan, look["versions"], look["executable"]):
        if verdict.warning:
            yield f"{host.name}: {verdict.text}: {verdict.tries[0]}"


def _clock(host: Host, look: Any) -> Iterator[str]:
    ahead = look["ahead_s"]
    if abs(ahead) > CLOCK_S:
        way = "ahead of" if ahead > 0 else "behind"
        yield f"{host.name}: its clock is {abs(ahead):,.0f} s {way} this machine's, so times in its logs are"


def _leftovers(host: Host, look: Any) -> Iterator[str]:
    for run, pids in look["leftovers"].items() if "failed" not in look["leftovers"] else ():
        some = ", ".join(map(str, pids[:8]))
        yield f"{host.name}: {len(pids)} process(es) of run {run}, which has ended, are left there: kill {some}"


def _shm(plan: RunPlan, host: Host, look: Any) -> Iterator[str]:
    free = look["shm"].get("free", SMALL_SHM)
    if plan.device == "cuda" and host.slots > 1 and free < SMALL_SHM:
        yield f"{host.name}: {free / MIB:,.0f} MiB are free in /dev/shm; more than one GPU may need more"


def _differing(plan: RunPlan, looks: Looks) -> Iterator[str]:
    if plan.device != "cuda":
        return
    for field, what in (("name", "GPUs"), ("driver", "GPU drivers")):
        seen: dict[str, list[str]] = {}
        for host in plan.hosts:
            gpus = looks[host.name]["gpus"]
            for gpu in gpus if isinstance(gpus, list) else ():
                hosts = seen.setdefault(gpu[field], [])
                if gpu["index"] in host.gpus and host.name not in hosts:
                    hosts.append(host.name)
        used = {value: hosts for value, hosts in seen.items() if hosts}
        if len(used) > 1:
            listed = "; ".join(f"{value} on {several(hosts)}" for value, hosts in used.items())
            yield f"{what} differ: {listed}" + ("; the smallest decides" if field == "name" else "")


def _weights(plan: RunPlan, looks: Looks, reference: Reference) -> Iterator[str]:
    without = [h.name for h in plan.hosts if looks[h.name]["hub"] is False and h.name not in reference.here]
    if without:
        repo = plan.config.model.repo
        yield f"the weights of {repo} are not on {several(without)}: they are fetched before the ranks start"
