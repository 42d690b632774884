"""Which of the known hosts and slots a run uses: include, exclude, nodes, gpus."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Sequence
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.planning.ranges import expand_name
from launcher.spec import Host

SHOWN = 8  # of long lists of hosts


class _Bad(Exception):
    """One piece of a filter is wrong; carries what to say and what to type."""

    def __init__(self, text: str, *tries: str) -> None:
        super().__init__(text)
        self.tries = tries


def filter_hosts(hosts: Sequence[Host], include: str | None, exclude: str | None) -> tuple[Host, ...]:
    """Keep or drop hosts and slots by DeepSpeed's syntax, `NAME[:SLOT[,SLOT]]@NAME`; file order stays."""
    if include and exclude:
        text = f"cluster.include={include} and cluster.exclude={exclude} exclude each other"
        raise ConfigError(Problem(text, "", ("cluster.exclude=null", "cluster.include=null")))
    key, spec = ("cluster.include", include) if include else ("cluster.exclude", exclude)
    if not spec:
        return tuple(hosts)
    named = _read_filter(hosts, key, spec)
    kept = []
    for host in hosts:
        slots = named.get(host.name)
        if include:
            gpus = tuple(g for g in host.gpus if slots is not None and g in slots)
        else:
            gpus = tuple(g for g in host.gpus if slots is None or g not in slots)
        if gpus:
            kept.append(host.taking({gpu: gpu for gpu in gpus}))
    if not kept:
        text = f"{key}={spec} leaves no host of {names(hosts)}"
        raise ConfigError(Problem(text, "", (f"{key}=null",)))
    return tuple(kept)


def take_nodes(hosts: Sequence[Host], nodes: int | None, where: str) -> tuple[Host, ...]:
    """The first `nodes` hosts, all without a number; more than there are is an error that lists them."""
    if nodes is None:
        return tuple(hosts)
    if nodes > len(hosts):
        plural = "host" if len(hosts) == 1 else "hosts"
        text = f"nodes={nodes}, but {where} has {len(hosts)} {plural}: {names(hosts)}"
        raise ConfigError(Problem(text, "", (f"nodes={len(hosts)}", "cluster.hostfile=FILE with more hosts")))
    return tuple(hosts[:nodes])


def limit_gpus(hosts: Sequence[Host], gpus: Any) -> tuple[Host, ...]:
    """Each host with its first `gpus` slots (a count) or exactly these slots (a list)."""
    if gpus is None:
        return tuple(hosts)
    limited, lacking = [], []
    for host in hosts:
        chosen = host.gpus[:gpus] if isinstance(gpus, int) else tuple(g for g in host.gpus if g in gpus)
        if len(chosen) < len(slots_of(gpus)):
            lacking.append(host)
        limited.append(host.taking({gpu: gpu for gpu in chosen}))
    if lacking:
        fewest = min(lacking, key=lambda host: host.slots)
        others = f"; too few also on {names([h for h in lacking if h != fewest])}" if len(lacking) > 1 else ""
        text = f"gpus={render_gpus(gpus)}, but {fewest.name} has {_slots(fewest)}{others}"
        raise ConfigError(Problem(text, "", (f"gpus={fewest.slots}",)))
    return tuple(limited)


def names(hosts: Sequence[Host]) -> str:
    """Names of the hosts, of many the first ones."""
    return ", ".join(host.name for host in hosts[:SHOWN]) + (" ..." if len(hosts) > SHOWN else "")


def slots_of(gpus: Any) -> tuple[int, ...]:
    """Slot numbers that `gpus=` names on a host which has them all."""
    return tuple(range(gpus)) if isinstance(gpus, int) else tuple(sorted(gpus))


def render_gpus(gpus: Any) -> str:
    """The value of `gpus=` as it is typed."""
    return f"[{','.join(map(str, gpus))}]" if isinstance(gpus, list | tuple) else str(gpus)


def _read_filter(hosts: Sequence[Host], key: str, spec: str) -> dict[str, set[int]]:
    """Host name -> slots that the filter names."""
    pool = {host.name: host for host in hosts}
    named: dict[str, set[int]] = {}
    problems = []
    for token in _split_tokens(spec, hosts):
        try:
            host, slots = _read_token(token, pool)
            named.setdefault(host.name, set()).update(slots)
        except _Bad as bad:
            tries = tuple(_quoted(key, t) for t in bad.tries) or (_quoted(key, "worker-1@worker-2:0,1"),)
            problems.append(Problem(f"{key}={spec}: {bad}", "", tries))
    if problems:
        raise ConfigError(*problems)
    return named


def _split_tokens(spec: str, hosts: Sequence[Host]) -> list[str]:
    """Split at `@`, but keep `user@host` together where the hostfile has that user at that host."""
    users = {f"{host.user}@{host.name}" for host in hosts if host.user}
    tokens: list[str] = []
    for piece in spec.split("@"):
        joined = f"{tokens[-1]}@{piece}" if tokens else ""
        if joined and any(joined == u or joined.startswith(u + ":") for u in users):
            tokens[-1] = piece
        else:
            tokens.append(piece)
    return tokens


def _read_token(token: str, pool: dict[str, Host]) -> tuple[Host, set[int]]:
    if token in pool:
        return pool[token], set(pool[token].gpus)
    name, colon, slots = token.rpartition(":")
    if not colon or name not in pool:
        if "," in token and not colon:
            raise _Bad(f"hosts are separated by @, not by commas: {token}", token.replace(",", "@"))
        if token != token.strip() or not token:
            raise _Bad(f"no blanks and no empty names round @: {token!r}", "@".join(list(pool)[:2]))
        unknown = token if token.count(":") != 1 else token.partition(":")[0]
        raise _Bad(f"no host {unknown}; known are {names(list(pool.values()))}", "@".join(_meant(unknown, list(pool))))
    host = pool[name]
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", slots):
        span = re.fullmatch(r"([0-9]{1,4})-([0-9]{1,4})", slots)
        inside = [gpu for gpu in host.gpus if span and int(span[1]) <= gpu <= int(span[2])]
        tried = f"{name}:{_join(inside or host.gpus[:2])}"
        raise _Bad(f"slots of {name} are numbers with commas, not {slots!r}", tried)
    numbers = {int(slot) for slot in slots.split(",")}
    for slot in sorted(numbers - set(host.gpus)):
        raise _Bad(f"slot {slot} of {name}, which has {_slots(host)}", f"{name}:{_join(host.gpus)}")
    return host, numbers


def _meant(unknown: str, pool: Sequence[str]) -> list[str]:
    """Hosts that a name which is none of theirs stands for, at best."""
    of_lower = {name.lower(): name for name in pool}
    try:
        listed = [of_lower[name] for name in expand_name(unknown.lower()) if name in of_lower]
    except ValueError:
        listed = []
    listed = listed or [of_lower[name] for name in fnmatch.filter(of_lower, unknown.lower())]
    return listed or difflib.get_close_matches(unknown, pool, n=1) or list(pool[:2])


def _slots(host: Host) -> str:
    plural = "slot" if host.slots == 1 else "slots"
    return f"{host.slots} {plural}: {_join(host.gpus)}"


def _join(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _quoted(key: str, value: str) -> str:
    """The override as typed in a shell: Hydra reads an unquoted comma as a sweep."""
    return f"{key}={value}" if "," not in value else f"'{key}=\"{value}\"'"
