"""Which hosts, which device, which GPU kind: from a hostfile, from this machine, or assumed for planning."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.errors import ConfigError, Problem
from launcher.planning.facts import Facts
from launcher.planning.hosts import contiguous, is_loopback, parse_hostfile
from launcher.planning.memory import GPU_KINDS, GpuKind, kind_of
from launcher.planning.selection import filter_hosts, limit_gpus, slots_of, take_nodes
from launcher.spec import Host, RunConfig

LOCAL = "localhost"
DEFAULT_GPUS = 8
DEFAULT_CPU_RANKS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where ranks run."""

    hosts: tuple[Host, ...]
    source: str  # a sentence
    assumed: bool
    device: str  # cuda | cpu
    gpu_kind: str | None
    memory_bytes: int | None  # of one GPU, or of RAM for one CPU rank; None when unknown
    capability: tuple[int, int] | None
    warnings: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return sum(host.slots for host in self.hosts)


def place(config: RunConfig, facts: Facts) -> Placement:
    """Choose hosts and device; everything wrong with the choice is one ConfigError."""
    _check_combinations(config)
    if facts.hostfile is not None:
        return _from_hostfile(config, facts)
    nodes = 1 if config.nodes is None else config.nodes
    if nodes > 1 or (config.cluster.gpu is not None and not facts.gpus):
        return _assumed(config, nodes)
    return _this_machine(config, facts)


def is_this_machine(host: Host, hostname: str) -> bool:
    """Whether `host` is the machine called `hostname`, as far as names tell."""
    name = host.name.lower()
    return is_loopback(name) or name in (hostname.lower(), hostname.lower().partition(".")[0])


def check_loopback(hosts: Sequence[Host], master_addr: str | None) -> list[Problem]:
    """Other machines cannot reach a rank 0 that is called localhost."""
    first = hosts[0]
    loopback = [h for h in hosts if is_loopback(h.name)]
    if len(hosts) == 1 or not loopback or master_addr or first.address or first not in loopback:
        # localhost further down is still this machine for ssh, and dials out to rank 0.
        return []
    text = f"{first.name} stands first beside other hosts, which would be told to meet at 127.0.0.1"
    return [Problem(text, "", (f"{first.name} slots={first.slots} addr=ADDRESS", "cluster.master_addr=ADDRESS"))]


def meeting_address(hosts: Sequence[Host], master_addr: str | None) -> str:
    """Where ranks meet: the address given, else the first host's."""
    first = hosts[0]
    if master_addr:
        return master_addr
    return first.address or ("127.0.0.1" if is_loopback(first.name) else first.name)


def _check_combinations(config: RunConfig) -> None:
    """Filters name hosts and slots already, so a count beside them would be a second answer (as in DeepSpeed)."""
    cluster = config.cluster
    if not (cluster.include or cluster.exclude):
        return
    key = "cluster.include" if cluster.include else "cluster.exclude"
    problems = [
        Problem(f"{name}= and {key}= cannot be combined", "", (f"{name}=null", f"{key}=null"))
        for name in ("nodes", "gpus")
        if getattr(config, name) is not None
    ]
    if problems:
        raise ConfigError(*problems)


def _from_hostfile(config: RunConfig, facts: Facts) -> Placement:
    assert facts.hostfile is not None
    path, cluster = facts.hostfile.path, config.cluster
    hosts = parse_hostfile(facts.hostfile.text, path)
    total = len(hosts)
    hosts = filter_hosts(hosts, cluster.include, cluster.exclude)
    hosts = limit_gpus(take_nodes(hosts, config.nodes, path), config.gpus)
    problems = check_loopback(hosts, cluster.master_addr)
    for host in hosts:
        if ":" in host.name and not contiguous(host):
            text = f"{host.name}: DeepSpeed cannot name slots of a host that is written as an IPv6 address"
            problems.append(Problem(text, path, (f"NAME slots={host.slots} addr={host.name}",)))
    if problems:
        raise ConfigError(*problems)
    how = f"all {total} hosts" if len(hosts) == total else f"{len(hosts)} of its {total} hosts"
    source = f"{path}: {how}" if total > 1 else f"{path}: 1 host"
    warnings = []
    local = all(is_this_machine(host, facts.hostname) for host in hosts)
    if facts.visible_devices is not None and local:
        warnings.append(f"CUDA_VISIBLE_DEVICES={facts.visible_devices} is not used: {path} names the GPUs")
    if local and not facts.gpus and cluster.gpu is None:
        return _on_cpu(facts, hosts, source, warnings)
    return _on_gpus(config, facts if local else None, hosts, source, warnings=warnings)


