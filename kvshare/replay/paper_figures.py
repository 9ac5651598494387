"""
Figures 2 and 4 as pictures that stand alone, with what the paper reports marked on them.

Bars are shares of requests; a dashed line is the paper's. Nothing in them loads or runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvshare.replay.report import svg
from kvshare.replay.report.style import LIGHT, plot_css
from kvshare.replay.report.tables import counted, percent
from kvshare.replay.results import Document

_WIDTH, _TOP, _STEP, _BAR = 880, 44, 30, 22
_SHARES: Final = svg.Scale(0, 1, 250, 800)
_MARKS: Final = tuple(f"line c-computed d{dash}" for dash in (1, 2, 3))
_STYLE: Final = (
    f"{plot_css(LIGHT)}\n.paper{{fill:{LIGHT['paper']}}}text{{font-family:Lato,system-ui,sans-serif}}"
)

Reported = Mapping[str, Mapping[str, float]]  # log -> name of a figure -> what the paper has


@dataclass(frozen=True, slots=True)
class _Row:
    """A bar of parts, each a share and how dark it is, in (0, 1]."""

    label: str
    parts: Sequence[tuple[float, float]]
    note: str


@dataclass(frozen=True, slots=True)
class _Mark:
    """A share that the paper reports, over the rows that it can be held against."""

    label: str
    share: float
    rows: range


def draw_figure_2(figure: Document, reported: Reported) -> str:
    """Identical, similar and unique prompts, then the share within each distance."""
    bars = [(f"{name} prompts", share) for name, share in figure["shares"].items()]
    limits = [one["distance"] for one in figure["by_distance"]]
    at = len(bars) + limits.index(figure["max_distance"])
    bars += [(f"an earlier one within {one['distance']:g}", one["share"]) for one in figure["by_distance"]]
    return _draw(
        f"{counted(figure['num_prompts'])} conversations by the nearest earlier first prompt "
        f"(similar: cosine distance at most {figure['max_distance']:g})",
        [_Row(label, [(share, 0.8)], percent(share)) for label, share in bars],
        [
            _Mark(f"the paper's, {log}: identical or similar", own["identical_or_similar"], range(at, at + 1))
            for log, own in reported.items()
        ],
        x_name="share of conversations, %",
    )


def draw_figure_4(figure: Document, reported: Reported) -> str:
    """A bar an arm, cut by how much of the prompts need not be computed; darker is more."""
    num = figure["num_prompts"]
    rows = []
    for arm in figure["arms"]:
        darkest_first = [(share, (i + 1) / 10) for i, share in enumerate(arm["shares"])][::-1]
        rows.append(_Row(arm["arm"], darkest_first, percent(arm["at_least"]["90"] if num else None)))
    title = (
        f"{counted(num)} similar prompts by their tokens not computed: darkest 90 % or more (right), "
        "each shade 10 % less"
    )
    return _draw(
        title if num else "No prompt has a similar one: the Similar subset is empty",
        rows,
        [
            _Mark(f"the paper's KVShare, {log}: 90 % or more", own["at_least_90"], range(len(rows)))
            for log, own in reported.items()
        ],
        x_name="share of requests, %",
    )


def _draw(title: str, rows: Sequence[_Row], marks: Sequence[_Mark], *, x_name: str) -> str:
    bottom = _TOP + _STEP * len(rows)
    height = bottom + 62 + 19 * len(marks)
    parts = [f"<style>{_STYLE}</style>", svg.rect(0, 0, _WIDTH, height, "paper"), svg.text(12, 22, title)]
    for tick in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        x = _SHARES(tick)
        parts.append(svg.rule((x, _TOP - 6), (x, bottom), "grid"))
        parts.append(svg.text(x, bottom + 16, f"{100 * tick:.0f}", "tick", "middle"))
    parts.append(svg.text(_SHARES(0.5), bottom + 36, x_name, "label", "middle"))
    parts += [_bar(row, _TOP + _STEP * place) for place, row in enumerate(rows)]
    samples = []
    for mark, css in zip(marks, _MARKS, strict=False):
        x, first, last = _SHARES(mark.share), mark.rows.start, mark.rows.stop
        parts.append(svg.rule((x, _TOP + _STEP * first - 4), (x, _TOP + _STEP * last - 4), css))
        samples.append((css, mark.label, percent(mark.share)))
    parts.append(svg.legend(_SHARES.start, bottom + 60, samples, width=_WIDTH - _SHARES.start))
    return svg.document(_WIDTH, height, title=title, description=x_name, parts=parts)


def _bar(row: _Row, y: float) -> str:
    drawn = [svg.text(_SHARES.start - 8, y + 16, row.label, "label", "end")]
    end = 0.0
    for share, strength in row.parts:
        start, end = end, end + share
        width = _SHARES(end) - _SHARES(start)
        drawn.append(svg.rect(_SHARES(start), y, width, _BAR, "c-heat", opacity=strength))
    drawn.append(svg.text(_SHARES.end + 10, y + 16, row.note, "tick"))
    return "".join(drawn)
