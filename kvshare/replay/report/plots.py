"""The plots that put the arms side by side: values in, SVG out; None where there is nothing to draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvshare.replay.report import svg
from kvshare.replay.report.svg import Plane, Point, Scale
from kvshare.replay.report.tables import counted, percent, short, size
from kvshare.replay.results import ArmResults, Stretch

WIDTH: Final = 880
_LEFT, _RIGHT, _TOP, _HEIGHT = 72, 580, 34, 300  # of the area where data are drawn
_LEGEND = 596
_SMOOTHED = 20  # a point over time averages this part of the stream
_NUM_SHADES, _NUM_DASHES = 6, 4

Values = Callable[[Stretch], float]


def styles(arms: Sequence[ArmResults]) -> dict[str, str]:
    """
    Arm -> the class of its colour and dash: a colour a family, KVShare's variants one each.

    Arms of one colour differ in their dashes, so that nobody needs to tell colours apart.
    """
    found: dict[str, str] = {}
    used: dict[str, int] = {}
    num_kvshare = 0
    known = ("nothing", "prefix", "chunks", "response", "oracle")
    for arm in arms:
        if arm.arm in found:
            continue
        colour = arm.family if arm.family in known else f"kv{num_kvshare % _NUM_SHADES}"
        num_kvshare += arm.family not in known
        dash = used.get(colour, 0) + ("open" in arm.arm) + 2 * (colour == "oracle")
        used[colour] = used.get(colour, 0) + 1
        found[arm.arm] = f"line c-{colour} d{dash % _NUM_DASHES}"
    return found


def hit_rate_over_time(arms: Sequence[ArmResults]) -> str | None:
    """Tokens not computed along the stream, averaged over a twentieth of it."""
    return _along_the_stream(
        [arm for arm in arms if arm.family != "nothing"],
        lambda arm: _moving_rate(arm.series),
        title="Hit rate over time",
        y_name="prompt tokens not computed, %",
        y_high=100,
        value=lambda arm: percent(arm.token_hit_rate),
        y_label=short,
    )


def store_over_time(arms: Sequence[ArmResults]) -> str | None:
    """What each arm's store holds along the stream."""
    holding = [arm for arm in arms if any(stretch.num_bytes for stretch in arm.series)]
    return _along_the_stream(
        holding,
        lambda arm: [(s.first + s.num_requests, s.num_bytes) for s in arm.series],
        title="Store size over time",
        y_name="KV in the store",
        y_high=max((s.num_bytes for arm in holding for s in arm.series), default=0),
        value=lambda arm: size(arm.storage.final_bytes),
        y_label=size,
    )


def coverage(arms: Sequence[ArmResults]) -> str | None:
    """The share of requests of whose tokens at least x percent need no computing."""
    drawn = [arm for arm in arms if sum(arm.coverage_histogram) and arm.family != "nothing"]
    if not drawn:
        return None
    plane = _plane(Scale(0, 100, _LEFT, _RIGHT), 100)
    parts = [_percent_axes(plane, "at least so many of a request's tokens not computed, %", "requests, %")]
    for share in (50, 70, 90):
        parts.append(svg.rule((plane.x(share), _TOP), (plane.x(share), _HEIGHT), "guide"))
    classes = styles(arms)
    for arm in reversed(drawn):  # the first asked for on top, where curves are the same
        total, left = sum(arm.coverage_histogram), sum(arm.coverage_histogram)
        points: list[Point] = [(0.0, 100.0)]
        for bucket, num_requests in enumerate(arm.coverage_histogram):
            points.append((float(bucket), 100 * left / total))
            left -= num_requests
        parts.append(svg.line(plane, points, classes[arm.arm], arm.label))
    entries = [(classes[arm.arm], arm.label, percent(arm.at_least[0])) for arm in drawn]
    parts.append(_legend(entries, "with at least 50 %"))
    return _document("Coverage of requests", "One curve an arm; higher is better.", len(drawn), parts)


