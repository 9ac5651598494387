"""
Tables as HTML, every cell escaped; a share has a bar behind it. Numbers as a reader wants them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from kvshare.replay.report.reading import Report
from kvshare.replay.results import SHARES, ArmResults, ArmTimes, Figures

UNKNOWN = "–"


@dataclass(frozen=True, slots=True)
class Share:
    """A cell with a bar as long as the share."""

    value: float | None


Cell = str | Share


def table(head: Sequence[str], rows: Iterable[Sequence[Cell]], *, caption: str = "") -> str:
    """The first column names the row; the others are numbers."""
    body = "".join(map(_row, rows))
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll" tabindex="0"><table>{named}<thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def arms_table(arms: Sequence[ArmResults]) -> str:
    """The figures of every arm given."""
    head = (
        "arm",
        "token hit rate",
        "request hit rate",
        *(f"requests ≥ {share} %" for share in SHARES),
        "recomputed",
        "TTFT saved, mean",
        "in all",
        "store at the end",
        "false hits",
    )
    return table(
        head, ((arm.label, *_figures(arm), size(arm.storage.final_bytes), _false(arm)) for arm in arms)
    )


def group_table(report: Report, group: str) -> str:
    """The infinite arms side by side, a row a group; empty if nothing is known."""
    arms = [arm for arm in report.endless if arm.family != "nothing"]
    first = report.kvshare or next(iter(arms), None)
    if first is None or not first.by.get(group):
        return ""
    keys = sorted(first.by[group], key=_natural)
    rows: list[tuple[Cell, ...]] = []
    for key in keys:
        figures = first.by[group][key]
        rates = [arm.by.get(group, {}).get(key) for arm in arms]
        cells = [Share(one.token_hit_rate if one else None) for one in rates]
        rows.append((key, counted(figures.num_requests), counted(figures.num_tokens), *cells))
    return table(("", "requests", "prompt tokens", *(arm.arm for arm in arms)), rows)


def origin_table(report: Report) -> str:
    """Whose prompts the tokens came from."""
    rows: list[tuple[Cell, ...]] = []
    for arm in report.endless:
        origins = arm.by.get("origin", {})
        if arm.family == "nothing" or not origins:
            continue
        requests = (_requests_in(arm, key) for key in ("same_user", "cross_user", "unknown", "none"))
        cross = origins.get("cross_user")
        hit = cross.num_hit_tokens if cross else 0
        part = hit / arm.num_hit_tokens if arm.num_hit_tokens else None
        rows.append((arm.arm, *map(Share, requests), Share(part)))
    head = (
        "arm",
        "requests with tokens of the same user only",
        "of another user too",
        "of another conversation, users not named in the log",
        "nothing shared",
        "tokens not computed that are in requests of the second kind",
    )
    return table(head, rows) if rows else ""


def _requests_in(arm: ArmResults, origin: str) -> float | None:
    figures = arm.by.get("origin", {}).get(origin)
    num_requests = arm.num_requests
    return (figures.num_requests if figures else 0) / num_requests if num_requests else None


def plans_table(report: Report) -> str:
    """Copies, donors, shifts, and the time it took here."""
    rows = []
    for arm in report.endless:
        clock = report.times.arms.get(arm.label, ArmTimes())
        cells = [
            _mean(arm.num_copies.mean),
            _mean(arm.num_donors.mean),
            _mean(arm.shift_tokens.mean),
            *map(_ms, (clock.lookup_ms.p50, clock.lookup_ms.p99, clock.plan_ms.p50, clock.plan_ms.p99)),
            duration(clock.ttft_saved_net_s.mean),
        ]
        rows.append((arm.arm, *cells))
    head = ("arm", "copies a request", "donors a request", "shift of a copy, tokens", "look-up p50", "p99",
            "planning p50", "p99", "TTFT saved less these and embedding")  # fmt: skip
    return table(head, rows)


def pairs(rows: Iterable[tuple[str, str]], head: tuple[str, str]) -> str:
    """Two columns."""
    return table(head, rows)


def _figures(figures: Figures) -> tuple[Cell, ...]:
    return (
        Share(figures.token_hit_rate),
        Share(figures.request_hit_rate),
        *map(Share, figures.at_least),
        percent(figures.recomputed_fraction),
        duration(figures.ttft_saved_s.mean),
        duration(figures.ttft_saved_s.total),
    )


def _false(arm: ArmResults) -> str:
    if arm.family != "response":
        return ""
    if not arm.num_answered:
        return "answered none"
    return f"{counted(arm.num_false_hits)} of {counted(arm.num_answered)}"


def _row(cells: Sequence[Cell]) -> str:
    rest = "".join(map(_cell, cells[1:]))
    return f'<tr><th scope="row">{_inside(cells[0])}</th>{rest}</tr>'


def _cell(cell: Cell) -> str:
    return f"<td>{_inside(cell)}</td>"


def _inside(cell: Cell) -> str:
    if isinstance(cell, str):
        return escape(cell)
    if cell.value is None:
        return UNKNOWN
    width = 100 * min(1.0, max(0.0, cell.value))
    return f'<span class="bar" style="--share:{width:.1f}%">{percent(cell.value)}</span>'


def _mean(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def _ms(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.3g} ms" if value < 1000 else f"{value:,.0f} ms"


def _natural(key: str) -> tuple[int, str]:
    """Length buckets by length, words by the alphabet."""
    number = key.split("-")[0]
    return (int(number) if number.isdecimal() else -1, key)


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
