"""Numbers as a reader wants them: few digits, the unit that fits, and a dash where a number is not known."""

import math
from typing import Final

UNKNOWN: Final = "–"
_PREFIXES: Final = ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k"))
_TIMES: Final = ((172_800, "days", 86400), (7200, "h", 3600), (120, "min", 60), (1, "s", 1), (0, "ms", 1e-3))


def percent(share: float | None, digits: int = 1) -> str:
    """0.1234 -> "12.3 %"."""
    return UNKNOWN if share is None else f"{100 * share:.{digits}f} %"


def points(share: float) -> str:
    return f"{100 * share:+.1f} points"


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def counted(number: float | None) -> str:
    """1234567 -> "1,234,567"."""
    return UNKNOWN if number is None else f"{number:,.0f}"


def digits(value: float | None, unit: str = "") -> str:
    """Three digits, below 0.1 one, from 1,000 on all before the point."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    size = abs(value)
    spec = ".1g" if size < 0.1 else ".3g" if size < 999.5 else ",.0f"
    return f"{value:{spec}}" + (unit and f" {unit}")


def short(number: float, unit: str = "") -> str:
    """1500 -> "1.5k", or with a unit "1.5 kB"."""
    power, prefix = next((one for one in _PREFIXES if abs(number) >= 0.9995 * 10 ** one[0]), (0, ""))
    return f"{number / 10**power:.3g}" + (f" {prefix}{unit}" if unit else prefix)


def size(num_bytes: float | None) -> str:
    return UNKNOWN if num_bytes is None else short(num_bytes, "B")


def duration(seconds: float | None) -> str:
    """Three digits in the unit that fits, with the sign."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    unit, factor = next((unit, factor) for least, unit, factor in _TIMES if abs(seconds) >= least)
    return digits(seconds / factor, unit)


def moment(iso: str) -> str:
    """As people write it: "2026-01-02 03:04 UTC"."""
    return f"{iso[:16].replace('T', ' ')} UTC" if iso.endswith("+00:00") else iso


FILTERS: Final = {
    show.__name__: show for show in (percent, points, ratio, counted, digits, size, duration, moment)
}
