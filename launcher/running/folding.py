"""Lines of several logs as one text: what several ranks say alike is shown once. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

SHOWN = 4  # runs of ranks named before a line; more are counted


def fold(logs: Mapping[str, Sequence[str]]) -> Iterator[tuple[list[str], str]]:
    """The lines of each log (HOST.RANK, HOST.node) as pairs of those who say it and what they say.

    The order of each log is kept. A line waits until all who have it yet to say have come to it, unless their orders
    differ.

    Example:
        >>> list(fold({"n1.0": ["a", "b"], "n1.1": ["a", "x", "b"]}))
        [(['n1.0', 'n1.1'], 'a'), (['n1.1'], 'x'), (['n1.0', 'n1.1'], 'b')]
    """
    left = {name: list(reversed(lines)) for name, lines in logs.items() if lines}
    counts = {name: Counter(lines) for name, lines in logs.items()}
    holders = Counter(text for lines in logs.values() for text in set(lines))  # logs that have it yet to come
    while left:
        heads: dict[str, list[str]] = {}
        for name, lines in left.items():
            heads.setdefault(lines[-1], []).append(name)
        text = next((text for text, names in heads.items() if len(names) == holders[text]), next(iter(heads)))
        yield heads[text], text
        for name in heads[text]:
            left[name].pop()
            counts[name][text] -= 1
            holders[text] -= counts[name][text] == 0
            if not left[name]:
                del left[name]


def prefixes(names: Iterable[str]) -> str:
    """Who says something, in short.

    Example:
        >>> prefixes(["n1.0", "n1.1", "n1.2", "n2.3", "n2.node"])
        'n1.0-2,n2.3,n2.node'
    """
    runs: list[list[str | int]] = []  # host, first, last
    for name in names:
        host, _, word = name.rpartition(".")
        if not word.isdigit():
            runs.append([name])
        elif runs and len(runs[-1]) == 3 and runs[-1][0] == host and runs[-1][2] == int(word) - 1:
            runs[-1][2] = int(word)
        else:
            runs.append([host, int(word), int(word)])
    shown = [_run(run) for run in runs[:SHOWN]]
    more = [f"{len(runs) - SHOWN} more"] if len(runs) > SHOWN else []
    return ",".join(shown + more)


def _run(run: Sequence[str | int]) -> str:
    if len(run) == 1:
        return str(run[0])
    host, first, last = run
    return f"{host}.{first}" if first == last else f"{host}.{first}-{last}"
