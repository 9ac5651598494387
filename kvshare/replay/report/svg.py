"""
SVG primitives: scales, axes, lines, dots, bars. Strings out, no state; knows nothing of replays.

Colours are classes, never values: a page's style gives them, for light, dark and print; files.py for PNG.
Every coordinate is finite and inside its scale, whatever the data are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

_CHARACTER = 6.4  # width of one of a label's characters, about, at 12 px


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps [low, high] to [start, end]; what is outside is drawn at the edge. `log`: low must be above 0."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if not math.isfinite(value):
            return self.start
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(max(value, self.low))
        share = 0.5 if high <= low else (at - low) / (high - low)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)


@dataclass(frozen=True, slots=True)
class Plane:
    """Where data are drawn."""

    x: Scale
    y: Scale

    def at(self, point: Point) -> str:
        return f"{self.x(point[0]):.1f},{self.y(point[1]):.1f}"


def linear_ticks(low: float, high: float, at_most: int = 6) -> list[float]:
    """Round numbers within [low, high]."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    rough = (high - low) / max(1, at_most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def text(x: float, y: float, content: str, css: str = "label", anchor: str = "start") -> str:
    """One line of text."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} class="{css}">{escape(content)}</text>'


def rule(start: Point, end: Point, css: str) -> str:
    """A straight line, in pixels."""
    (x1, y1), (x2, y2) = start, end
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def rect(x: float, y: float, width: float, height: float, css: str, tip: str = "", opacity: float = 1) -> str:
    """A box, in pixels, with a tooltip."""
    shade = "" if opacity >= 1 else f' opacity="{max(0.0, opacity):.2f}"'
    inside = f"<title>{escape(tip)}</title>" if tip else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{max(0.0, height):.1f}" '
        f'class="{css}"{shade}>{inside}</rect>'
    )


def line(plane: Plane, points: Sequence[Point], css: str, tip: str = "") -> str:
    """Through all points; a single one is a dot."""
    known = [point for point in points if all(map(math.isfinite, point))]
    if len(known) == 1:
        return dots(plane, known, css.replace("line", "dot"), radius=3.5, tip=tip)
    if not known:
        return ""
    inside = f"<title>{escape(tip)}</title>" if tip else ""
    places = " ".join(map(plane.at, known))
    return f'<polyline points="{places}" class="{css}">{inside}</polyline>'


def dots(plane: Plane, points: Iterable[Point], css: str, *, radius: float = 2.5, tip: str = "") -> str:
    """Single points."""
    inside = f"<title>{escape(tip)}</title>" if tip else ""
    return "".join(
        f'<circle cx="{plane.x(x):.1f}" cy="{plane.y(y):.1f}" r="{radius}" class="{css}">{inside}</circle>'
        for x, y in points
        if math.isfinite(x) and math.isfinite(y)
    )


def axes(
    plane: Plane,
    *,
    x_ticks: Iterable[tuple[float, str]],
    y_ticks: Iterable[tuple[float, str]],
    x_name: str,
    y_name: str,
) -> str:
    """A grid, labels on it, and what is shown with its unit."""
    left, right, bottom, top = plane.x.start, plane.x.end, plane.y.start, plane.y.end
    parts = []
    for value, label in y_ticks:
        y = plane.y(value)
        parts += [rule((left, y), (right, y), "grid"), text(left - 8, y + 4, label, "tick", "end")]
    for value, label in x_ticks:
        x = plane.x(value)
        parts += [rule((x, bottom), (x, bottom + 5), "axis"), text(x, bottom + 19, label, "tick", "middle")]
    parts.append(rule((left, bottom), (right, bottom), "axis"))
    parts.append(text((left + right) / 2, bottom + 39, x_name, "label", "middle"))
    parts.append(text(left - 56, top - 12, y_name, "label"))
    return "".join(parts)


def legend(x: float, y: float, entries: Iterable[tuple[str, str, str]], *, width: float) -> str:
    """Line sample, name, and a value in front of it: one below the other."""
    parts = []
    for place, (css, name, value) in enumerate(entries):
        at = y + 19 * place
        parts.append(rule((x, at - 4), (x + 26, at - 4), css))
        parts.append(text(x + 84, at, value, "tick", "end"))
        shown = fit(name, width - 92)
        tip = f"<title>{escape(name)}</title>" if shown != name else ""
        parts.append(f"<g>{tip}{text(x + 92, at, shown)}</g>")
    return "".join(parts)


def fit(label: str, width: float) -> str:
    """The label, with its middle left out where it is too long."""
    room = max(4, int(width / _CHARACTER))
    if len(label) <= room:
        return label
    end = room // 2  # where options differ
    return label[: room - end - 1] + "…" + label[-end:]


def document(width: int, height: int, *, title: str, description: str, parts: Iterable[str]) -> str:
    """The whole picture; screen readers get its title and description."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" class="plot"><title>{escape(title)}</title>'
        f"<desc>{escape(description)}</desc>{''.join(parts)}</svg>"
    )


def labelled(values: Iterable[float], label: Callable[[float], str]) -> list[tuple[float, str]]:
    """Ticks with their text."""
    return [(value, label(value)) for value in values]
