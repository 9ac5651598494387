"""Plots of one policy or of the log: savings, the oracle's losses, similarity, trees, the paper's figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from kvshare.replay.report.formats import counted, percent, short
from kvshare.replay.report.picture import COLOURS, Picture, drawing, tip
from kvshare.replay.report.reading import Report
from kvshare.replay.results import Document, Histogram, PolicyResults, Similarity, Tree

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Reported = Mapping[str, Mapping[str, float]]  # log -> name of a figure -> what the paper has

_STEPS: Final = {  # the bars of the two plots of tokens: what each is called, and its colour in report.css
    "all": ("all prompt tokens", "total"),
    "prefix": ("equal prefix: not computed", "prefix"),
    "copies": ("copies from elsewhere", "kv0"),
    "rest": ("computed: nothing shared", "computed"),
    "oracle": ("seen before (oracle)", "total"),
    "not_found": ("not found", "computed"),
    "too_short": ("prompt too short to look up", "computed"),
    "generation": ("rejected: copies of copies", "computed"),
    "refused": ("rejected by another threshold", "computed"),
    "repaired": ("repaired: computed again", "repaired"),
    "hit": ("not computed", "kv0"),
}
_MAX_WIDE: Final = 10  # buckets with room for both of their ends


def savings(policy: PolicyResults | None) -> Picture | None:
    """All tokens -> equal prefix -> copies -> repaired -> computed because nothing was shared."""
    if policy is None or policy.num_tokens <= 0:
        return None
    total, hit = policy.num_tokens, policy.num_hit_tokens
    exact, repaired = policy.num_exact_tokens, policy.num_repaired_tokens
    steps = {"all": total, "prefix": -exact, "copies": exact - hit, "repaired": -repaired}
    steps["rest"] = hit + repaired - total
    return _falling(f"Where the tokens go: {policy.label}", steps, total)


def oracle_losses(report: Report) -> Picture | None:
    """Draw what the oracle covers, and how it is lost."""
    label = report.kvshare.label if report.kvshare else None
    losses = next((one for one in report.waterfall if one.arm == label), None)
    if losses is None or losses.num_tokens <= 0 or not losses.steps:
        return None
    steps = {step.name: step.num_tokens for step in losses.steps}
    return _falling(f"From the oracle to {label}", steps, losses.num_tokens)


def likeness(similarity: Similarity | None) -> Picture | None:
    """Requests by the distance to the nearest earlier prompt and the share of equal tokens."""
    if similarity is None:
        return None
    distances, overlaps = similarity.distance_edges, similarity.overlap_edges
    shares = [100 * edge for edge in overlaps]
    most = max(max(row, default=0) for row in similarity.counts)
    with drawing("Similarity against token overlap", height=86 + 25 * len(overlaps)) as picture:
        axes = picture.figure.add_subplot(
            title=f"tokens not computed by {similarity.overlap}, %",
            xlabel="cosine distance to the nearest earlier prompt (left: similar), bucket from",
        )
        axes.set(facecolor=COLOURS["empty"], xlim=(0, len(distances)), ylim=(0, len(overlaps)))
        axes.set_xticks(range(len(distances)), [f"{edge:g}" for edge in distances])
        axes.set_yticks(range(len(overlaps)), [f"{share:.0f}" for share in shares])
        axes.grid(True, axis="both", color=COLOURS["paper"])
        columns, rows = _buckets(distances), _buckets(shares)
        cells = ((c, r, number) for c, of in enumerate(similarity.counts) for r, number in enumerate(of))
        for column, row, number in cells:
            if number:
                strength = 0.12 + 0.88 * math.log1p(number) / math.log1p(most)
                look = {"color": COLOURS["prefix"], "alpha": strength}
                (cell,) = axes.bar(column + 0.5, 0.94, 0.98, row + 0.03, **look)
                where = f"distance {columns[column]}, equal tokens {rows[row]} %"
                tip(cell, f"{counted(number)} requests: {where}")
                style = {"color": COLOURS["paper" if strength > 0.55 else "ink"], "size": 11}
                axes.text(column + 0.5, row + 0.5, short(number), ha="center", va="center", **style)
    return picture


def likeness_points(report: Report) -> Picture | None:
    """Return the same, a dot for each request."""
    if not report.points or report.similarity is None:
        return None
    x, y = [x for x, _ in report.points], [100 * y for _, y in report.points]
    with drawing("Similarity against token overlap, request by request") as picture:
        axes = picture.figure.add_subplot(xlabel="cosine distance to the nearest earlier prompt")
        (dots,) = axes.plot(x, y, "o", color=COLOURS["prefix"], alpha=0.4, markeredgewidth=0, clip_on=False)
        tip(dots, f"{counted(len(x))} requests")
        title = f"tokens not computed by {report.similarity.overlap}, %"
        axes.set(title=title, xlim=(0, max(0.05, *x)), ylim=(0, 100))
        axes.xaxis.set_major_formatter("{x:g}")
    return picture


def tree_shape(tree: Tree | None) -> Picture | None:
    """Draw how many earlier prompts each prompt builds on, and how many build on it; None without any."""
    if tree is None or not any(tree.depth.counts + tree.children.counts):
        return None
    with drawing("Tree depth and fan-out", height=280) as picture:
        depth, children = picture.figure.subplots(1, 2)
        _prompts(depth, tree.depth, "depth: prompts from a root down to this one")
        _prompts(children, tree.children, "fan-out: prompts that build on this one")
    return picture


def _prompts(axes: Axes, histogram: Histogram, name: str) -> None:
    """Vertical bars, up to the last bucket that has prompts."""
    last = max((place for place, number in enumerate(histogram.counts) if number), default=0)
    counts, total = histogram.counts[: last + 1], max(1, sum(histogram.counts))
    buckets = _buckets(histogram.edges)[: last + 1]
    for place, (bucket, number) in enumerate(zip(buckets, counts, strict=True)):
        (bar,) = axes.bar(place, number, color=COLOURS["kv0"], width=0.9)
        tip(bar, f"{bucket}: {counted(number)} prompts, {percent(number / total)}")
    lows = [f"{edge:g}" for edge in histogram.edges[: last + 1]]
    axes.set_xticks(range(len(counts)), buckets if len(counts) <= _MAX_WIDE else lows)
    axes.locator_params(axis="y", integer=True, nbins=5)
    axes.set(title="prompts", xlabel=name, xlim=(-0.6, max(4, len(counts)) - 0.4))


def _buckets(edges: Sequence[float]) -> list[str]:
    """ "2", "6–7" of whole numbers or "0.05–0.1", and at the end "50+"."""
    gap = 1 if all(edge == int(edge) for edge in edges) else 0
    inner = [f"{low:g}" if high - low == gap else f"{low:g}–{high - gap:g}" for low, high in pairwise(edges)]
    return inner + [f"{edge:g}+" for edge in edges[-1:]]


def _falling(title: str, steps: Mapping[str, int], total: int) -> Picture:
    """Horizontal bars of tokens: sums begin at 0, each loss (negative) where the bar above ends."""
    names, notes, level = [], [], 0
    with drawing(title, height=92 + 38 * len(steps)) as picture:
        axes = picture.figure.add_subplot(xlabel="share of all prompt tokens, %")
        for place, (step, change) in enumerate(steps.items()):
            start = 0 if step in ("all", "oracle", "hit") else level
            level, low, num_tokens = start + change, min(start, start + change), abs(change)
            name, colour = _STEPS.get(step, (step, "computed"))
            share, left, look = 100 * num_tokens / total, 100 * low / total, COLOURS[colour]
            (bar,) = axes.barh(place, share, 0.68, left, color=look, edgecolor=look)
            names.append(name)
            notes.append(f"{counted(num_tokens)}  ({percent(num_tokens / total)})")
            tip(bar, f"{name}: {notes[-1]} tokens")
        _share_rows(axes, names, ["tokens", *notes])
    return picture


def _share_rows(axes: Axes, names: Sequence[str], notes: Sequence[str]) -> None:
    """Percent to the right, names downwards; notes on the right, the first of which is a heading."""
    axes.set(xlim=(0, 100), ylim=(len(names) - 0.5, -0.5))
    axes.set_yticks(range(len(names)), names, size=13, color=COLOURS["ink"])
    axes.grid(False, axis="y")
    axes.grid(True, axis="x")
    axes.spines.bottom.set_visible(False)
    axes.tick_params(bottom=False)
    for place, note in enumerate(notes, start=-1):
        axes.text(1.02, place, note, transform=axes.get_yaxis_transform(), va="center", color=COLOURS["soft"])


def draw_figure_2(figure: Document, reported: Reported) -> Picture:
    """Return the source paper's figure: identical, similar and unique prompts; shares by distance."""
    shares = {f"{name} prompts": share for name, share in figure["shares"].items()}
    shares |= {f"an earlier one within {one['distance']:g}": one["share"] for one in figure["by_distance"]}
    similar = [*shares].index(f"an earlier one within {figure['max_distance']:g}")
    return _draw_shares(
        f"{counted(figure['num_prompts'])} conversations by the nearest earlier first prompt "
        f"(similar: cosine distance at most {figure['max_distance']:g})",
        {name: [(share, 0.8)] for name, share in shares.items()},
        [*map(percent, shares.values())],
        {f"{log}: identical or similar": own["identical_or_similar"] for log, own in reported.items()},
        marked=(similar, similar + 1),
        x_name="share of conversations, %",
    )


