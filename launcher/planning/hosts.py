"""Hostfile text -> hosts, and hosts -> text that DeepSpeed reads too.

The grammar is DeepSpeed's (`NAME slots=N`, one host a line, `#` comments) with optional fields behind:
`user= port= addr= iface= weight= gpus=0,1`. What DeepSpeed skips in silence is an error with file and line.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Sequence
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.spec import Host

FORM = "worker-1 slots=8"
FIELDS = ("slots", "gpus", "user", "port", "addr", "iface", "weight")
MAX_RANGE = 4096

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_IFACE = re.compile(r"[!-~]+")
_RANGE = re.compile(r"\[([^\[\]]*)\]")


class _Bad(Exception):
    """One line is wrong; carries what to say and what to type."""

    def __init__(self, text: str, *tries: str) -> None:
        super().__init__(text)
        self.tries = tries


def parse_hostfile(text: str, where: str) -> tuple[Host, ...]:
    """Hosts in file order; every bad line is one problem of a single ConfigError. `where` names the file."""
    problems: list[Problem] = []
    found: list[tuple[int, Host]] = []
    for number, line in enumerate(re.split(r"\r\n|\n", text.removeprefix("\ufeff")), start=1):
        try:
            found.extend((number, host) for host in _parse_line(line))
        except _Bad as bad:
            problems.append(Problem(str(bad), f"{where}:{number}", bad.tries or (FORM,)))
    problems.extend(_duplicates(found, where))
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
            weight=_weight(fields),
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
    match = _RANGE.search(name)
    if match is None:
        return [name]
    before, after, inside = name[: match.start()], name[match.end() :], match.group(1)
    if ":" in inside and not before and not after:
        return [inside]
    items: list[str] = []
    for piece in inside.split(","):
        span = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", piece)
        if span is None:
            raise _Bad(f"[{inside}] is no range", "node[01-04] slots=8", "node[1,3] slots=8")
        first, last = span.group(1), span.group(2) or span.group(1)
        if int(last) < int(first) or int(last) - int(first) >= MAX_RANGE:
            raise _Bad(f"range {piece} must rise and hold at most {MAX_RANGE} hosts", "node[01-04] slots=8")
        items += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return [one for item in items for one in _expand(before + item + after)]


def _check_name(name: str) -> str:
    try:
        ipaddress.ip_address(name)
        return name
    except ValueError:
        pass
    if re.fullmatch(r"[^:]+:[0-9]+", name):
        host, _, port = name.partition(":")
        raise _Bad(f"{name} is no host name; the ssh port has its own field", f"{host} slots=8 port={port}")
    if not _NAME.fullmatch(name):
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
    gpus = tuple(sorted({int(g) for g in fields["gpus"].split(",")}))
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


def _weight(fields: dict[str, str]) -> float | None:
    value = fields.get("weight")
    if value is None:
        return None
    if not re.fullmatch(r"[0-9]*\.?[0-9]+(e-?[0-9]{1,2})?", value) or float(value) <= 0:
        raise _Bad(f"weight={value} is no number above 0", f"{FORM} weight=0.5")
    return float(value)


def _matching(fields: dict[str, str], key: str, pattern: re.Pattern[str]) -> str | None:
    value = fields.get(key)
    if value is not None and not pattern.fullmatch(value):
        raise _Bad(f"{key}={value} is no {key}")
    return value


def _duplicates(found: list[tuple[int, Host]], where: str) -> list[Problem]:
    """One problem for each later line that names a machine named before."""
    problems = []
    for index, (line, host) in enumerate(found):
        for earlier_line, earlier in found[:index]:
            why = _same_machine(earlier, host)
            if why:
                text = f"lines {earlier_line} and {line}: {why}"
                problems.append(Problem(text, f"{where}:{line}", (f"remove line {line}",)))
                break
    return problems


def _same_machine(a: Host, b: Host) -> str | None:
    one, two = a.name.lower(), b.name.lower()
    if one == two:
        return f"{b.name} twice"
    if is_loopback(one) and is_loopback(two):
        return f"{a.name} and {b.name} are the same machine"
    if a.address is not None and a.address == b.address:
        return f"{a.name} and {b.name} have the same addr={a.address}"
    short = min(one, two, key=len)
    # A short name beside its own full name; two full names may share the first label.
    if "." not in short and max(one, two, key=len).startswith(short + "."):
        return f"{a.name} and {b.name} are the same machine by two names"
    return None


def _render_host(host: Host) -> str:
    fields = [f"slots={max(host.gpus) + 1}"]
    if not contiguous(host):
        fields.append("gpus=" + ",".join(map(str, host.gpus)))
    optional: list[tuple[str, Any]] = [
        ("user", host.user),
        ("port", host.port),
        ("addr", host.address),
        ("iface", host.iface),
        ("weight", host.weight),
    ]
    fields += [f"{key}={value}" for key, value in optional if value is not None]
    return " ".join([host.name, *fields])
