"""Hostfile text -> hosts, and hosts -> text that DeepSpeed reads too.

The grammar is DeepSpeed's (`NAME slots=N`, one host a line, `#` comments) with optional fields behind:
`user= port= addr= iface= weight= gpus=0,1`. What DeepSpeed skips in silence is an error with file and line.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Iterator, Sequence
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.planning.ranges import expand_name
from launcher.spec import Host

FORM = "worker-1 slots=8"
FIELDS = ("slots", "gpus", "user", "port", "addr", "iface", "weight")

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_IFACE = re.compile(r"[!-~]+")


class _Bad(Exception):
    """One line is wrong; carries what to say and what to type."""

    def __init__(self, text: str, *tries: str) -> None:
        super().__init__(text)
        self.tries = tries


def parse_hostfile(text: str, where: str) -> tuple[Host, ...]:
    """Hosts in file order; every bad line is one problem of a single ConfigError. `where` names the file."""
    problems: list[Problem] = []
    found: list[tuple[int, Host]] = []
    lines = re.split(r"\r\n|\n", text.removeprefix("\ufeff"))
    for number, line in enumerate(lines, start=1):
        try:
            found.extend((number, host) for host in _parse_line(line))
        except _Bad as bad:
            problems.append(_problem(where, number, line, str(bad), *(bad.tries or (_corrected(line),))))
    weighted = [(number, host) for number, host in found if host.weights or isinstance(host.weight, float)]
    if weighted and any(host.weight == "auto" for _, host in found):
        number, why = weighted[0][0], "weight=auto measures all ranks of a run, and another line has numbers"
        problems.append(_problem(where, number, lines[number - 1], why, "weight=auto on every line that has a weight"))
    for number, why in _duplicates(found):
        problems.append(_problem(where, number, lines[number - 1], why, f"remove line {number}"))
    if not found and not problems:
        problems.append(Problem("the hostfile names no host", where, (f"a line such as  {FORM}",)))
    if problems:
        raise ConfigError(*problems, title="with the hosts")
    return tuple(host for _, host in found)


def render_hosts(hosts: Sequence[Host]) -> str:
    """Text that `parse_hostfile` reads back to the same hosts, and DeepSpeed to the same names and slots."""
    return "".join(_render_host(host) + "\n" for host in hosts)


def contiguous(host: Host) -> bool:
    """Whether the host's GPUs are slots 0, 1, 2 ... as `slots=N` alone says."""
    return host.gpus == tuple(range(host.slots))


