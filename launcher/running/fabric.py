"""The networks and GPU links of a plan's hosts: asked there, or seen here, and what follows for the plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher.errors import Problem
from launcher.planning.fabric import Fabric, from_probe
from launcher.planning.nccl_plan import SOURCE, completed
from launcher.running import fabric_probe, probe
from launcher.running.addresses import interface_variables
from launcher.running.crew import GiveUp, never
from launcher.running.fabric_checks import fabric_findings, fabric_oddities
from launcher.running.findings import Finding, several
from launcher.running.nodechannel import NodeChannel
from launcher.running.panel import Panel
from launcher.running.transport import Channel
from launcher.spec import RunPlan

PROGRAM = "fabric_probe"
# Variables that decide which libraries and files of settings NCCL reads.
DECIDING = ("LD_LIBRARY_PATH", "LD_PRELOAD", "NCCL_CONF_FILE", "NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "DS_ENV_FILE")


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """A plan with what its hosts' networks call for, and what is in the way."""

    plan: RunPlan
    findings: tuple[Finding, ...]  # of hosts
    problems: tuple[Problem, ...]  # of the configuration
    notes: tuple[str, ...]


def join(plan: RunPlan, fabrics: Mapping[str, Fabric], interfaces: Mapping[str, str]) -> Joined:
    """Variables that suit the hosts, with their reasons; `interfaces`: host -> that by which it reaches the others."""
    done = completed(_with_interfaces(plan, interfaces), fabrics, interfaces)
    whole = done.plan
    variables = {host.name: {**whole.env, **whole.host_env.get(host.name, {})} for host in whole.hosts}
    findings = [
        Finding(host=host, what="NCCL", reason=_reason(one.text, one.where), tries=one.tries, config=not one.machine)
        for one in done.found
        for host in one.hosts
    ]
    findings += fabric_findings(whole, fabrics, variables)
    faulty = {row.host for row in findings}
    sound = {host: fabric for host, fabric in fabrics.items() if host not in faulty}
    odd = [text for text in fabric_oddities(whole, sound, variables) if text not in whole.warnings]
    return Joined(
        plan=replace(whole, warnings=(*whole.warnings, *odd)),
        findings=tuple(findings),
        problems=tuple(one.problem() for one in done.found if not one.hosts),
        notes=(*done.notes, *_told(whole)),
    )


def _with_interfaces(plan: RunPlan, interfaces: Mapping[str, str]) -> RunPlan:
    """The plan with what keeps each host's ranks on its interface."""
    env = {name: dict(variables) for name, variables in plan.host_env.items()}
    for host in plan.hosts:
        own = interface_variables(plan, host, interfaces.get(host.name, ""))
        env[host.name] = {**env.get(host.name, {}), **own}
    return replace(plan, host_env={host: variables for host, variables in env.items() if variables})


def _told(plan: RunPlan) -> list[str]:
    """Variables with their reasons: the planner's for every rank, and each host's interface."""
    values: dict[tuple[str, str], list[str]] = {}
    for host in plan.hosts if plan.device == "cuda" else ():
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            value = plan.host_env.get(host.name, {}).get(name)
            if value is not None:
                values.setdefault((name, value), []).append(host.name)
    every = {(name, value): list[str]() for name, value in plan.env.items() if plan.env_sources.get(name) == SOURCE}
    lines = []
    for (name, value), hosts in {**every, **values}.items():
        whose = f"{several(hosts)}: " if hosts and len(hosts) < len(plan.hosts) else ""
        why = plan.env_reasons.get(name)
        lines.append(f"{whose}{name}={value}" + (f" ({why})" if why else ""))
    return lines


def _reason(text: str, where: str) -> str:
    return f"{text} ({where})" if where else text


def ask_fabrics(
    plan: RunPlan,
    channels: Mapping[str, Channel | NodeChannel],
    looks: Mapping[str, Any],
    *,
    give_up: GiveUp = never,
) -> dict[str, Fabric]:
    """Host -> its fabric, with the addresses of its look; without a host that has fallen silent meanwhile."""
    panel = Panel(channels, give_up)
    message = {"do": "fabric", "cwd": os.getcwd(), "path": _search_path(plan.env), **_about(plan.env)}
    told = panel.start(message, plan.config.cluster.connect_s, PROGRAM)
    panel.end()
    return {host: with_addresses(data, looks[host]["addresses"]) for host, data in told.items()}


def local_fabric(env: Mapping[str, str], cwd: str) -> Fabric:
    """This machine's, for ranks with these variables."""
    message = {"cwd": cwd, "path": _search_path(env), **_about(env)}
    told = fabric_probe.tried(fabric_probe.fabric, message)
    return with_addresses(told, probe.tried(probe.addresses))


def with_addresses(data: Any, addresses: Any) -> Fabric:
    """What the probe of fabrics told, and to each interface the addresses that the other probe saw."""
    if not isinstance(data, Mapping):
        return Fabric()
    known = addresses if isinstance(addresses, list) else []
    interfaces = [
        {**one, "addresses": [a["address"] for a in known if a["interface"] == one["name"]]}
        for one in data.get("interfaces") or ()
    ]
    return from_probe({**data, "interfaces": interfaces if data.get("interfaces") is not None else None})


def deciding(env: Mapping[str, str]) -> dict[str, str]:
    """Those of a plan's variables that decide what NCCL reads."""
    return {name: env[name] for name in DECIDING if name in env}


def _about(env: Mapping[str, str]) -> dict[str, Any]:
    return {"env": deciding(env), "names": [name for name in env if fabric_probe.NAMES.fullmatch(name)]}


def _search_path(env: Mapping[str, str]) -> list[str]:
    """Where ranks look for modules first: PYTHONPATH as they get it."""
    return [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