def draw_figure_4(figure: Document, reported: Reported) -> Picture:
    """A bar for each policy, cut by the share of a prompt that is not computed; darker is more."""
    num, policies = figure["num_prompts"], figure["arms"]
    title = (
        f"{counted(num)} similar prompts by the share of tokens not computed: darkest 90 % or more (right), "
        "each shade 10 % less"
    )
    return _draw_shares(
        title if num else "No prompt has a similar one: the subset is empty",
        {
            one["arm"]: [(share, (i + 1) / 10) for i, share in enumerate(one["shares"])][::-1]
            for one in policies
        },
        [percent(one["at_least"]["90"] if num else None) for one in policies],
        {f"KVShare, {log}: 90 % or more": own["at_least_90"] for log, own in reported.items()},
        marked=(0, len(policies)),
        x_name="share of requests, %",
    )


def _draw_shares(
    title: str,
    rows: Mapping[str, Sequence[tuple[float, float]]],
    notes: Sequence[str],
    marks: Mapping[str, float],
    *,
    marked: tuple[int, int],
    x_name: str,
) -> Picture:
    """Rows of parts, each a share and its darkness in (0, 1]; `marks`: the paper's shares, over some rows."""
    with drawing(title, height=106 + 30 * len(rows) + 20 * len(marks)) as picture:
        axes = picture.figure.add_subplot(xlabel=x_name)
        picture.figure.suptitle(title, x=0.01, ha="left")
        for place, parts in enumerate(rows.values()):
            end = 0.0
            for share, strength in parts:
                axes.barh(place, 100 * share, 0.74, end, color=COLOURS["prefix"], alpha=strength)
                end += 100 * share
        _share_rows(axes, [*rows], ["", *notes])
        for (label, share), dash in zip(marks.items(), ("--", ":", "-."), strict=False):
            name, ends = f"{percent(share)}  the paper's {label}", [edge - 0.5 for edge in marked]
            axes.plot([100 * share] * 2, ends, linestyle=dash, color=COLOURS["computed"], label=name)
        picture.figure.legend(loc="outside lower left")
    return picture
