"""How GPUs talk to one another: the fewest variables, each with its reason, and what stands in the way. Pure.

Three voices, the first wins: variables that the user set, anywhere; keys of `nccl`; what the hosts are found to be.
Before hosts are asked only the keys speak, and a preflight completes the choice. Not set, since they would say what
NCCL and torch do anyway: an algorithm or protocol, NCCL_IB_TIMEOUT, NCCL_NVLS_ENABLE, NCCL_RAS_ADDR (nothing here asks
RAS), torch's watchdog and flight recorder (on by themselves).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.planning import nccl_hosts
from launcher.planning.fabric import Fabric
from launcher.planning.nccl_hosts import LABELS, RDMA, Variable, links_of, network_of
from launcher.planning.nccl_lint import Found, named
from launcher.planning.nccl_rules import ERROR, WARNING, Scene
from launcher.spec import Host, NcclConfig, RunConfig

NETWORKS = ("ib", "roce", "efa", "gcp", "tcp")  # profiles that name what is between hosts
KEYS = {
    "NCCL_SOCKET_IFNAME": "interface",
    "GLOO_SOCKET_IFNAME": "interface",
    "NCCL_IB_HCA": "hca",
    "NCCL_IB_GID_INDEX": "gid_index",
    "NCCL_IB_TC": "traffic_class",
    "NCCL_IB_SL": "service_level",
    "NCCL_CROSS_NIC": "cross_nic",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclChoice:
    """What is set, why, and what was found."""

    env: dict[str, str] = field(default_factory=dict)  # for every rank
    host_env: dict[str, dict[str, str]] = field(default_factory=dict)  # for the ranks of a host, as it is found to be
    reasons: dict[str, str] = field(default_factory=dict)  # of each variable in the two above
    found: tuple[Found, ...] = ()
    notes: tuple[str, ...] = ()  # what the hosts are joined by, and what follows

    @property
    def errors(self) -> tuple[Found, ...]:
        """What keeps the run from starting."""
        return tuple(one for one in self.found if one.level == ERROR)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What does not."""
        return tuple(one.sentence() for one in self.found if one.level != ERROR)

    def variables(self) -> dict[str, tuple[str, str]]:
        """Variable of every rank -> (its value, why)."""
        return {name: (value, self.reasons[name]) for name, value in self.env.items()}


def choose(
    config: RunConfig,
    fabrics: Mapping[str, Fabric],
    *,
    hosts: Sequence[Host],
    device: str,
    env: Mapping[str, str],
    interfaces: Mapping[str, str] | None = None,
) -> NcclChoice:
    """Variables for these hosts; `env`: what the user sets, which is never set here; `fabrics`: as far as known."""
    nccl, several = config.nccl, len(hosts) > 1
    asked = list(_asked(nccl, several=several, cuda=device == "cuda", alone=sum(h.slots for h in hosts) < 2))
    found = [*_doubled(asked, env), *_useless(nccl, several=several, cuda=device == "cuda")]
    kept = [one for one in asked if one.name not in env]
    reasons, host_env, notes = {one.name: one.reason for one in kept}, {}, []
    if device == "cuda" and all(host.name in fabrics for host in hosts):
        ours = {one.name for one in kept}
        told = {host.name: [*_told(config, fabrics, host, hosts, env, interfaces or {})] for host in hosts}
        for host in hosts:
            taken = {*env, *ours, *_in_files(fabrics[host.name])}
            host_env[host.name] = {v.name: v.value for v in _variables(told[host.name]) if v.name not in taken}
        reasons |= _reasons(told, host_env)
        found += _gathered(told)
        notes = _notes(fabrics, hosts, host_env, reasons)
    return NcclChoice(
        env={one.name: one.value for one in kept},
        host_env={host: variables for host, variables in host_env.items() if variables},
        reasons=reasons,
        found=tuple(found),
        notes=tuple(notes),
    )