def hit_rate_against_capacity(arms: Sequence[ArmResults]) -> str | None:
    """Tokens not computed by what the store may hold; the infinite store at the right."""
    by_arm: dict[str, list[ArmResults]] = {}
    for arm in arms:
        if arm.family != "nothing" and arm.token_hit_rate is not None:
            by_arm.setdefault(arm.arm, []).append(arm)
    capacities = sorted({arm.capacity_tokens for arm in arms if arm.capacity_tokens})
    if not capacities or not by_arm:
        return None
    low, high = capacities[0], max(capacities[-1], capacities[0] * 1.01)
    plane = _plane(Scale(low, high, _LEFT + 24, _RIGHT - 76, log=True), 100)
    endless = _RIGHT - 16.0
    edge = Plane(Scale(0, 1, endless, endless), plane.y)
    frame = Plane(Scale(0, 1, _LEFT, _RIGHT), plane.y)
    parts = [_percent_axes(frame, "store capacity, tokens", "prompt tokens not computed, %", x_ticks=())]
    ticks = [*svg.labelled(_thinned(capacities, plane.x), short)]
    parts += [svg.text(plane.x(at), _HEIGHT + 19, label, "tick", "middle") for at, label in ticks]
    parts.append(svg.text(endless, _HEIGHT + 19, "infinite", "tick", "middle"))
    classes = styles(arms)
    entries: list[tuple[str, str, str]] = []
    for name, stores in reversed(by_arm.items()):
        css, dot = classes[name], classes[name].replace("line", "dot")
        finite = sorted((s.capacity_tokens, _percent_of(s)) for s in stores if s.capacity_tokens)
        final = [s for s in stores if s.capacity_tokens is None]
        parts += [svg.line(plane, finite, css, name), svg.dots(plane, finite, dot, tip=name)]
        parts.append(svg.dots(edge, [(0, _percent_of(s)) for s in final], dot, radius=4, tip=name))
        entries.insert(0, (css, name, percent(final[0].token_hit_rate if final else None)))
    parts.append(_legend(entries, "with an infinite store"))
    return _document("Hit rate against capacity", "One line an arm.", len(entries), parts)


def _along_the_stream(
    arms: Sequence[ArmResults],
    points: Callable[[ArmResults], list[Point]],
    *,
    title: str,
    y_name: str,
    y_high: float,
    value: Callable[[ArmResults], str],
    y_label: Callable[[float], str],
) -> str | None:
    drawn = [arm for arm in arms if arm.series]
    if not drawn or y_high <= 0:
        return None
    last = max(arm.series[-1].first + arm.series[-1].num_requests for arm in drawn)
    plane = _plane(Scale(0, last, _LEFT, _RIGHT), y_high)
    x_ticks = svg.labelled([t for t in svg.linear_ticks(0, last) if t == int(t)], short)
    y_ticks = svg.labelled(svg.linear_ticks(0, y_high), y_label)
    parts = [
        svg.axes(
            plane, x_ticks=x_ticks, y_ticks=y_ticks, x_name="requests, in the log's order", y_name=y_name
        )
    ]
    classes = styles(arms)
    parts += [svg.line(plane, points(arm), classes[arm.arm], arm.label) for arm in reversed(drawn)]
    parts.append(_legend([(classes[arm.arm], arm.label, value(arm)) for arm in drawn], "over all requests"))
    return _document(title, f"One line an arm over {counted(last)} requests.", len(drawn), parts)


def _percent_of(arm: ArmResults) -> float:
    return 100 * (arm.token_hit_rate or 0.0)


def _moving_rate(series: Sequence[Stretch]) -> list[Point]:
    width = max(1, len(series) // _SMOOTHED)
    points: list[Point] = []
    for end in range(1, len(series) + 1):
        window = series[max(0, end - width) : end]
        num_tokens = sum(stretch.num_tokens for stretch in window)
        last = window[-1]
        if num_tokens:
            rate = 100 * sum(stretch.num_hit for stretch in window) / num_tokens
            points.append((last.first + last.num_requests, rate))
    return points


def _plane(x: Scale, y_high: float) -> Plane:
    return Plane(x, Scale(0, y_high, _HEIGHT, _TOP))


def _percent_axes(
    plane: Plane, x_name: str, y_name: str, x_ticks: Sequence[float] = (0, 10, 30, 50, 70, 90, 100)
) -> str:
    ticks = svg.labelled((0, 20, 40, 60, 80, 100), short)
    return svg.axes(plane, x_ticks=svg.labelled(x_ticks, short), y_ticks=ticks, x_name=x_name, y_name=y_name)


def _thinned(values: Sequence[float], scale: Scale) -> list[float]:
    """Those that leave room for each other's labels."""
    kept: list[float] = []
    for value in values:
        if not kept or abs(scale(value) - scale(kept[-1])) >= 44:
            kept.append(value)
    return kept


def _legend(entries: Sequence[tuple[str, str, str]], heading: str) -> str:
    head = svg.text(_LEGEND, _TOP - 12, heading, "tick")
    return head + svg.legend(_LEGEND, _TOP + 10, entries, width=WIDTH - _LEGEND - 4)


def _document(title: str, description: str, num_entries: int, parts: Sequence[str]) -> str:
    height = max(_HEIGHT + 50, _TOP + 20 + 19 * num_entries)
    return svg.document(WIDTH, height, title=title, description=description, parts=parts)
