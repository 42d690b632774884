"""The form of a row about a variable of NCCL or torch, and the conditions that rows are made of."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

ERROR, WARNING, NOTICE = "error", "warning", "notice"
ALGORITHMS = ("tree", "ring", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat")
PROTOCOLS = ("ll", "ll128", "simple")
FUNCTIONS = ("broadcast", "reduce", "allgather", "allgatherv", "reducescatter", "allreduce", "sendrecv")
RING_ONLY = ("broadcast", "allgather", "reducescatter")  # what ZeRO also calls, and trees cannot do


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What a variable's worth depends on; None = not known."""

    hosts: int = 1
    nccl: tuple[int, ...] | None = None  # the oldest version among the hosts
    rdma: bool | None = None  # a port of an RDMA card is active
    efa: bool = False  # the cards are AWS's, which a plugin drives in place of NCCL itself
    nvlink: bool | None = None  # GPUs of each host are all linked by NVLink
    interfaces: tuple[str, ...] = ()  # names on the hosts
    devices: tuple[str, ...] = ()  # RDMA devices on the hosts

    def since(self, *version: int) -> bool:
        """Whether NCCL is this or newer; torch 2.9, the oldest that runs here, brings 2.27."""
        return self.nccl is None or self.nccl >= version


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One row: which variable, when it matters, how much, why, what to write instead, and who says so."""

    name: str  # a regular expression over whole names
    level: str
    text: str  # goes on after NAME=VALUE
    when: Callable[[str, Scene], bool] = lambda value, scene: True
    instead: str | None = None  # value to write instead, or NAME=VALUE; None: leave it out
    source: str = "env"


def parsed(value: str, names: tuple[str, ...]) -> dict[str, frozenset[str]]:
    """What NCCL_ALGO or NCCL_PROTO allows by function, "" for those not named. ValueError for what NCCL refuses.

    Since 2.24: entries between semicolons, FUNCTION:LIST, of which the first may lack its function; a list between
    commas, all but which with ^ before it; no case; a separator too many is passed over, a blank is not (parseList in
    src/graph/tuning.cc).

    Example:
        >>> sorted(parsed("ring;allreduce:^ring", ("ring", "tree")).items())
        [('', frozenset({'ring'})), ('allreduce', frozenset({'tree'}))]
    """
    allowed: dict[str, frozenset[str]] = {}
    for place, entry in enumerate(value.lower().split(";")):
        if not entry and place:
            continue
        function, colon, listed = entry.rpartition(":")
        if colon and function not in FUNCTIONS:
            raise ValueError(f"{function} is no function")
        if not colon and place:
            raise ValueError(f"{entry} has no function")
        chosen = [name for name in listed.removeprefix("^").split(",") if name]
        odd = [name for name in chosen if name not in names] if chosen else ["nothing"]
        if odd:
            raise ValueError(f"{odd[0]} is none of {names}")
        allowed[function] = frozenset(names) - frozenset(chosen) if listed.startswith("^") else frozenset(chosen)
    return allowed


def _allowed(value: str, names: tuple[str, ...]) -> dict[str, frozenset[str]]:
    try:
        return parsed(value, names)
    except ValueError:
        return {}


def unreadable(names: tuple[str, ...]) -> Callable[[str, Scene], bool]:
    """A value that ends NCCL: an unknown algorithm, protocol or function; before 2.24 it was passed over."""
    return lambda value, scene: scene.since(2, 24) and not _allowed(value, names)


def without_ring(value: str, scene: Scene) -> bool:
    """Whether one of the collectives that only rings can do has none."""
    allowed = _allowed(value, ALGORITHMS)
    lists = [allowed.get(function, allowed.get("")) for function in RING_ONLY]
    return any(found is not None and "ring" not in found for found in lists)


def without_nvls(value: str, scene: Scene) -> bool:
    """Whether all-reduce may not go over NVLS."""
    allowed = _allowed(value, ALGORITHMS)
    listed = allowed.get("allreduce", allowed.get(""))
    return listed is not None and "nvls" not in listed


def names_ll128(value: str, scene: Scene) -> bool:
    """Whether LL128 is named, where NCCL would otherwise use it only where it is safe."""
    return any("ll128" in listed for listed in _allowed(value, PROTOCOLS).values()) and "^" not in value


def forces_ll128(value: str, scene: Scene) -> bool:
    """Whether nothing else is left, or it is named for GPUs that are joined by PCIe."""
    alone = any(listed == {"ll128"} for listed in _allowed(value, PROTOCOLS).values())
    return alone or (names_ll128(value, scene) and scene.nvlink is False)


def number(value: str) -> float | None:
    """A whole number as C reads it, where 022 is 18; None for anything else."""
    try:
        return float(int(value, 8 if re.fullmatch(r"[-+]?0[0-9]+", value) else 0))
    except ValueError:
        return None


def is_on(value: str, scene: Scene) -> bool:
    """1 and other numbers but 0; torch also takes words."""
    return (number(value) or 0) != 0 or value.lower() in ("true", "yes", "y", "t")


def is_off(value: str, scene: Scene) -> bool:
    """0; torch also takes words."""
    return number(value) == 0 or value.lower() in ("false", "no", "n", "f")


def is_one_of(*values: str) -> Callable[[str, Scene], bool]:
    """One of these words, in any case."""
    return lambda value, scene: value.lower() in values


def both(*conditions: Callable[[str, Scene], bool]) -> Callable[[str, Scene], bool]:
    """All of these hold."""
    return lambda value, scene: all(holds(value, scene) for holds in conditions)


def above(limit: float) -> Callable[[str, Scene], bool]:
    """A number above `limit`."""
    return lambda value, scene: (number(value) or 0) > limit


def is_no_number(value: str, scene: Scene) -> bool:
    """Text that NCCL passes over where it reads a number."""
    return number(value) is None


def names_in(value: str) -> tuple[str, list[str]]:
    """The mark (^, =, ^= or none) and the names of a list of interfaces or devices, ports left out."""
    found = re.match(r"\^?=?", value)
    mark = found.group() if found else ""
    return mark, [name.partition(":")[0] for name in value[len(mark) :].split(",") if name]


def fits_longer_names(of: str) -> Callable[[str, Scene], bool]:
    """Names that also stand for longer names, which are there."""

    def holds(value: str, scene: Scene) -> bool:
        mark, names = names_in(value)
        there: tuple[str, ...] = getattr(scene, of)
        return "=" not in mark and any(
            name in there and other != name and other.startswith(name) for name in names for other in there
        )

    return holds


UNREACHED = re.compile(r"lo$|docker|veth|virbr|cni|podman|lxc|br-[0-9a-f]{12}$")


def is_unreached(value: str, scene: Scene) -> bool:
    """Only interfaces that lead to no other host, while there are others."""
    mark, names = names_in(value)
    return scene.hosts > 1 and "^" not in mark and bool(names) and all(UNREACHED.match(name) for name in names)


def readmits_lo(value: str, scene: Scene) -> bool:
    """A list of what is left out that replaces the usual one, and lacks lo."""
    mark, names = names_in(value)
    return scene.hosts > 1 and "^" in mark and not any("lo".startswith(name) for name in names)