def scene_of(fabrics: Mapping[str, Fabric], hosts: Sequence[Host]) -> Scene:
    """What rows about variables depend on, over all hosts."""
    known = [fabrics[host.name] for host in hosts if host.name in fabrics]
    networks = [network_of(fabric) for fabric in known]
    joined = [links_of(fabrics[host.name], host.gpus) for host in hosts if host.name in fabrics]
    numbers = [fabric.version for fabric in known if fabric.version is not None]
    names = (one.name for fabric in known for one in fabric.interfaces or ())
    devices = (port.device for fabric in known for port in fabric.ports or ())
    return Scene(
        hosts=len(hosts),
        nccl=min(numbers, default=None),
        rdma=None if not known or None in networks else any(one in (*RDMA, "efa") for one in networks),
        efa="efa" in networks,
        nvlink=None if not known or None in joined else all(one == "nvlink" for one in joined),
        interfaces=tuple(dict.fromkeys(names)),
        devices=tuple(dict.fromkeys(devices)),
    )


def undo(key: str) -> str:
    """What takes away a key of `nccl`."""
    return f"nccl.{key}={'[]' if key == 'hca' else 'null'}"


def _asked(nccl: NcclConfig, *, several: bool, cuda: bool, alone: bool) -> Iterator[Variable]:
    """What the keys of `nccl` say."""
    if nccl.interface is not None:
        reason = f"nccl.interface={nccl.interface}"
        yield Variable(name="GLOO_SOCKET_IFNAME", value=nccl.interface, reason=reason)
        if cuda:
            yield Variable(name="NCCL_SOCKET_IFNAME", value=f"={nccl.interface}", reason=reason)
    if not cuda or alone:
        return
    if nccl.name == "debug":
        yield Variable(name="NCCL_DEBUG", value="INFO", reason="nccl=debug: each rank's log tells what NCCL does")
        subsystems = "INIT,NET,GRAPH,ENV,TUNING"
        yield Variable(name="NCCL_DEBUG_SUBSYS", value=subsystems, reason="nccl=debug: its choices, not each call")
    else:
        yield Variable(name="NCCL_DEBUG", value="WARN", reason="NCCL says why it failed, and else nothing")
    if not several:
        return
    if nccl.name == "tcp":
        yield Variable(name="NCCL_NET", value="Socket", reason="nccl=tcp: also where there are RDMA cards")
    if nccl.hca:
        yield Variable(name="NCCL_IB_HCA", value="=" + ",".join(nccl.hca), reason="nccl.hca, by exact names")
    for name in ("NCCL_IB_GID_INDEX", "NCCL_IB_TC", "NCCL_IB_SL", "NCCL_CROSS_NIC"):
        value = getattr(nccl, KEYS[name])
        if value is not None:
            yield Variable(name=name, value=str(value), reason=f"nccl.{KEYS[name]}={value}")


def _doubled(asked: Iterable[Variable], env: Mapping[str, str]) -> Iterator[Found]:
    """A key and a variable of the user's that say different things."""
    for one in asked:
        key = KEYS.get(one.name)
        if key is not None and env.get(one.name, one.value) != one.value:
            text = f"nccl.{key} means {one.name}={one.value}, and the environment of the ranks has {env[one.name]}"
            tries = (undo(key), f"no {one.name} in this shell, env.file and env.set")
            yield Found(level=ERROR, text=text, tries=tries)


def _useless(nccl: NcclConfig, *, several: bool, cuda: bool) -> Iterator[Found]:
    given = [key for key in dict.fromkeys(KEYS.values()) if key != "interface" and getattr(nccl, key) not in (None, [])]
    why = "on the CPU" if not cuda else "on one host" if not several else ""
    if given and why:
        yield Found(level=WARNING, text=f"{', '.join(f'nccl.{key}' for key in given)} has no effect {why}")
    if why and nccl.name in NETWORKS:
        yield Found(level=WARNING, text=f"nccl={nccl.name} is about the network between hosts, and has no effect {why}")
    if nccl.name == "debug" and cuda:
        text = "nccl=debug is for finding out what NCCL does: logs grow, and the start takes longer"
        yield Found(level=WARNING, text=text, tries=("nccl=auto",))


