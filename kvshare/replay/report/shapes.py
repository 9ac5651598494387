"""The plots of one arm, or of the log itself: savings, the oracle's share, likeness, trees; the paper's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from kvshare.replay.report import svg
from kvshare.replay.report.plots import WIDTH
from kvshare.replay.report.style import LIGHT, plot_css
from kvshare.replay.report.svg import Plane, Point, Scale
from kvshare.replay.report.tables import counted, percent, short
from kvshare.replay.results import ArmResults, Document, Histogram, Similarity, Tree, Waterfall

_TOP, _STEP, _BAR = 44, 30, 22
_SHARES: Final = svg.Scale(0, 1, 250, 800)
_MARKS: Final = tuple(f"line c-computed d{dash}" for dash in (1, 2, 3))
# Figures that stand alone: nothing in them loads or runs.
_STYLE: Final = (
    f"{plot_css(LIGHT)}\n.paper{{fill:{LIGHT['paper']}}}text{{font-family:Lato,system-ui,sans-serif}}"
)

Reported = Mapping[str, Mapping[str, float]]  # log -> name of a figure -> what the paper has

_STEP_NAMES = {
    "oracle": "seen before (oracle)",
    "not_found": "not found",
    "too_short": "prompt too short to look",
    "generation": "refused: copy of copies",
    "refused": "refused by another gate",
    "repaired": "repaired: computed again",
    "hit": "not computed",
}


def savings(arm: ArmResults) -> str | None:
    """All tokens -> equal prefix -> copies -> repaired -> what is computed for want of anything to share."""
    total, exact, hit, repaired = (
        arm.num_tokens,
        arm.num_exact_tokens,
        arm.num_hit_tokens,
        arm.num_repaired_tokens,
    )
    if total <= 0:
        return None
    bars = [
        ("all prompt tokens", 0, total, "c-total"),
        ("equal prefix: not computed", total - exact, total, "c-prefix"),
        ("copies from elsewhere", total - hit, total - exact, "c-kv0"),
        ("repaired: computed again", total - hit - repaired, total - hit, "c-repaired"),
        ("computed: nothing shared", 0, total - hit - repaired, "c-computed"),
    ]
    return _falling(f"Where the tokens go: {arm.label}", bars, total)


def oracle_losses(waterfall: Waterfall) -> str | None:
    """What the oracle covers, and on what way it is lost."""
    if waterfall.num_tokens <= 0 or not waterfall.steps:
        return None
    bars, level = [], 0
    for step in waterfall.steps:
        name, num_tokens = step.name, step.num_tokens
        end = level + num_tokens
        first = name in ("oracle", "hit")
        start, end = (0, num_tokens) if first else (level, end)
        css = {"oracle": "c-total", "hit": "c-kv0", "repaired": "c-repaired"}.get(name, "c-computed")
        bars.append((_STEP_NAMES.get(name, name), min(start, end), max(start, end), css))
        level = end
    return _falling(f"From the oracle to {waterfall.arm}", bars, waterfall.num_tokens)


def likeness(similarity: Similarity) -> str:
    """How many requests have a nearest earlier prompt so far away, and so many tokens in common."""
    rows, columns = len(similarity.overlap_edges), len(similarity.distance_edges)
    left, top, width, height = 72.0, 34.0, (WIDTH - 90) / max(1, columns), 25.0
    most = max(max(row, default=0) for row in similarity.counts)
    parts = []
    for column, counts in enumerate(similarity.counts[:columns]):
        for row, num_requests in enumerate(counts[:rows]):
            x, y = left + column * width, top + (rows - 1 - row) * height
            tip = (
                f"{counted(num_requests)} requests: distance {_bucket(similarity.distance_edges, column)}, "
                f"tokens in common {_bucket([100 * e for e in similarity.overlap_edges], row)} %"
            )
            parts.append(svg.rect(x, y, width - 1, height - 1, "c-empty"))
            if num_requests:
                strength = 0.12 + 0.88 * math.log1p(num_requests) / math.log1p(most)
                parts.append(svg.rect(x, y, width - 1, height - 1, "c-heat", tip, strength))
                css = "cell strong" if strength > 0.55 else "cell"
                parts.append(svg.text(x + width / 2, y + 17, short(num_requests), css, "middle"))
    bottom = top + rows * height
    for column, edge in enumerate(similarity.distance_edges):
        parts.append(svg.text(left + column * width, bottom + 16, f"{edge:g}", "tick", "middle"))
    for row, edge in enumerate(similarity.overlap_edges):
        parts.append(svg.text(left - 8, bottom - row * height + 4, f"{100 * edge:.0f}", "tick", "end"))
    middle = left + columns * width / 2
    name = "cosine distance to the nearest earlier prompt (left: alike in meaning), bucket from"
    parts.append(svg.text(middle, bottom + 38, name, "label", "middle"))
    parts.append(svg.text(16, 16, f"tokens not computed by {similarity.overlap}, %", "label"))
    description = "Requests by the distance of the nearest earlier prompt and the share of tokens shared."
    title = "Similarity against token overlap"
    return svg.document(WIDTH, int(bottom + 52), title=title, description=description, parts=parts)


def likeness_points(points: Sequence[Point], overlap: str) -> str | None:
    """The same, a dot a request."""
    if not points:
        return None
    high = max(0.05, *(x for x, _ in points if math.isfinite(x)))
    plane = Plane(Scale(0, high, 72, WIDTH - 20), Scale(0, 100, 300, 34))
    axes = svg.axes(
        plane,
        x_ticks=svg.labelled(svg.linear_ticks(0, high, 9), lambda v: f"{v:g}"),
        y_ticks=svg.labelled((0, 20, 40, 60, 80, 100), short),
        x_name="cosine distance to the nearest earlier prompt",
        y_name=f"tokens not computed by {overlap}, %",
    )
    dots = svg.dots(plane, [(x, 100 * y) for x, y in points], "dot faint c-heat")
    title = "Similarity against token overlap, request by request"
    description = f"{counted(len(points))} requests."
    return svg.document(WIDTH, 350, title=title, description=description, parts=[axes, dots])


def tree_shape(tree: Tree) -> str | None:
    """How deep prompts stand on earlier ones, and how many stand on each."""
    panels = [
        (tree.depth, "depth: prompts from a root down to this one"),
        (tree.children, "fan-out: prompts that build on this one"),
    ]
    if not any(sum(histogram.counts) for histogram, _ in panels):
        return None
    half = WIDTH / 2
    parts = [_bars(histogram, name, half * i, half) for i, (histogram, name) in enumerate(panels)]
    description = "Prompts by depth and by fan-out."
    return svg.document(WIDTH, 280, title="Tree depth and fan-out", description=description, parts=parts)


def _bars(histogram: Histogram, name: str, left: float, width: float) -> str:
    """Vertical bars, no longer than there are prompts in them."""
    last = max((i for i, number in enumerate(histogram.counts) if number), default=0)
    counts, edges = histogram.counts[: last + 1], histogram.edges[: last + 1]
    most, total = max((*counts, 1)), max(1, sum(counts))
    scale, step = Scale(0, most, 225, 34), (width - 90) / max(4, len(counts))
    parts = []
    for tick in svg.linear_ticks(0, most, 5):
        if tick == int(tick):
            y = scale(tick)
            parts.append(svg.rule((left + 60, y), (left + width - 20, y), "grid"))
            parts.append(svg.text(left + 52, y + 4, short(tick), "tick", "end"))
    for place, number in enumerate(counts):
        x, y = left + 64 + place * step, scale(number)
        label = _bucket(histogram.edges, place)
        tip = f"{label}: {counted(number)} prompts, {percent(number / total)}"
        parts.append(svg.rect(x, y, step - 4, 225 - y, "c-kv0", tip))
        parts.append(
            svg.text(x + step / 2 - 2, 243, label if step >= 34 else f"{edges[place]:g}", "tick", "middle")
        )
    parts.append(svg.text(left + 16, 16, "prompts", "label"))
    parts.append(svg.text(left + width / 2 + 20, 266, svg.fit(name, width - 40), "label", "middle"))
    return "".join(parts)


def _bucket(edges: Sequence[float], place: int) -> str:
    """ "2", "6-7", "50 or more", "0.05 to 0.1"."""
    low = edges[place]
    if place + 1 >= len(edges):
        return f"{low:g}+"
    high = edges[place + 1]
    if all(edge == int(edge) for edge in edges):
        return f"{low:g}" if high - low <= 1 else f"{low:g}–{high - 1:g}"
    return f"{low:g}–{high:g}"


def _falling(title: str, bars: Sequence[tuple[str, int, int, str]], total: int) -> str:
    """Horizontal bars, each beginning where the one above ends."""
    left, right, top, step = 210, WIDTH - 190, 30, 38
    scale = Scale(0, total, left, right)
    bottom = top + step * len(bars)
    parts = _share_grid(Scale(0, 1, left, right), (0.0, 0.25, 0.5, 0.75, 1.0), top, bottom)
    for place, (name, low, high, css) in enumerate(bars):
        y, start, end = top + place * step, scale(low), scale(high)
        note = f"{counted(high - low)}  ({percent((high - low) / total)})"
        parts.append(svg.text(left - 10, y + 19, name, "label", "end"))
        parts.append(svg.rect(start, y + 2, max(1.0, end - start), step - 12, css, f"{name}: {note} tokens"))
        parts.append(svg.text(right + 12, y + 19, note, "tick"))
    parts.append(
        svg.text((left + right) / 2, bottom + 36, "share of all prompt tokens, %", "label", "middle")
    )
    parts.append(svg.text(right + 12, 16, "tokens", "label"))
    description = "; ".join(f"{name} {high - low}" for name, low, high, _ in bars)
    return svg.document(WIDTH, bottom + 48, title=title, description=description, parts=parts)


def _share_grid(scale: Scale, shares: Sequence[float], top: float, bottom: float) -> list[str]:
    """Vertical lines at these shares, with their percent below."""
    parts = []
    for share in shares:
        x = scale(share)
        parts.append(svg.rule((x, top - 6), (x, bottom), "grid"))
        parts.append(svg.text(x, bottom + 16, f"{100 * share:.0f}", "tick", "middle"))
    return parts


class _Bar(NamedTuple):
    """A bar of parts, each a share and how dark it is, in (0, 1]."""

    label: str
    parts: Sequence[tuple[float, float]]
    note: str


class _Mark(NamedTuple):
    """A share that the paper reports, over the rows that it can be held against."""

    label: str
    share: float
    rows: range


def draw_figure_2(figure: Document, reported: Reported) -> str:
    """The source paper's: identical, similar and unique prompts, then the share within each distance."""
    bars = [(f"{name} prompts", share) for name, share in figure["shares"].items()]
    limits = [one["distance"] for one in figure["by_distance"]]
    at = len(bars) + limits.index(figure["max_distance"])
    bars += [(f"an earlier one within {one['distance']:g}", one["share"]) for one in figure["by_distance"]]
    return _draw_shares(
        f"{counted(figure['num_prompts'])} conversations by the nearest earlier first prompt "
        f"(similar: cosine distance at most {figure['max_distance']:g})",
        [_Bar(label, [(share, 0.8)], percent(share)) for label, share in bars],
        [
            _Mark(f"the paper's, {log}: identical or similar", own["identical_or_similar"], range(at, at + 1))
            for log, own in reported.items()
        ],
        x_name="share of conversations, %",
    )