def _assumed(config: RunConfig, nodes: int) -> Placement:
    gpus = slots_of(DEFAULT_GPUS if config.gpus is None else config.gpus)
    names = [f"node{n}" for n in range(1, nodes + 1)]
    hosts = filter_hosts([Host(name=n, gpus=gpus) for n in names], config.cluster.include, config.cluster.exclude)
    each = f"{len(gpus)} GPU{'s' if len(gpus) != 1 else ''}"
    source = f"assumed: {', '.join(names[:3])}{' ...' if nodes > 3 else ''}, {each} each"
    give = "cluster.hostfile=FILE names the real ones" if nodes > 1 else "leave cluster.gpu out to use this machine"
    warning = f"no host is known: planned for {nodes} assumed host{'s' if nodes > 1 else ''} of {each}; {give}"
    placement = _on_gpus(config, None, hosts, source, warnings=[])
    return dataclasses.replace(placement, assumed=True, warnings=(warning, *placement.warnings))


def _this_machine(config: RunConfig, facts: Facts) -> Placement:
    cluster = config.cluster
    if facts.gpus:
        visible = facts.visible_devices
        source = "this machine" + (f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else "")
        # Slot numbers count the visible GPUs from 0, as CUDA does; ranks get the machine's own numbers.
        slots = limit_gpus([Host(name=LOCAL, gpus=tuple(range(len(facts.gpus))))], config.gpus)
        slots = filter_hosts(slots, cluster.include, cluster.exclude)
        chosen = [facts.gpus[slot] for slot in slots[0].gpus]
        host = Host(name=LOCAL, gpus=tuple(gpu.index for gpu in chosen))
        return _on_gpus(config, dataclasses.replace(facts, gpus=tuple(chosen)), [host], source, warnings=[])
    gpus = slots_of(DEFAULT_CPU_RANKS if config.gpus is None else config.gpus)
    hosts = filter_hosts([Host(name=LOCAL, gpus=gpus)], cluster.include, cluster.exclude)
    return _on_cpu(facts, hosts, "this machine, which has no GPU", [])


def _on_cpu(facts: Facts, hosts: Sequence[Host], source: str, warnings: list[str]) -> Placement:
    ranks = sum(host.slots for host in hosts)
    return Placement(
        hosts=tuple(hosts),
        source=source,
        assumed=False,
        device="cpu",
        gpu_kind=None,
        memory_bytes=None if facts.ram_bytes is None else facts.ram_bytes // ranks,
        capability=None,
        warnings=tuple(warnings),
    )


def _on_gpus(
    config: RunConfig, facts: Facts | None, hosts: Sequence[Host], source: str, *, warnings: list[str]
) -> Placement:
    """GPU kind: what was typed, else what this machine has, else unknown. The smallest GPU decides."""
    asked, gpus = config.cluster.gpu, facts.gpus if facts else ()
    kind: GpuKind | None = None
    if asked is not None:
        if asked not in GPU_KINDS:
            known = ", ".join(GPU_KINDS)
            raise ConfigError(Problem(f"cluster.gpu={asked} is not known: {known}", "", ("cluster.gpu=h100",)))
        name, kind = asked, GPU_KINDS[asked]
    elif gpus:
        name, kind = gpus[0].name, kind_of(gpus[0].name)
    else:
        name = None
    memory = [g.memory_bytes for g in gpus if g.memory_bytes is not None]
    capability = [g.capability for g in gpus if g.capability is not None]
    return Placement(
        hosts=tuple(hosts),
        source=source,
        assumed=False,
        device="cuda",
        gpu_kind=name,
        memory_bytes=min(memory) if memory else kind.memory_bytes if kind else None,
        capability=min(capability) if capability else kind.capability if kind else None,
        warnings=tuple(warnings),
    )
