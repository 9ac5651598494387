"""The list of plots, and those with a curve for each policy; None: nothing to draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvshare.replay.report import shapes
from kvshare.replay.report.formats import percent, short, size
from kvshare.replay.report.picture import COLOURS, Picture, drawing, tip
from kvshare.replay.report.reading import Report
from kvshare.replay.results import PolicyResults

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

_SMOOTHED: Final = 20  # a point over time averages this part of the stream
_FAMILIES: Final = {name: name for name in ("nothing", "prefix", "chunks", "response")} | {"oracle": "ink"}
_NUM_SHADES: Final = 6  # of KVShare's variants
_DASHES: Final = ("-", "--", ":", "-.")
_SPACE: Final = "\u2007"  # as wide as a digit
_NOT_COMPUTED: Final = "prompt tokens not computed, %"


class Curve(NamedTuple):
    """The curve of a policy, with its value for the legend."""

    policy: PolicyResults
    x: Sequence[float]
    y: Sequence[float]
    value: str


def draw(report: Report) -> dict[str, Picture | None]:
    """Return all plots by the names of their files; "-all" has all policies' curves, not the main ones'."""
    kvshare = report.kvshare
    curves = {
        "hit-rate-over-time": hit_rate_over_time,
        "hit-rate-against-capacity": hit_rate_against_capacity,
        "coverage": coverage,
        "store-over-time": store_over_time,
    }
    pictures = {
        "savings": shapes.savings(kvshare),
        "oracle-losses": shapes.oracle_losses(report),
        "similarity": shapes.likeness(report.similarity),
        "similarity-points": shapes.likeness_points(report),
        "tree": shapes.tree_shape(kvshare.tree if kvshare else None),
    }
    names = {policy.arm for policy in report.main} or {policy.arm for policy in report.arms}
    main = [policy for policy in report.arms if policy.arm in names]
    for name, plot in curves.items():
        pictures[name] = plot(main)
        pictures[f"{name}-all"] = plot(report.arms) if report.others else None
    return pictures


def looks(policies: Iterable[PolicyResults]) -> dict[str, dict[str, Any]]:
    """
    Policy -> colour and dashes of its curve: a colour a family, KVShare's variants one each.

    Curves of one colour differ in their dashes, so that colours need not be distinguished.
    """
    styles: dict[str, dict[str, Any]] = {}
    used: list[str] = []
    num_kvshare = 0
    for policy in policies:
        colour = _FAMILIES.get(policy.family, f"kv{num_kvshare % _NUM_SHADES}")
        num_kvshare += policy.family not in _FAMILIES
        dash = used.count(colour) + ("open" in policy.arm) + 2 * (policy.family == "oracle")
        used.append(colour)
        styles[policy.arm] = {"color": COLOURS[colour], "linestyle": _DASHES[dash % len(_DASHES)]}
    return styles


def hit_rate_over_time(policies: Iterable[PolicyResults]) -> Picture | None:
    """Tokens not computed along the stream, averaged over a twentieth of it; infinite stores."""
    curves = []
    for policy in _caching(policies):
        if policy.series:
            width = max(1, len(policy.series) // _SMOOTHED)
            windows = [policy.series[max(0, end - width) : end] for end in range(1, len(policy.series) + 1)]
            sums = [(sum(one.num_hit for one in w), sum(one.num_tokens for one in w)) for w in windows]
            rates = [100 * num_hit / num_tokens if num_tokens else math.nan for num_hit, num_tokens in sums]
            curves.append(Curve(policy, _ends(policy), rates, percent(policy.token_hit_rate)))
    return _along_the_stream("Hit rate over time", curves, _NOT_COMPUTED, short, top=100)


def store_over_time(policies: Iterable[PolicyResults]) -> Picture | None:
    """Draw what each policy with an infinite store stores along the stream."""
    curves = []
    for policy in _caching(policies):
        num_bytes = [one.num_bytes for one in policy.series]
        if any(num_bytes):
            curves.append(Curve(policy, _ends(policy), num_bytes, size(policy.storage.final_bytes)))
    return _along_the_stream("Store size over time", curves, "KV in the store", size)


def coverage(policies: Iterable[PolicyResults]) -> Picture | None:
    """The share of requests of whose tokens at least x percent are not computed; infinite stores."""
    curves = []
    for policy in _caching(policies):
        if total := sum(policy.coverage_histogram):
            fewer = accumulate(policy.coverage_histogram[:-1], initial=0)
            left = [100 * (total - number) / total for number in fewer]
            curves.append(Curve(policy, range(len(left)), left, percent(policy.at_least[0])))
    if not curves:
        return None
    with _curves("Coverage of requests", curves, "requests, %", "with at least 50 %") as (picture, axes):
        for share in (50, 70, 90):
            axes.axvline(share, color=COLOURS["axis"], linestyle=":", linewidth=1)
        axes.set_xticks([0, 10, 30, 50, 70, 90, 100])
        axes.set(xlabel="at least this share of a request's tokens not computed, %", ylim=(0, 100))
    return picture


def hit_rate_against_capacity(policies: Iterable[PolicyResults]) -> Picture | None:
    """Tokens not computed by capacity, the infinite store at the right; None below two finite ones."""
    caching = [one for one in policies if one.family != "nothing" and one.token_hit_rate is not None]
    capacities = sorted({one.capacity_tokens for one in caching if one.capacity_tokens})
    if len(capacities) < 2:
        return None
    infinite = capacities[-1] * max(2.0, (capacities[-1] / capacities[0]) ** 0.2)
    curves = []
    for policy in {one.arm: one for one in caching}.values():
        rates = {one.capacity_tokens: one.token_hit_rate for one in caching if one.arm == policy.arm}
        own = [rates.get(at) for at in (*capacities, 0, None)]  # of 0 none: a gap before the last
        y = [math.nan if rate is None else 100 * rate for rate in own]
        curves.append(Curve(policy, [*capacities, infinite, infinite], y, percent(rates.get(None))))
    heading = "with an infinite store"
    with _curves("Hit rate against capacity", curves, _NOT_COMPUTED, heading, marker="o") as (picture, axes):
        axes.set(xlabel="store capacity, tokens", xscale="log", xmargin=0.05, ylim=(0, 100))
        step = (infinite / capacities[0]) ** (1 / 12)  # what a label needs
        ticks: list[float] = []
        for at in capacities:
            if not ticks or at >= ticks[-1] * step:
                ticks.append(at)
        axes.set_xticks([*ticks, infinite], [*map(short, ticks), "infinite"])
        axes.minorticks_off()
    return picture


def _caching(policies: Iterable[PolicyResults]) -> Iterator[PolicyResults]:
    return (one for one in policies if one.capacity_tokens is None and one.family != "nothing")


def _along_the_stream(
    title: str, curves: Sequence[Curve], y_name: str, label: Callable[[float], str], top: float | None = None
) -> Picture | None:
    if not curves:
        return None
    with _curves(title, curves, y_name, "over all requests") as (picture, axes):
        axes.set(xlabel="requests, in the log's order", xlim=(0, None), ylim=(0, top))
        axes.locator_params(axis="x", integer=True)
        axes.xaxis.set_major_formatter(lambda value, _: short(value))
        axes.yaxis.set_major_formatter(lambda value, _: label(value))
    return picture


@contextmanager
def _curves(
    title: str, curves: Sequence[Curve], y_name: str, heading: str, *, marker: str = ""
) -> Iterator[tuple[Picture, Axes]]:
    """With a legend: value and name of each, a policy's options below it. The caller sets the scales."""
    width = max(len(curve.value) for curve in curves)
    styles = looks(curve.policy for curve in curves)
    num_rows = sum(curve.policy.arm.count(":") + 1 for curve in curves)
    rows: list[tuple[Line2D, str]] = []
    with drawing(title, height=max(350, 50 + 20 * num_rows)) as picture:
        axes = picture.figure.add_subplot(title=y_name)
        (blank,) = axes.plot([], [], linestyle="")
        for depth, (policy, x, y, value) in enumerate(curves):  # the first on top, where curves are equal
            look = {"marker": "o" if len(y) == 1 else marker, "zorder": 3 - depth / 100, **styles[policy.arm]}
            (line,) = axes.plot(x, y, clip_on=False, **look)
            tip(line, f"{policy.arm}: {value}")
            name, *options = policy.arm.split(":")
            rows.append((line, f"{value:{_SPACE}>{width}}{_SPACE}{name}"))
            rows += [(blank, f"{_SPACE * (width + 2)}{option}") for option in options]
        lines, labels = zip(*rows, strict=True)
        picture.figure.legend(lines, labels, title=heading, loc="outside right upper", alignment="left")
        yield picture, axes


def _ends(policy: PolicyResults) -> list[int]:
    return [stretch.first + stretch.num_requests for stretch in policy.series]