def is_loopback(name: str) -> bool:
    """Whether `name` always means the machine that reads it."""
    if name.lower() in ("localhost", "localhost.localdomain", "ip6-localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _problem(where: str, number: int, line: str, why: str, *tries: str) -> Problem:
    return Problem(f"{why}\n{_shown(line)}", f"{where}:{number}", tries)


def _corrected(line: str) -> str:
    """The line with each misspelt field as it is spelled, else a whole one with its host, as far as it has one."""
    line = re.sub(r"(\s[a-z]+)\s*[:=]\s*(?=[0-9])", r"\1=", line.partition("#")[0])  # slots = 4, slots:4
    target, *words = line.split() or [""]
    target = target.rstrip(":,")
    if not all(_NAME.fullmatch(part) for part in target.split("@")):
        return FORM
    near = [difflib.get_close_matches(word.partition("=")[0], FIELDS, n=1) for word in words]
    mended = [f"{key[0]}={word.partition('=')[2]}" for key, word in zip(near, words, strict=False) if key]
    text = " ".join([target, *mended])
    try:
        _parse_line(text)
    except _Bad:
        return f"{target} slots=8"
    return text


def _shown(line: str) -> str:
    """The line with what cannot be seen, or would move the cursor, spelled out."""
    text = line.strip().replace("\t", " ")
    return "".join(char if " " <= char <= "~" else f"<U+{ord(char):04X}>" for char in text[:100])


def _parse_line(line: str) -> list[Host]:
    content = re.sub(r"(^|\s)#.*", "", line).strip(" \t\r")
    if not content:
        return []
    for char in content:
        if char not in "\t" and not " " <= char <= "~":
            name = f"U+{ord(char):04X}"
            raise _Bad(f"character {name} ({char!r}) is not plain ASCII; blanks are space or tab, digits are 0-9")
    if ";" in content:
        raise _Bad("one host a line, without `;`", "one line for each host")
    if re.search(r"\s=|=\s", content):
        raise _Bad("no spaces round `=`")
    target, *words = content.split()
    if "=" in target:
        raise _Bad(f"the host name comes first, and {target} is a field")
    fields = _read_fields(words)
    user, name = _split_user(target)
    if user and "user" in fields:
        raise _Bad(f"two user names: {user} before the host, {fields['user']} in user=")
    user = user or fields.get("user")
    if user is not None and not _USER.fullmatch(user):
        raise _Bad(f"user {user} is no user name")
    counted = re.fullmatch(r"([^:\[\]]+):([0-9]+)", name)
    if counted and not {"slots", "gpus"} & fields.keys():  # as mpirun has it
        raise _Bad(f"{name} has no slots=N", f"{counted[1]} slots={counted[2]}")
    names = _expand(name)
    if len(names) > 1 and "addr" in fields:
        raise _Bad(f"addr= names one machine, and {name} names {len(names)}", "one line for each host")
    gpus = _read_gpus(fields, names[0])
    return [
        Host(
            name=_check_name(one),
            gpus=gpus,
            address=_check_name(fields["addr"]) if "addr" in fields else None,
            port=_number(fields, "port", 1, 65535),
            user=user,
            iface=_matching(fields, "iface", _IFACE),
            **_weight(fields, gpus),
        )
        for one in names
    ]


def _read_fields(words: list[str]) -> dict[str, str]:
    fields: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise _Bad(f"{word} is no KEY=VALUE; fields are {', '.join(FIELDS)}")
        if key not in FIELDS:
            near = difflib.get_close_matches(key, FIELDS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise _Bad(f"unknown field {key}{hint} (fields are {', '.join(FIELDS)})")
        if key in fields:
            raise _Bad(f"{key}= stands twice")
        if not value:
            raise _Bad(f"{key}= has no value")
        fields[key] = value
    return fields


def _split_user(target: str) -> tuple[str | None, str]:
    user, at, name = target.rpartition("@")
    return (user if at else None), name


def _expand(name: str) -> list[str]:
    """node[01-04,7] -> node01 ... node04 node7; a bracketed IPv6 address loses its brackets."""
    address = re.fullmatch(r"\[([^\[\]]*:[^\[\]]*)\](:[0-9]+)?", name)
    if address is not None and address.group(2):
        port = address.group(2)[1:]
        raise _Bad("the ssh port has its own field", f"{address.group(1)} slots=8 port={port}")
    if address is not None:
        return [address.group(1)]
    try:
        return expand_name(name)
    except ValueError as error:
        raise _Bad(str(error), "node[01-04] slots=8", "node[1,3] slots=8") from None


def _check_name(name: str) -> str:
    if _is_address(name):
        address = ipaddress.ip_address(name)
        if address.is_unspecified or address.is_multicast or name == "255.255.255.255":
            raise _Bad(f"{name} is the address of no one machine")
        return name
    if re.fullmatch(r"[^:]+:[0-9]+", name):
        host, _, port = name.partition(":")
        raise _Bad(f"{name} is no host name; the ssh port has its own field", f"{host} slots=8 port={port}")
    if not _NAME.fullmatch(name) or ".." in name:
        raise _Bad(f"{name} is neither a host name nor an address")
    return name


def _read_gpus(fields: dict[str, str], name: str) -> tuple[int, ...]:
    slots = _number(fields, "slots", 1, 4096)
    if "gpus" not in fields:
        if slots is None:
            raise _Bad(f"{name} has no slots=N", f"{name} slots=8")
        return tuple(range(slots))
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", fields["gpus"]):
        raise _Bad(f"gpus={fields['gpus']} is no list of slot numbers", f"{name} slots=8 gpus=0,1")
    listed = [int(g) for g in fields["gpus"].split(",")]
    if len(set(listed)) < len(listed):
        raise _Bad(f"gpus={fields['gpus']} names a slot twice")
    gpus = tuple(sorted(listed))
    if slots is not None and gpus[-1] >= slots:
        raise _Bad(f"gpus={fields['gpus']}, but slots={slots} are numbered 0 to {slots - 1}")
    return gpus


def _number(fields: dict[str, str], key: str, low: int, high: int) -> int | None:
    value = fields.get(key)
    if value is None:
        return None
    if not re.fullmatch(r"-?[0-9]{1,9}", value):
        raise _Bad(f"{key}={value} is no whole number")
    if not low <= int(value) <= high:
        raise _Bad(f"{key}={value}, but {key} must be >= {low} and at most {high}")
    return int(value)


def shown_weight(host: Host) -> str | float | None:
    """What `weight=` says of a host."""
    return host.weight if host.weights is None else ",".join(map(str, host.weights))


def _weight(fields: dict[str, str], gpus: tuple[int, ...]) -> dict[str, Any]:
    value = fields.get("weight")
    if value is None or value == "auto":
        return {"weight": value}
    numbers = []
    for text in value.split(","):
        if not re.fullmatch(r"[0-9]*\.?[0-9]+(e-?[0-9]{1,2})?", text) or float(text) <= 0:
            raise _Bad(f"weight={value} is no number above 0", f"{FORM} weight=0.5", f"{FORM} weight=auto")
        numbers.append(float(text))
    if "," not in value:
        return {"weight": numbers[0]}
    if len(numbers) != len(gpus):
        ones = ",".join(["1"] * len(gpus))
        raise _Bad(
            f"weight={value} has {len(numbers)} numbers for {len(gpus)} GPUs", f"slots={len(gpus)} weight={ones}"
        )
    # In the order in which gpus= names them; the host has them sorted.
    named = [int(gpu) for gpu in fields["gpus"].split(",")] if "gpus" in fields else list(gpus)
    of = dict(zip(named, numbers, strict=True))
    return {"weights": tuple(of[gpu] for gpu in gpus)}


def _matching(fields: dict[str, str], key: str, pattern: re.Pattern[str]) -> str | None:
    value = fields.get(key)
    if value is not None and not pattern.fullmatch(value):
        raise _Bad(f"{key}={value} is no {key}")
    return value


def _duplicates(found: list[tuple[int, Host]]) -> Iterator[tuple[int, str]]:
    """Each later line that names a machine named before, and why."""
    seen: dict[str, tuple[int, Host, str]] = {}  # mark -> the first line that has it, and what it means
    for line, host in found:
        earlier = next((seen[mark] for mark in _looks_for(host) if mark in seen), None)
        if earlier is not None:
            why = earlier[2].format(earlier[1].name, host.name)
            yield line, f"lines {earlier[0]} and {line}: {why}"
        for mark, why in _marks(host).items():
            seen.setdefault(mark, (line, host, why))


def _marks(host: Host) -> dict[str, str]:
    """What no other machine of a file may have too -> how two that share it are told."""
    name, port = host.name.lower().rstrip("."), host.port or 22
    marks = {f"name {name}": "{1} twice"}
    if is_loopback(name):
        marks["loopback"] = "{0} and {1} are the same machine"
    for address in (name, host.address):
        if address is not None:  # two ports of one address may be two containers
            marks[f"at {_normal(address)} {port}"] = f"{{0}} and {{1}} have the same address, {address}"
    if not _is_address(name):
        label, dot, _ = name.partition(".")
        marks[f"{'full' if dot else 'short'} {label}"] = "{0} and {1} are the same machine by two names"
    return marks


def _looks_for(host: Host) -> list[str]:
    """Marks that an earlier host must not have: its own, but a short name beside its full one, not two full names."""
    other = {"full": "short", "short": "full"}
    marks = [mark.partition(" ") for mark in _marks(host)]
    return [f"{other.get(kind, kind)}{blank}{rest}" for kind, blank, rest in marks]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _normal(address: str) -> str:
    """One spelling for each address."""
    return str(ipaddress.ip_address(address)) if _is_address(address) else address.lower().rstrip(".")


def _render_host(host: Host) -> str:
    fields = [f"slots={max(host.gpus) + 1}"]
    if not contiguous(host):
        fields.append("gpus=" + ",".join(map(str, host.gpus)))
    optional: list[tuple[str, Any]] = [
        ("user", host.user),
        ("port", host.port),
        ("addr", host.address),
        ("iface", host.iface),
        ("weight", shown_weight(host)),
    ]
    fields += [f"{key}={value}" for key, value in optional if value is not None]
    return " ".join([host.name, *fields])