def draw_figure_4(figure: Document, reported: Reported) -> str:
    """The same: a bar an arm, cut by how much of the prompts need not be computed; darker is more."""
    num = figure["num_prompts"]
    rows = []
    for arm in figure["arms"]:
        darkest_first = [(share, (i + 1) / 10) for i, share in enumerate(arm["shares"])][::-1]
        rows.append(_Bar(arm["arm"], darkest_first, percent(arm["at_least"]["90"] if num else None)))
    title = (
        f"{counted(num)} similar prompts by their tokens not computed: darkest 90 % or more (right), "
        "each shade 10 % less"
    )
    return _draw_shares(
        title if num else "No prompt has a similar one: the Similar subset is empty",
        rows,
        [
            _Mark(f"the paper's KVShare, {log}: 90 % or more", own["at_least_90"], range(len(rows)))
            for log, own in reported.items()
        ],
        x_name="share of requests, %",
    )


def _draw_shares(title: str, rows: Sequence[_Bar], marks: Sequence[_Mark], *, x_name: str) -> str:
    bottom = _TOP + _STEP * len(rows)
    height = bottom + 62 + 19 * len(marks)
    parts = [
        f"<style>{_STYLE}</style>",
        svg.rect(0, 0, WIDTH, height, "paper"),
        svg.text(12, 22, title),
    ]
    parts += _share_grid(_SHARES, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), _TOP, bottom)
    parts.append(svg.text(_SHARES(0.5), bottom + 36, x_name, "label", "middle"))
    parts += [_share_bar(row, _TOP + _STEP * place) for place, row in enumerate(rows)]
    samples = []
    for mark, css in zip(marks, _MARKS, strict=False):
        x, first, last = _SHARES(mark.share), mark.rows.start, mark.rows.stop
        parts.append(svg.rule((x, _TOP + _STEP * first - 4), (x, _TOP + _STEP * last - 4), css))
        samples.append((css, mark.label, percent(mark.share)))
    parts.append(svg.legend(_SHARES.start, bottom + 60, samples, width=WIDTH - _SHARES.start))
    return svg.document(WIDTH, height, title=title, description=x_name, parts=parts)


def _share_bar(row: _Bar, y: float) -> str:
    drawn = [svg.text(_SHARES.start - 8, y + 16, row.label, "label", "end")]
    end = 0.0
    for share, strength in row.parts:
        start, end = end, end + share
        width = _SHARES(end) - _SHARES(start)
        drawn.append(svg.rect(_SHARES(start), y, width, _BAR, "c-heat", opacity=strength))
    drawn.append(svg.text(_SHARES.end + 10, y + 16, row.note, "tick"))
    return "".join(drawn)
