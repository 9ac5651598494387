"""The report's figures: mean KL against the budget, and which of two regimes a suite is in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, product
from typing import TYPE_CHECKING, Any, Final

from kvshare.replay.report.picture import COLOURS, Picture, drawing, tip
from kvshare_lab.fidelity.rows import Row
from kvshare_lab.fidelity.statistics import FLOOR
from kvshare_lab.fidelity.tables import BASELINE, FULL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS: Final = 3
_BUDGET: Final = 0.1  # of the regimes, or the nearest that was measured
_COLOURS: Final = ("prefix", "chunks", "response", "kv3", "kv2", "kv4", "kv5", "kv1", "computed", "nothing")
_DASHES: Final = ("-", "--", ":", "-.")
_OURS: Final[dict[str, Any]] = {"color": COLOURS["kv0"], "linewidth": 3.5, "marker": "o", "zorder": 4}
_BASE: Final[dict[str, Any]] = {"color": COLOURS["ink"], "linestyle": "--"}

Looks = Mapping[str, Mapping[str, Any]]


def draw(document: Row) -> dict[str, Picture]:
    """The figures for which there is data, by the names of their files."""
    looks, figures = _looks(document), {}
    for by in ("b", "charged"):  # beside rules with this budget there are those without budgets
        known = [row for row in document["results"] if row["kl"] and (row["by"] == by or row["budget"] == 0)]
        if any(row["by"] == by for row in known):
            figures[f"kl-by-{by}"] = _panels(known, looks, by)
    moved = [row for row in document["regimes"] if row["moved"] is not None and row["ratio"]["low"]]
    return figures | ({"regimes": _regimes(moved)} if moved else {})


def _looks(document: Row) -> Looks:
    """Rule -> the look and label of its curve: no two have the same colour and dashes."""
    rules = dict.fromkeys([*document["titles"], *(row["rule"] for row in document["results"])])
    styles = cycle({"linestyle": dash, "color": COLOURS[name]} for dash, name in product(_DASHES, _COLOURS))
    own = {document["ours"]: _OURS, BASELINE: _BASE}
    others = [rule for rule in rules if rule not in own and rule != FULL]
    own |= {rule: {"marker": ".", **style} for rule, style in zip(others, styles, strict=False)}
    return {rule: {"label": document["titles"].get(rule, rule), **look} for rule, look in own.items()}


def _panels(rows: Sequence[Row], looks: Looks, by: str) -> Picture:
    suites = list(dict.fromkeys(row["suite"] for row in rows))
    rules = [rule for rule in looks if any(row["rule"] == rule for row in rows)]
    num_rows = -(-len(suites) // _COLUMNS)
    name = {"b": "repaired", "charged": "charged"}[by]
    height = 90 + 240 * num_rows + 20 * -(-len(rules) // _COLUMNS)
    with drawing(f"Mean KL by the budget {name}", height=height) as picture:
        grid = picture.figure.subplots(num_rows, _COLUMNS, squeeze=False)
        panels: list[Axes] = [*grid.flat]
        lines: dict[str, Any] = {}
        for axes, suite in zip(panels, suites, strict=False):
            axes.set(title=suite, yscale="log", xmargin=0.06)
            own = [row for row in rows if row["suite"] == suite]
            lines |= dict(_curves(axes, own, looks, by))
            _readable(axes)
        for axes in panels[max(0, len(suites) - _COLUMNS) : len(suites)]:  # with no panel below
            axes.set_xlabel(f"{name}, % of layers x tokens")
        for axes in panels[len(suites) :]:
            axes.remove()
        picture.figure.supylabel("mean KL over 16 tokens, nats", size=13)
        handles = [lines[rule] for rule in rules]
        picture.figure.legend(handles=handles, loc="outside lower left", ncols=_COLUMNS)
    return picture


def _curves(axes: Axes, rows: Sequence[Row], looks: Looks, by: str) -> Iterator[tuple[str, Any]]:
    """A curve for each rule, a point for a rule without budgets, a line across for the baseline."""
    for rule, look in looks.items():
        own = sorted((row for row in rows if row["rule"] == rule), key=lambda row: row["budget"])
        x = [100 * (row["budget"] or row[by] or 0) for row in own]
        y = [max(FLOOR, row["kl"]["value"]) for row in own]
        if not own:
            continue
        if rule == BASELINE:
            line: Any = axes.axhline(y[0], **look)
        else:
            size = {"markersize": 9} if len(x) == 1 else {}
            (line,) = axes.plot(x, y, clip_on=False, **{**look, **size})
        values = ", ".join(f"{value:.3g} at {at:.3g} %" for at, value in zip(x, y, strict=True))
        tip(line, f"{own[0]['suite']}, {look['label']}: {values}")
        yield rule, line


def _readable(axes: Axes) -> None:
    """Ticks of a logarithmic axis at 1, 2 and 5, or on a long one at 1 only, as plain numbers."""
    low, high = axes.get_ylim()
    axes.locator_params(axis="y", subs=(1.0,) if high > 300 * low else (1.0, 2.0, 5.0))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()


def _regimes(rows: Sequence[Row]) -> Picture:
    budget = min((row["budget"] for row in rows), key=lambda budget: abs(budget - _BUDGET))
    with drawing("Two regimes", height=440) as picture:
        axes = picture.figure.add_subplot(xlabel="mean share of copied tokens that moved, %")
        axes.set(yscale="log", xmargin=0.12, xlim=(-5, 115))
        axes.set_title(
            f"mean KL, query-guided / windows, at {100 * budget:g} % repaired; below 1 query-guided is better"
        )
        axes.axhline(1, color=COLOURS["axis"], linestyle="--")
        for row in [row for row in rows if row["budget"] == budget]:
            x, found = 100 * row["moved"], row["ratio"]
            axes.plot([x, x], [found["low"], found["high"]], color=COLOURS["axis"], linewidth=1)
            (dot,) = axes.plot([x], [found["value"]], "o", color=COLOURS["prefix"])
            tip(dot, f"{row['suite']}: {found['value']:.3g} ({found['low']:.3g} to {found['high']:.3g})")
            look = {"textcoords": "offset points", "color": COLOURS["ink"], "va": "center"}
            axes.annotate(row["suite"], (x, found["value"]), (8, 0), **look)
        _readable(axes)
    return picture
