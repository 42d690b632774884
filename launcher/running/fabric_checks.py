"""What the hosts' networks lack for a run on GPUs of several of them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.planning.fabric import Fabric, Port
from launcher.running.findings import Finding, several
from launcher.spec import RunPlan

Fabrics = Mapping[str, Fabric]  # by host
Variables = Mapping[str, Mapping[str, str]]  # host -> what its ranks get
KINDS = {"ib": "InfiniBand", "roce": "Ethernet (RoCE)", "efa": "EFA"}
PROFILES = ("ib", "roce")  # that say which ports are meant
OFF = ("0", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hca:
    """A value of NCCL_IB_HCA, taken apart."""

    names: tuple[str, ...]  # each with `:PORT` where one was given
    exact: bool = False
    excluded: bool = False

    def fits(self, port: Port) -> bool:
        """Whether NCCL may use a port."""
        return any(self._names(name, port) for name in self.names) != self.excluded

    def _names(self, name: str, port: Port) -> bool:
        device, _, number = name.partition(":")
        named = port.device == device if self.exact else port.device.startswith(device)
        return named and number in ("", str(port.number))


def read_hca(value: str) -> Hca:
    """NCCL's own form: `^` all but these, `=` exact names, else prefixes, each with a port.

    Example:
        >>> read_hca("=mlx5_0,mlx5_1:2")
        Hca(names=('mlx5_0', 'mlx5_1:2'), exact=True, excluded=False)
    """
    excluded = value.startswith("^")
    exact = value[excluded:].startswith("=")
    names = value[excluded + exact :].split(",")
    return Hca(names=tuple(filter(None, (name.strip() for name in names))), exact=exact, excluded=excluded)


def fabric_findings(plan: RunPlan, fabrics: Fabrics, variables: Variables) -> list[Finding]:
    """Ports that are named and not there, down, or of another kind than on other hosts; addresses that are not there.

    A host alone sends nothing over its cards, and a host whose cards are not known has none that could be judged.
    """
    known = {host.name: fabrics[host.name] for host in plan.hosts if host.name in fabrics}
    known = {name: fabric for name, fabric in known.items() if fabric.ports is not None}
    if plan.device != "cuda" or len(plan.hosts) < 2 or all(_is_off(variables.get(name, {})) for name in known):
        return []
    found: list[Finding] = []
    for name, fabric in known.items():
        own = variables.get(name, {})
        found += [*_named(name, fabric.ports or (), own), *_gid_index(name, usable(fabric, own), own)]
    told = {row.host for row in found}
    return [*found, *(row for row in _kinds(plan, known, variables) if row.host not in told)]


def usable(fabric: Fabric, variables: Mapping[str, str]) -> list[Port]:
    """Ports that NCCL uses: those that are up, but for what NCCL_IB_HCA leaves out."""
    if _is_off(variables):
        return []
    hca = read_hca(variables.get("NCCL_IB_HCA", "^"))
    return [port for port in fabric.ports or () if port.up and hca.fits(port)]


def fabric_oddities(plan: RunPlan, fabrics: Fabrics, variables: Variables) -> Iterator[str]:
    """Hosts with fewer ports up than others: NCCL works with what is there, and all wait for the slowest."""
    if plan.device != "cuda" or len(plan.hosts) < 2:
        return
    counts = {
        name: len(usable(fabric, variables.get(name, {})))
        for name, fabric in fabrics.items()
        if fabric.ports is not None
    }
    most = max(counts.values(), default=0)
    for name, count in counts.items():
        if 0 < count < most:
            down = [_label(port) for port in fabrics[name].ports or () if not port.up]
            which = f": {several(down)} {'is' if len(down) == 1 else 'are'} down" if down else ""
            others = several([other for other in counts if counts[other] == most])
            ports = "1 RDMA port is up" if count == 1 else f"{count} RDMA ports are up"
            yield f"{name}: {ports}, and {most} on {others}{which}; all wait for the slowest host"


def _is_off(variables: Mapping[str, str]) -> bool:
    """Whether the user keeps NCCL from using RDMA cards of this kind."""
    net = variables.get("NCCL_NET", "IB")
    return variables.get("NCCL_IB_DISABLE", "0") not in OFF or net.lower() not in ("ib", "aws libfabric")


def _label(port: Port) -> str:
    return f"{port.device}:{port.number}"


def _named(host: str, ports: Sequence[Port], variables: Mapping[str, str]) -> Iterator[Finding]:
    """Devices that NCCL_IB_HCA names: each must be there, and up."""
    hca = read_hca(variables.get("NCCL_IB_HCA", "^"))
    if hca.excluded:
        return
    for name in hca.names:
        fits = [port for port in ports if Hca(names=(name,), exact=hca.exact).fits(port)]
        if not fits:
            there = several([port.device for port in ports]) or "none"
            reason = f"NCCL_IB_HCA names {name}, which is not there; there is {there}"
            fix = "nccl.hca=[NAME,NAME]   (and no NCCL_IB_HCA in the environment)"
            yield Finding(host=host, what="RDMA", reason=reason, tries=(fix,), config=True)
        for port in fits:
            if not port.up:
                reason = f"port {_label(port)} is {_state(port)}, and NCCL_IB_HCA names it"
                tries = ("ibstat   (there: cable, switch, subnet manager)", "nccl.hca=[NAME,NAME]   (without it)")
                yield Finding(host=host, what="RDMA", reason=reason, tries=tries)


def _state(port: Port) -> str:
    return " / ".join(filter(None, (port.state, port.phys_state))) or "not up"


def _gid_index(host: str, ports: Sequence[Port], variables: Mapping[str, str]) -> Iterator[Finding]:
    """NCCL_IB_GID_INDEX must name an address on every port that speaks RoCE."""
    given = variables.get("NCCL_IB_GID_INDEX", "")
    if not given.isdigit():
        return
    tries = ("nccl.gid_index=null   (NCCL 2.21 and newer choose it)", "show_gids   (there)")
    for port in ports:
        if port.kind == "roce" and int(given) not in {gid.index for gid in port.gids}:
            fits = [str(gid.index) for gid in port.gids if gid.kind == "RoCE v2" and gid.is_v4]
            there = f"RoCE v2 has {', '.join(fits)}" if fits else "it has no address of RoCE v2"
            reason = f"port {_label(port)} has no address at NCCL_IB_GID_INDEX={given}; {there}"
            yield Finding(host=host, what="RDMA", reason=reason, tries=tries, config=True)


def _kinds(plan: RunPlan, known: Fabrics, variables: Variables) -> Iterator[Finding]:
    """One kind of network for all: NCCL cannot speak InfiniBand here and sockets there."""
    ports = {name: usable(fabric, variables.get(name, {})) for name, fabric in known.items()}
    kinds = {name: {port.kind for port in found} for name, found in ports.items()}
    profile = plan.config.nccl.name
    wanted = (
        profile if profile in PROFILES else _commonest([kind for found in kinds.values() for kind in sorted(found)])
    )
    if wanted is None:
        return
    for name, found in kinds.items():
        if wanted in found:
            continue
        others = several([other for other in kinds if wanted in kinds[other]]) or "no host"
        because = f"nccl={profile}" if profile in PROFILES else f"{others} {'uses' if ',' not in others else 'use'}"
        if ports[name]:
            port = ports[name][0]
            reason = f"port {_label(port)} is {KINDS[port.kind]}, and {because} {_wanted(wanted, profile)}"
        else:
            why = _why_none(known[name].ports or (), variables.get(name, {}))
            reason = f"no port for {KINDS[wanted]} is up ({why}), and {because} {_wanted(wanted, profile)}"
        tries = ("ibstat   (there: cable, switch, subnet manager)", "nccl=tcp   (sockets on all hosts: slow)")
        yield Finding(host=name, what="RDMA", reason=reason, tries=tries)


def _why_none(ports: Sequence[Port], variables: Mapping[str, str]) -> str:
    if _is_off(variables):
        return ", ".join(f"{name}={variables[name]}" for name in ("NCCL_IB_DISABLE", "NCCL_NET") if name in variables)
    return several([f"{_label(port)} is {_state(port)}" for port in ports]) or "it has no RDMA card"


def _wanted(kind: str, profile: str) -> str:
    return f"wants {KINDS[kind]}" if profile in PROFILES else f"{KINDS[kind]}"


def _commonest(kinds: Sequence[str]) -> str | None:
    return Counter(kinds).most_common(1)[0][0] if kinds else None
