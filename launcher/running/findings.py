"""What checks of hosts find: a host, a subject, a reason and what to do, as rows of one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.errors import ConfigError, LauncherError, MachineError, Problem

NAMED = 4  # hosts of one row that are named


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that keeps a run from starting."""

    host: str
    what: str  # a word or two
    reason: str
    tries: tuple[str, ...] = ()
    config: bool = False  # whether the user edits the configuration, rather than mends a machine
    comes: bool = False  # whether a run brings it before it checks: it keeps none from starting that has yet to


def problems(findings: Sequence[Finding]) -> list[Problem]:
    """One problem a row, hosts with the same trouble together, columns aligned."""
    rows = _rows(findings)
    names = [several(hosts) for hosts in rows.values()]
    host_width = max(map(len, names), default=0)
    what_width = max((len(what) for what, _, _ in rows), default=0)
    return [
        Problem(f"{name:{host_width}}  {what:{what_width}}  {reason}", tries=tries)
        for name, (what, reason, tries) in zip(names, rows, strict=True)
    ]


def sentences(findings: Sequence[Finding]) -> list[str]:
    """The same rows, as words to be told."""
    return [f"{several(hosts)}: {reason}" for (_, reason, _), hosts in _rows(findings).items()]


def _rows(findings: Sequence[Finding]) -> dict[tuple[str, str, tuple[str, ...]], list[str]]:
    """(what, reason, tries) -> its hosts."""
    rows: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for finding in findings:
        hosts = rows.setdefault((finding.what, finding.reason, finding.tries), [])
        if finding.host not in hosts:
            hosts.append(finding.host)
    return rows


def several(hosts: Sequence[str]) -> str:
    """The hosts, the first of them when they are many."""
    named, more = hosts[:NAMED], len(hosts) - NAMED
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")


def error_of(findings: Sequence[Finding], *others: Problem, config: bool = False) -> LauncherError | None:
    """The error that these findings and `others` are; `config`: whether one of the others is for an edit."""
    found = [*problems(findings), *others]
    if not found:
        return None
    if config or any(finding.config for finding in findings):
        return ConfigError(*found, title="with the hosts" if findings else "with this run")
    return MachineError(*found, title="with the hosts" if findings else "with this machine")
