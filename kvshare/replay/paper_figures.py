"""Figures 2 and 4 as SVG files: bars, labels, nothing that loads or runs."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from kvshare.replay.results import Document

_WIDTH, _LEFT, _BAR, _GAP = 760, 250, 22, 8
_SHADES = ("#d9e2ec", "#bcccdc", "#9fb3c8", "#829ab1", "#627d98", "#486581", "#334e68", "#243b53", "#102a43")
_TEXT = 'font-family="system-ui, sans-serif" font-size="13" fill="#102a43"'


def draw_figure_2(figure: Document) -> str:
    """Identical, similar and unique prompts, then the share within each distance."""
    bars = [(f"{name} prompts", share) for name, share in figure["shares"].items()]
    bars += [(f"an earlier one within {one['distance']:g}", one["share"]) for one in figure["by_distance"]]
    title = (
        f"Share of {figure['num_prompts']:,} conversations whose first prompt has an earlier one "
        f"(similar: cosine distance at most {figure['max_distance']:g})"
    )
    rows = [
        _row(place, label, [(share, _SHADES[5])], f"{100 * share:.1f} %")
        for place, (label, share) in enumerate(bars)
    ]
    return _svg(title, rows)


def draw_figure_4(figure: Document) -> str:
    """A bar an arm, cut by how much of the prompts need not be computed; darker is more."""
    rows = []
    for place, arm in enumerate(figure["arms"]):
        parts = [(share, _SHADES[min(i, len(_SHADES) - 1)]) for i, share in enumerate(arm["shares"])]
        rows.append(_row(place, arm["arm"], parts, f"{100 * arm['at_least']['90']:.0f} %"))
    title = (
        f"{figure['num_prompts']:,} similar prompts by the share of tokens not computed: darker is more, "
        "from below 10 % to all; right: requests with at least 90 %"
    )
    return _svg(title, rows)


def _row(place: int, label: str, parts: Iterable[tuple[float, str]], note: str) -> str:
    y = 40 + place * (_BAR + _GAP)
    full = _WIDTH - _LEFT - 70
    drawn = [f'<text x="{_LEFT - 8}" y="{y + 16}" text-anchor="end" {_TEXT}>{escape(label)}</text>']
    x = float(_LEFT)
    for share, colour in parts:
        width = share * full
        drawn.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour}"/>')
        x += width
    drawn.append(f'<text x="{max(x, _LEFT) + 6:.1f}" y="{y + 16}" {_TEXT}>{escape(note)}</text>')
    return "".join(drawn)


def _svg(title: str, rows: list[str]) -> str:
    height = 48 + len(rows) * (_BAR + _GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">'
        f"<title>{escape(title)}</title>"
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>'
        f'<text x="12" y="22" {_TEXT} textLength="{_WIDTH - 24}" lengthAdjust="spacingAndGlyphs">'
        f"{escape(title)}</text>" + "".join(rows) + "</svg>\n"
    )
