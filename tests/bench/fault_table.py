"""What a cell of the fault table found, and the table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

LIMIT_S = 60.0  # how long a cell is watched; some of what is left would end by itself, minutes later
HOSTS = {"10.77.0.1": "n1", "10.77.0.2": "n2"}
FAILURE = re.compile(  # at the end: lines of torchrun's table, and of ours
    r"error|exception|fail|exit|signal|kill|lost|time[d ]*out|refused|unreachable|no route|not found|no such|denied"
    r"|verification|hung|hang|cannot|unable|closed|no sign of|^ +(?:host|rank) +:|^  n\d  ",
    re.IGNORECASE,
)
# Blames nobody: commands that are echoed, names that need not resolve, what is said to be a consequence, a live table.
REMARK = re.compile(r"\[(?:INFO|WARNING)\]|\[c10d\]|^ +later  |^n\d\.\d  ")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\r")


@dataclass
class Cell:
    """One run: seconds from the fault (or the start) until all processes were gone, and what was said."""

    gone_s: float | None = None  # None: not within the limit
    command_s: float | None = None  # until the typed command had ended
    exit_code: int | None = None  # None: it had not ended
    trains_on: bool = False  # the fault did not hit it; then gone_s is counted from a Ctrl-C
    hosts: list[str] = field(default_factory=list)  # named in lines that speak of a failure
    ranks: list[int] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    other_unharmed: bool | None = None
    note: str = ""

    def text(self, host: str | None, rank: int | None) -> str:
        """The cell in a few words."""
        words = ["trains on, then"] if self.trains_on else []
        words.append(f"not in {LIMIT_S:.0f} s" if self.gone_s is None else f"{self.gone_s:.1f} s")
        words.append(f"exit {'-' if self.exit_code is None else self.exit_code}")
        if host is not None and not self.trains_on:
            words.append(self._named(host, rank))
        if self.left:
            words.append(f"**{len(self.left)} left**")
        if self.other_unharmed is not None:
            words.append("other job unharmed" if self.other_unharmed else "**other job harmed**")
        return ", ".join([*words, *([self.note] if self.note else [])]).replace("then,", "then")

    def _named(self, host: str, rank: int | None) -> str:
        """Whom it blames: the guilty, everybody, or nobody."""
        if host not in self.hosts and (rank is None or rank not in self.ranks):
            return f"blames {self.hosts[0]}" if self.hosts else "names nobody"
        if len(self.hosts) > 1 or len(self.ranks) > 1:
            return "blames all"
        return f"names {' '.join([*self.hosts, *(f'rank {number}' for number in self.ranks)])}"


def blamed(text: str) -> tuple[list[str], list[int]]:
    """Hosts and ranks in the lines that speak of a failure."""
    hosts, ranks = set(), set()
    for line in CONTROL.sub("\n", text).splitlines():
        if REMARK.search(line) or not FAILURE.search(line):
            continue
        hosts |= {HOSTS.get(name, name) for name in re.findall(r"\b(?:n[12]|10\.77\.0\.[12])\b", line)}
        ranks |= {int(number) for number in re.findall(r"(?<!local_)\brank[ :=\]]*(\d+)", line, re.IGNORECASE)}
    return sorted(hosts), sorted(ranks)


def table(
    cells: dict[str, Cell], faults: dict[str, tuple[str, str | None, int | None]], launchers: Sequence[str]
) -> str:
    """One line a fault, one column a launcher."""
    lines = [f"| fault | {' | '.join(launchers)} |", "|---" * (len(launchers) + 1) + "|"]
    for fault, (text, host, rank) in faults.items():
        row = [c.text(host, rank) if (c := cells.get(f"{name}/{fault}")) else "" for name in launchers]
        if any(row):
            lines.append(f"| {text} | {' | '.join(row)} |")
    return "\n".join(lines)