def _told(
    config: RunConfig,
    fabrics: Mapping[str, Fabric],
    host: Host,
    hosts: Sequence[Host],
    env: Mapping[str, str],
    interfaces: Mapping[str, str],
) -> nccl_hosts.Told:
    """What one host calls for."""
    nccl, fabric = config.nccl, fabrics[host.name]
    yield from nccl_hosts.links(fabric, host.gpus, nccl.name)
    if len(hosts) == 1 or fabric.ports is None:
        return
    network = nccl.name if nccl.name in NETWORKS else network_of(fabric)
    if network in RDMA:
        yield from nccl_hosts.rdma(fabric, network, nccl)
        yield from nccl_hosts.azure(fabric)
    elif network == "efa":
        yield from nccl_hosts.efa(fabric)
    elif network == "gcp":
        yield from _profile(config, fabric, env)
    else:
        if nccl.name != "tcp":
            yield from nccl_hosts.unconfigured(fabric)
        used = {name: interfaces.get(name) or nccl.interface or "" for name in fabrics}
        speeds = [fabrics[name].speed_mbps(used[name]) for name in fabrics]
        slowest = None if None in speeds else min(speed for speed in speeds if speed is not None)
        yield from nccl_hosts.sockets(used[host.name], slowest, fabric.cloud)


def _profile(config: RunConfig, fabric: Fabric, env: Mapping[str, str]) -> Iterator[Found]:
    """Google's variables come from a script of its own, which cluster.activate reads."""
    path = fabric.gcp_profile
    if path is None:
        text = "nccl=gcp, and neither gIB nor FasTrak is found"
        yield Found(level=ERROR, text=text, tries=("nccl=auto", "install Google's plugin"), machine=True)
    elif "NCCL_NET" not in env and path not in (config.cluster.activate or ""):
        text = f"Google's plugin needs the variables of {path}, and they are not set"
        yield Found(level=WARNING, text=text, tries=(f"cluster.activate={path}",))


def _variables(told: Iterable[Variable | Found]) -> Iterator[Variable]:
    return (one for one in told if isinstance(one, Variable))


def _in_files(fabric: Fabric) -> set[str]:
    return {name for file in fabric.files or () if file.path.endswith(".conf") for name in file.variables}


def _reasons(told: Mapping[str, Sequence[Variable | Found]], kept: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Variable -> why; hosts are named where their reasons differ."""
    by: dict[str, dict[str, list[str]]] = {}
    for host, words in told.items():
        for one in _variables(words):
            if one.name in kept[host]:
                by.setdefault(one.name, {}).setdefault(one.reason, []).append(host)
    return {
        name: next(iter(whys)) if len(whys) == 1 else "; ".join(f"{named(hosts)}{why}" for why, hosts in whys.items())
        for name, whys in by.items()
    }


def _gathered(told: Mapping[str, Sequence[Variable | Found]]) -> list[Found]:
    """The same finding on several hosts once."""
    by: dict[Found, list[str]] = {}
    for host, words in told.items():
        for one in words:
            if isinstance(one, Found):
                by.setdefault(one, []).append(host)
    return [dataclasses.replace(one, hosts=tuple(hosts)) for one, hosts in by.items()]


def _notes(
    fabrics: Mapping[str, Fabric],
    hosts: Sequence[Host],
    host_env: Mapping[str, Mapping[str, str]],
    reasons: Mapping[str, str],
) -> list[str]:
    """What joins the GPUs, then each variable with its reason."""
    joined = {links_of(fabrics[host.name], host.gpus) for host in hosts}
    inside = " and ".join(word for kind, word in (("nvlink", "NVLink"), ("pcie", "PCIe")) if kind in joined)
    networks = {network_of(fabrics[host.name]) for host in hosts} if len(hosts) > 1 else set()
    outside = " and ".join(label for kind, label in LABELS.items() if kind in networks)
    parts = [f"{inside} inside a host" if inside else "", f"{outside} between hosts" if outside else ""]
    said = ", ".join(part for part in parts if part)
    values: dict[tuple[str, str], list[str]] = {}
    for host, variables in host_env.items():
        for name, value in variables.items():
            values.setdefault((name, value), []).append(host)
    lines = [
        f"{'' if len(on) == len(hosts) else named(on)}{name}={value} ({reasons[name]})"
        for (name, value), on in values.items()
    ]
    nothing = "" if lines or "gcp" in networks else ", for which NCCL needs no variable"
    head = [f"GPUs talk over {said}{nothing}"] if said else []
    return head + lines
