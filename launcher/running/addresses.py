"""Where ranks meet, and by which interface each host talks: asked on the hosts, tried by calling."""

from __future__ import annotations

import random
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.planning.hosts import is_loopback
from launcher.running.findings import NAMED, Finding, several
from launcher.running.panel import Panel
from launcher.spec import Host, RunPlan

PORTS = range(20000, 32768)  # below the range from which Linux gives ports to outgoing connections
CALL_S = 3.0  # for a call to be answered; a lost first packet is sent again after 1 s
ASK_S = 15.0  # for a question about names or routes; a name server that is down takes 10 s
ALL_PAIRS = 8  # hosts up to which each calls each
VIRTUAL = re.compile(r"(docker|br-|virbr|veth|cni|flannel|cali|vxlan|podman|lxc|lxd|kube|tun|tap)")
LINK_LOCAL = ("169.254.", "fe80:")
Looks = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Met:
    """What was found: the place to meet, and by host its interface and its address there."""

    address: str
    port: int | None
    interfaces: dict[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


def meet_alone(plan: RunPlan, panel: Panel, address: str, look: Any = None) -> Met:
    """A port for the ranks of the only host, at an address that must be its own; `look`: to check interfaces too."""
    host = plan.hosts[0]
    told = panel.ask({host.name: _listening(plan.master_port, secrets.token_hex(8), address)}, ASK_S).get(host.name)
    found = list(_port_findings(plan, host.name, address, told))
    interface, finding = ("", None) if look is None else choose_interface(plan, host, look, "")
    given = interface and given_interface(plan, host)[0]  # without one, NCCL and gloo find their way on one machine
    return Met(
        address=address,
        port=_port(told),
        interfaces={host.name: interface} if given else {},
        findings=(*found, *([finding] if finding else [])),
    )


def meet(plan: RunPlan, panel: Panel, looks: Looks) -> Met:
    """An address and port of the first host that all others reach, and interfaces over which all hear one another."""
    first, others = plan.hosts[0], plan.hosts[1:]
    word = secrets.token_hex(8)
    names = {other.name: {"do": "resolve", "names": [first.name]} for other in others}
    told = panel.ask({first.name: _listening(plan.master_port, word, None), **names}, ASK_S)
    port = _port(told.get(first.name))
    candidates = candidates_of(plan, looks[first.name], {h.name: told.get(h.name) for h in others})
    if port is None:
        found = tuple(_port_findings(plan, first.name, "", told.get(first.name)))
        return Met(address=plan.master_addr, port=None, findings=found)
    targets = [[address, address, port, word] for address in candidates]
    calls = panel.ask({h.name: {"do": "dial", "targets": targets, "wait_s": CALL_S} for h in others}, ASK_S)
    met = [a for a in candidates if all(calls.get(h.name, {}).get(a) == {} for h in others)]
    if not met:
        found = (_unmet(plan, candidates, calls, port),)
        return Met(address=plan.master_addr, port=port, findings=found)
    interfaces, findings = _interfaces(plan, panel, looks, met[0])
    if not findings:
        findings = _hear_all(plan, panel, looks, interfaces, met[0])
    note = f"ranks meet at {met[0]} ({candidates[met[0]]}), reached from {_all(others)}; {_over(plan, interfaces)}"
    return Met(address=met[0], port=port, interfaces=interfaces, findings=tuple(findings), notes=(note,))


def candidates_of(plan: RunPlan, look: Any, resolved: Mapping[str, Any]) -> dict[str, str]:
    """Address of the first host -> where it comes from, the likeliest first."""
    first, given = plan.hosts[0], plan.config.cluster.master_addr
    if given is not None:
        return {given: "cluster.master_addr"}
    found: list[tuple[str, str]] = []
    if first.address is not None:
        found.append((first.address, "MASTER_ADDR" if plan.transport == "env" else "addr= of the hostfile"))
    for host, names in resolved.items():
        known = (names or {}).get(first.name)
        found += [(address, f"{first.name} as {host} knows it") for address in _v4_first(known)]
    found += [(address, "where ssh reached it") for address in look["ssh_address"]]
    own = _own(look)
    for fit in (_is_good, _is_virtual):
        found += [(a["address"], f"on {a['interface']}") for a in _sorted(own) if fit(a)]
        usable: dict[str, str] = {}
        for address, source in found:
            if not _is_local(address):
                usable.setdefault(address, source)
        if usable:
            return usable
    return {a["address"]: f"on {a['interface']}" for a in own if a["scope"] != "link"}  # all hosts on one machine


def _own(look: Any) -> list[Any]:
    return look["addresses"] if isinstance(look["addresses"], list) else []


def _v4_first(addresses: Any) -> list[str]:
    return sorted(addresses, key=lambda address: ":" in address) if isinstance(addresses, list) else []


def _sorted(own: Sequence[Any]) -> list[Any]:
    return sorted(own, key=lambda a: (not a["physical"], ":" in a["address"]))


def _is_good(address: Any) -> bool:
    return address["scope"] == "global" and (address["physical"] or not VIRTUAL.match(address["interface"]))


def _is_virtual(address: Any) -> bool:
    return address["scope"] == "global" and not _is_good(address)


def _is_local(address: str) -> bool:
    return is_loopback(address) or address.startswith(LINK_LOCAL)


def _listening(given: int | None, word: str, address: str | None) -> dict[str, Any]:
    ports = [given] if given is not None else random.sample(PORTS, 50)
    return {"do": "listen", "ports": ports, "word": word, "address": address}


def _port(told: Any) -> int | None:
    port: int | None = (told or {}).get("port")
    return port


def _port_findings(plan: RunPlan, host: str, address: str, told: Any) -> Iterator[Finding]:
    given = plan.master_port
    if told is None or "port" in told:
        return  # a host that fell silent has a row of its own
    reason, tries = told["failed"], ("cluster.master_port=null   (a free one is chosen)",)
    if told.get("what") != "port":
        reason = f"cluster.master_addr={address} is no address of {host}: {reason}"
        yield Finding(host=host, what="address", reason=reason, tries=("cluster.master_addr=null",), config=True)
    elif given is None:
        yield Finding(host=host, what="port", reason=f"no port from {PORTS[0]} to {PORTS[-1]} is free: {reason}")
    else:
        taken = f"is taken on {host}" if reason == "Address already in use" else f"cannot be used: {reason}"
        reason = f"cluster.master_port={given} {taken}"
        yield Finding(host=host, what="port", reason=reason, tries=tries, config=True)


def _unmet(plan: RunPlan, candidates: Mapping[str, str], calls: Looks, port: int) -> Finding:
    """No address is reached by all: each with who does not, and why."""
    first, others = plan.hosts[0].name, [host.name for host in plan.hosts[1:]]
    lines = []
    for address, source in candidates.items():
        whys: dict[str, list[str]] = {}
        for host in others:
            answer = calls.get(host, {}).get(address, {"failed": "no answer"})
            if "failed" in answer:
                whys.setdefault(answer["failed"], []).append(host)
        lines.append(f"{address} ({source}): " + "; ".join(f"{why} from {several(h)}" for why, h in whys.items()))
    reason = "\n".join([f"no address of it is reached at port {port} by all others", *lines])
    given = plan.config.cluster.master_addr is not None
    tries = (
        "cluster.master_addr=null   (one is looked for)" if given else "cluster.master_addr=ADDRESS",
        f"addr=ADDRESS in the line of {first} in the hostfile",
        "let the hosts reach all TCP ports of one another   (firewall)",
    )
    return Finding(host=first, what="address", reason=reason, tries=tries, config=given)


def _interfaces(plan: RunPlan, panel: Panel, looks: Looks, address: str) -> tuple[dict[str, str], list[Finding]]:
    """By which interface each host sends to the first, and the first to the others."""
    first, others = plan.hosts[0], plan.hosts[1:]
    routes = panel.ask({h.name: {"do": "route", "to": [address]} for h in others}, ASK_S)
    sources = [answer[address]["source"] for answer in routes.values() if "source" in answer[address]]
    back = panel.ask({first.name: {"do": "route", "to": sources}}, ASK_S).get(first.name, {})
    own = [a["interface"] for a in _own(looks[first.name]) if a["address"] == address]
    used = Counter(route["interface"] for route in back.values() if "interface" in route)
    found = {first.name: own[0] if own and (own[0] in used or not used) else next(iter(used or own), "")}
    found |= {host: answer[address].get("interface", "") for host, answer in routes.items()}
    findings = []
    for host in plan.hosts:
        interface, finding = choose_interface(plan, host, looks[host.name], found.get(host.name, ""))
        found[host.name] = interface
        findings += [finding] if finding else []
    return found, findings


def given_interface(plan: RunPlan, host: Host) -> tuple[str | None, str]:
    """The interface that the configuration names for a host, and how it does: its line of the hostfile counts first."""
    if host.iface is not None:
        return host.iface, f"iface={host.iface} of the hostfile"
    return plan.config.nccl.interface, f"nccl.interface={plan.config.nccl.interface}"


def choose_interface(plan: RunPlan, host: Host, look: Any, routed: str) -> tuple[str, Finding | None]:
    """The interface that the configuration, else the environment, else the route names; it must be there."""
    there = list(dict.fromkeys(a["interface"] for a in _own(look)))
    listed = f"there are {', '.join(there)}"
    given, source = given_interface(plan, host)
    if given is not None:
        tries = ("iface=NAME",) if host.iface is not None else ("nccl.interface=null   (one is chosen)", "iface=NAME")
        reason = f"{source} is not up there or has no address; {listed}"
        row = Finding(host=host.name, what="interface", reason=reason, tries=tries, config=True)
        return given, row if given not in there else None
    chosen = routed
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = plan.env.get(name)
        if not value or (name.startswith("NCCL") and plan.device != "cuda"):
            continue
        fits = [one for one in there if (one == value if name.startswith("GLOO") else nccl_fits(value, one))]
        if not fits:
            tries = (f"iface=NAME in the line of {host.name} in the hostfile", f"unset {name}   (one is chosen)")
            reason = f"{name}={value} fits no interface; {listed}"
            return chosen, Finding(host=host.name, what="interface", reason=reason, tries=tries, config=True)
        chosen = routed if routed in fits else fits[0]
    return chosen, None


def interface_variables(plan: RunPlan, host: Host, interface: str) -> dict[str, str]:
    """Variables that keep a host's ranks on an interface, unless the user's own do. NCCL takes `=` for a whole name."""
    wanted = {
        "GLOO_SOCKET_IFNAME": interface,
        **({"NCCL_SOCKET_IFNAME": f"={interface}"} if plan.device == "cuda" else {}),
    }
    return {name: value for name, value in wanted.items() if interface and (host.iface or name not in plan.env)}


def nccl_fits(value: str, interface: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME=value lets NCCL use an interface: prefixes, `=` exact names, `^` all but these.

    Example:
        >>> nccl_fits("eth", "eth0"), nccl_fits("=eth", "eth0"), nccl_fits("^lo,docker", "docker0")
        (True, False, False)
    """
    mark, names = (value[0], value[1:]) if value[0] in "^=" else ("", value)
    if mark == "^" and names.startswith("="):
        return interface not in names[1:].split(",")
    listed = any(interface == name if mark == "=" else interface.startswith(name) for name in names.split(","))
    return listed != (mark == "^")


def _hear_all(plan: RunPlan, panel: Panel, looks: Looks, interfaces: Mapping[str, str], address: str) -> list[Finding]:
    """Whether hosts reach one another at ports that no firewall knows, over the interfaces that ranks will use."""
    words = {host.name: secrets.token_hex(8) for host in plan.hosts}
    ears = panel.ask({h: {"do": "listen", "ports": [0], "word": w, "address": None} for h, w in words.items()}, ASK_S)
    at = {host: address_on(looks[host], interface, address) for host, interface in interfaces.items()}
    messages: dict[str, Any] = {}
    for caller, callees in pairs([host.name for host in plan.hosts]).items():
        targets = [[h, at[h], ears[h]["port"], words[h]] for h in callees if at[h] and "port" in ears.get(h, {})]
        messages[caller] = {"do": "dial", "targets": targets, "wait_s": CALL_S}
    calls = panel.ask(messages, ASK_S)
    failed: dict[tuple[str, str], list[str]] = {}
    for caller, answers in calls.items():
        for callee, answer in answers.items():
            if "failed" in answer:
                failed.setdefault((callee, answer["failed"]), []).append(caller)
    tries = (
        "let the hosts reach all TCP ports of one another   (firewall)",
        "iface=NAME in its line of the hostfile   (another network)",
    )
    return [
        Finding(
            host=callee,
            what="network",
            reason=f"{several(callers)} cannot reach it at {at[callee]} ({interfaces[callee]}), at a high port: {why}",
            tries=tries,
        )
        for (callee, why), callers in failed.items()
    ]


def address_on(look: Any, interface: str, like: str) -> str | None:
    """A host's address on an interface, of the family of another address if it has one."""
    own = [a["address"] for a in _own(look) if a["interface"] == interface and a["scope"] != "link"]
    return next((a for a in own if (":" in a) == (":" in like)), next(iter(own), None))


def pairs(hosts: Sequence[str]) -> dict[str, list[str]]:
    """Who calls whom: each each while they are few, else the first all, all the first, and neighbours in a ring."""
    if len(hosts) <= ALL_PAIRS:
        return {caller: [other for other in hosts if other != caller] for caller in hosts}
    found = {hosts[0]: list(hosts[1:])}
    for number, host in enumerate(hosts[1:], start=1):
        near = (hosts[0], hosts[number - 1], hosts[(number + 1) % len(hosts)])
        found[host] = [other for other in dict.fromkeys(near) if other != host]
    return found


def _all(others: Sequence[Host]) -> str:
    return several([host.name for host in others]) if len(others) <= NAMED else f"all {len(others)} others"


def _over(plan: RunPlan, interfaces: Mapping[str, str]) -> str:
    by: dict[str, list[str]] = {}
    for host in plan.hosts:
        by.setdefault(interfaces.get(host.name) or "any interface", []).append(host.name)
    if len(by) == 1:
        return f"they talk over {next(iter(by))}"
    return "they talk over " + ", ".join(f"{interface} on {several(hosts)}" for interface, hosts in by.items())
