"""The choice of NCCL's variables as a part of a plan: before hosts are asked, and with what they told. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.errors import ConfigError
from launcher.planning.environ import Declared
from launcher.planning.fabric import Fabric
from launcher.planning.nccl import KEYS, NcclChoice, choose, scene_of, undo
from launcher.planning.nccl_lint import (
    Found,
    Given,
    deepspeed_files,
    forced,
    given_by_user,
    given_on_hosts,
    lint,
    versions,
)
from launcher.planning.nccl_rules import ERROR, Scene
from launcher.planning.placement import Placement
from launcher.spec import NcclConfig, RunConfig, RunPlan

SOURCE = "nccl"  # in RunPlan.env_sources


@dataclass(frozen=True, kw_only=True, slots=True)
class Completed:
    """A plan with what the hosts' networks told, and what was found."""

    plan: RunPlan
    found: tuple[Found, ...]
    notes: tuple[str, ...]


def at_plan(config: RunConfig, declared: Declared, placement: Placement, fabric: Fabric | None = None) -> NcclChoice:
    """The choice before other hosts are asked; ConfigError for variables that are known to do harm.

    `fabric`: this machine's, when it alone runs the ranks; the others' networks are seen by a preflight.
    """
    hosts = placement.hosts
    fabrics = {hosts[0].name: fabric} if fabric is not None and placement.transport == "local" else {}
    choice = choose(config, fabrics, hosts=hosts, device=placement.device, env=declared.env)
    given = given_by_user(declared.env, declared.sources, config.env.file)
    scene = scene_of(fabrics, hosts)
    choice = _linted(choice, config.nccl, given, scene, placement.device)
    mine = [one for one in choice.errors if not one.machine]
    if mine:
        raise ConfigError(*(one.problem() for one in mine))
    found = forced(choice.found)  # a machine that must be mended keeps no plan from being shown
    env = {**choice.env, **choice.host_env.get(hosts[0].name, {})}
    return dataclasses.replace(choice, env=env, host_env={}, found=tuple(found))


def completed(plan: RunPlan, fabrics: Mapping[str, Fabric], interfaces: Mapping[str, str]) -> Completed:
    """The plan with variables that suit its hosts; `interfaces`: host -> the one by which it reaches the others.

    What the hosts call for goes to `host_env`, also where it is alike on all: a node that plans for itself gets that.
    """
    user = {name: value for name, value in plan.env.items() if plan.env_sources.get(name) not in ("launcher", SOURCE)}
    config = plan.config
    choice = choose(config, fabrics, hosts=plan.hosts, device=plan.device, env=user, interfaces=interfaces)
    given = given_by_user(user, plan.env_sources, config.env.file)
    given += given_on_hosts(fabrics, plan.env, plan.transport)
    scene = scene_of(fabrics, plan.hosts)
    choice = _linted(choice, config.nccl, given, scene, plan.device, _unknown(fabrics))
    found = list(choice.found)
    if plan.device == "cuda" and plan.world_size > 1:
        found += [*versions(fabrics), *deepspeed_files(fabrics, plan.transport)]
    host_env = {
        host.name: {
            **{name: value for name, value in choice.host_env.get(host.name, {}).items() if name not in plan.env},
            **plan.host_env.get(host.name, {}),
        }
        for host in plan.hosts
    }
    said = set(plan.warnings)
    finished = dataclasses.replace(
        plan,
        host_env={host: variables for host, variables in host_env.items() if variables},
        env_reasons={**plan.env_reasons, **choice.reasons, **_routes(plan, host_env)},
        warnings=(*plan.warnings, *(w.sentence() for w in found if w.level != ERROR and w.sentence() not in said)),
    )
    return Completed(plan=finished, found=tuple(one for one in found if one.level == ERROR), notes=choice.notes)


def _linted(
    choice: NcclChoice,
    nccl: NcclConfig,
    given: Sequence[Given],
    scene: Scene,
    device: str,
    unknown: Mapping[str, str] | None = None,
) -> NcclChoice:
    """The choice, with what is known of each variable that a person set, by a key of ours or otherwise."""
    if device != "cuda":
        given = [one for one in given if one.name.startswith("GLOO_")]
    keys = {
        key: Given(name=name, value=choice.env[name], where=f"nccl.{key}", undo=undo(key))
        for name, key in KEYS.items()
        if name in choice.env
    }
    found = [*lint(keys.values(), scene), *lint(given, scene, unknown)]
    return dataclasses.replace(choice, found=(*choice.found, *(forced(found) if nccl.force else found)))


def _unknown(fabrics: Mapping[str, Fabric]) -> dict[str, str] | None:
    """Name -> the library that lacks it; None when no host could tell."""
    told = [fabric for fabric in fabrics.values() if fabric.unknown is not None]
    if not told:
        return None
    return {name: f"NCCL {fabric.nccl_version or ''}".rstrip() for fabric in told for name in fabric.unknown or ()}


def _routes(plan: RunPlan, host_env: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Why each host's ranks are kept on an interface, which the preflight has chosen already."""
    listed = any(host.iface for host in plan.hosts)
    reason = "iface= of the hostfile, else " if listed else ""
    return {
        name: f"{reason}the interface whose route reaches the other hosts"
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
        if name not in plan.env and any(name in variables for variables in host_env.values())
    }
