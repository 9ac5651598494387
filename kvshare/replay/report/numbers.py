"""Numbers as a reader wants them: percent, counts, bytes, times; what is not known is a dash."""

from __future__ import annotations

import math

UNKNOWN = "–"


def percent(share: float | None, digits: int = 1) -> str:
    """0.1234 -> "12.3 %"."""
    return UNKNOWN if share is None else f"{100 * share:.{digits}f} %"


def counted(number: float | None) -> str:
    """1234567 -> "1,234,567"."""
    return UNKNOWN if number is None else f"{number:,.0f}"


def short(number: float) -> str:
    """For axes: 1500 -> "1.5k"."""
    for power, letter in ((9, "G"), (6, "M"), (3, "k")):
        if abs(number) >= 10**power:
            return f"{number / 10**power:.3g}{letter}"
    return f"{number:.3g}"


def size(num_bytes: float | None) -> str:
    """123456789 -> "123 MB"."""
    if num_bytes is None:
        return UNKNOWN
    for power, unit in ((15, "PB"), (12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if abs(num_bytes) >= 10**power:
            return f"{num_bytes / 10**power:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float | None) -> str:
    """Of some digits, in the unit that fits; the sign is kept."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds == 0:
        return "0 s"
    for least, unit, factor in ((86400 * 2, "days", 86400), (7200, "h", 3600), (120, "min", 60), (1, "s", 1)):
        if abs(seconds) >= least:
            return (
                f"{seconds / factor:,.3g} {unit}"
                if abs(seconds / factor) < 1000
                else (f"{seconds / factor:,.0f} {unit}")
            )
    return f"{seconds * 1000:.3g} ms"


def points(share: float) -> str:
    """A difference of shares."""
    return f"{100 * share:+.1f} points"
