"""Numbers as people read them."""

from __future__ import annotations

NONE = "–"


def plain(value: float | None, form: str = ",.4g") -> str:
    """A number in a format, a dash when it is not known."""
    return NONE if value is None else format(value, form)


def count(value: float | None) -> str:
    """A whole number with thousands apart, or three digits of a small one.

    Example:
        >>> count(24153.7), count(6.54), count(None)
        ('24,154', '6.54', '–')
    """
    if value is None:
        return NONE
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def loss(value: float | None) -> str:
    """A loss with four places, or two digits of one that has none there.

    Example:
        >>> loss(2.71828), loss(0.0), loss(0.0000023)
        ('2.7183', '0.0000', '2.3e-06')
    """
    return plain(value, ".2g" if value and abs(value) < 5e-4 else ".4f")


def gib(value: float | None) -> str:
    """GiB with its unit."""
    return NONE if value is None else f"{value:.3g} GiB" if value < 10 else f"{value:.1f} GiB"


def percent(share: float | None) -> str:
    """A share of one as per cent.

    Example:
        >>> percent(0.1234), percent(0.0), percent(0.00002)
        ('12.3 %', '0.0 %', '< 0.1 %')
    """
    if share is None:
        return NONE
    return "< 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def time_unit(value: float) -> tuple[str, float]:
    """The unit that suits a time of some seconds, and how many of it make a second."""
    return ("s", 1.0) if value >= 0.1 or value <= 0 else ("ms", 1e3) if value >= 1e-4 else ("µs", 1e6)


def seconds(value: float | None) -> str:
    """A short time with a fitting unit.

    Example:
        >>> seconds(0.0000613), seconds(0.0123), seconds(1.5), seconds(90), seconds(1234)
        ('61.3 µs', '12.3 ms', '1.5 s', '90 s', '20 min 34 s')
    """
    if value is None or value >= 999:
        return duration(value)
    unit, number = time_unit(value)
    return f"{number * value:.3g} {unit}"


def duration(value: float | None) -> str:
    """A long time.

    Example:
        >>> duration(0.42), duration(43.2), duration(125), duration(7384)
        ('0.42 s', '43 s', '2 min 5 s', '2 h 3 min')
    """
    if value is None:
        return NONE
    if value < 9.5:
        return f"{value:.2g} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def plural(number: int, unit: str, units: str | None = None) -> str:
    """A number with its noun."""
    return f"{number:,} {unit if number == 1 else units or unit + 's'}"


def size(bytes_: int) -> str:
    """Bytes of a file."""
    value = float(bytes_)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
