"""Pictures made of characters: a bar cut into parts, lanes of a timeline. Plain ASCII, for every terminal and log."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence

from launcher.estimates import Span

FREE, KEPT_FREE, EDGE = ".", "-", "|"
GAP = " "  # of a lane in which nothing happens


def letters(names: Iterable[str]) -> dict[str, str]:
    """A letter of its own for each name: of those that no earlier name has, one that begins a word, else any.

    Example:
        >>> letters(["gradients", "gathered layers", "gaps"])
        {'gradients': 'g', 'gathered layers': 'l', 'gaps': 'a'}
    """
    found: dict[str, str] = {}
    for name in names:
        initials = [word[0] for word in name.lower().split()]
        wanted = [c for c in (*initials, *name.lower(), *string.ascii_letters) if c in string.ascii_letters]
        found[name] = next((c for c in wanted if c not in found.values()), "#")
    return found


def cells(sizes: Sequence[float], width: int) -> list[int]:
    """`width` cells shared out in proportion; the shares begin and end where they do in truth, to the next cell.

    Example:
        >>> cells([1, 1, 2], 8), cells([0.001, 3], 6)
        ([2, 2, 4], [0, 6])
    """
    whole = sum(sizes)
    if whole <= 0:
        return [0] * len(sizes)
    ends, total = [0], 0.0
    for size in sizes:
        total += size
        ends.append(round(width * total / whole))
    return [end - begin for begin, end in zip(ends, ends[1:], strict=False)]


def bar(parts: Mapping[str, float], marks: Mapping[str, str], width: int) -> str:
    """One line of `width` characters between brackets, each part with its mark."""
    counts = cells(list(parts.values()), width)
    return "[" + "".join(marks[name] * n for name, n in zip(parts, counts, strict=True)) + "]"


def memory_bar(
    parts: Mapping[str, float], capacity: float | None, headroom: float, marks: Mapping[str, str], width: int
) -> str:
    """Parts of a memory against what there is: free cells as dots, the share kept free as dashes behind an edge.

    What does not fit goes on behind the edge of the memory; without a capacity the bar is the parts alone.
    """
    used = sum(parts.values())
    if capacity is None:
        return bar(parts, marks, width)
    whole = max(used, capacity)
    drawn = bar(parts, marks, round(width * used / whole))[1:-1]
    usable, end = (round(width * size / whole) for size in ((1 - headroom) * capacity, capacity))
    line = list(drawn.ljust(width, FREE))
    for at in range(max(usable, len(drawn)), end):
        line[at] = KEPT_FREE
    for at in sorted({usable, end} - {0, width}, reverse=True):
        line.insert(at, EDGE)
    return f"[{''.join(line)}]"


def lane(spans: Sequence[Span], begin_s: float, end_s: float, width: int) -> str:
    """One lane of a timeline: each span with its name as far as it has room for it, filled up with `=`."""
    line = [GAP] * width
    for span in sorted(spans, key=lambda span: span.begin_s):
        first, last = _places(span, begin_s, end_s, width)
        room = last - first
        line[first:last] = span.name[: max(1, room - 1)].ljust(room - 1, "=") + EDGE if room > 1 else span.name[:1]
    return "".join(line).rstrip()


def _places(span: Span, begin_s: float, end_s: float, width: int) -> tuple[int, int]:
    """First cell of a span and the one behind its last; one cell at least."""
    scale = width / (end_s - begin_s) if end_s > begin_s else 0.0
    first = min(width - 1, round((span.begin_s - begin_s) * scale))
    return first, min(width, max(first + 1, round((span.end_s - begin_s) * scale)))


def cut_names(spans: Sequence[Span], begin_s: float, end_s: float, width: int) -> list[str]:
    """Names of spans that a lane of this width writes out nowhere, in the order they begin."""
    written = set()
    for span in spans:
        first, last = _places(span, begin_s, end_s, width)
        if last - first > len(span.name):
            written.add(span.name)
    return list(dict.fromkeys(s.name for s in sorted(spans, key=lambda s: s.begin_s) if s.name not in written))
