"""
The lab's report: a folder of measured rows -> a document of plain data -> report.json, report.md and figures.

Its words and the columns of its tables are in report.yaml.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from kvshare.bench.fidelity import tables
from kvshare.bench.fidelity.comparison import Bound, check_bounds, comparisons
from kvshare.bench.fidelity.plots import draw
from kvshare.bench.fidelity.rows import Row, read_plans
from kvshare.replay.report.formats import UNKNOWN, counted, digits, percent
from kvshare.replay.whole_files import write_document, write_whole

_WORDS: Final = yaml.safe_load(Path(__file__).with_name("report.yaml").read_text(encoding="utf-8"))

_BY_KIND: Final = ("suite", "by")
_GROUPS: Final = {"results": _BY_KIND, "noise": (), "answers": _BY_KIND, "labels": ("suite", "label")}

Columns = Sequence[Sequence[str]]  # heading, format, name in the row


def report(
    folder: Path,
    *,
    titles: Mapping[str, str],
    published: Sequence[str],
    ours: str = "kvshare",
    bounds: Sequence[Bound] = (),
    regimes: tuple[str, str] = ("query", "edit-windows"),
    half: int | None = None,
    model: str | None = None,
) -> Row:
    """
    Everything that the rows in this folder say, as JSON has it; figures that are not known are None.

    `titles`: rule -> what tables call it, in their order. `published`: rules that ours is tested against.
    `regimes`: the names of the query-guided rule and of edit windows. `half`, `model`: only these rows.
    Raises:  LogError where there are no rows, or several halves or models and none is chosen
    """
    plans = read_plans(folder, half=half, model=model)
    return {
        **{name: plans[0].row[name] for name in ("model", "half")},
        "ours": ours,
        "published": [*published],
        "titles": {**titles},
        "suites": tables.suites(plans),
        "bounds": check_bounds(plans, bounds),
        "comparisons": comparisons(plans, ours, published),
        "results": tables.results(plans),
        "noise": tables.noise(plans),
        "answers": tables.answers(plans),
        "labels": tables.labels(plans),
        "regimes": tables.regimes(plans, *regimes),
    }


def write(document: Row, out: Path) -> None:
    """report.json, report.md, and each figure as SVG and PNG, into this folder; it is made if need be."""
    out.mkdir(parents=True, exist_ok=True)
    pictures = draw(document)
    for name, picture in pictures.items():
        write_whole(out / f"{name}.svg", picture.svg.encode())
        write_whole(out / f"{name}.png", picture.png)
    write_document(out / "report.json", document)
    write_whole(out / "report.md", markdown(document, [*pictures]).encode())


def markdown(document: Row, figures: Sequence[str] = ()) -> str:
    """The whole report; `figures`: names of PNG files beside it."""
    parts = [_WORDS["title"], _WORDS["opening"].format_map(document)]
    for name in ("suites", "bounds"):
        parts += _section(name, [("", document[name])], document["titles"])
    words, ours = _WORDS["comparisons"], document["titles"].get(document["ours"], document["ours"])
    parts += [words["heading"].format(ours=ours), words["text"]] if document["comparisons"] else []
    parts += [part for found in document["comparisons"] for part in _comparison(found, document["titles"])]
    parts += [_WORDS["figures"][name].strip() + f"\n\n![{name}]({name}.png)" for name in figures]
    for name, keys in _GROUPS.items():
        parts += _section(name, _grouped(document[name], keys), document["titles"])
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _comparison(found: Row, titles: Mapping[str, str]) -> list[str]:
    """Over all suites, then how often which verdict came, then suite by suite."""
    words = _WORDS["comparisons"]
    over, single = (_table(found[name], words[name], titles) for name in ("over_suites", "suites"))
    verdicts = Counter(row["verdict"] for row in found["suites"])
    counts = ", ".join(f"{verdict} {number}" for verdict, number in verdicts.items())
    kind = _WORDS["headings"][found["by"]]
    return [f"### {100 * found['budget']:g} %, {kind}", over, f"{words['counts']} {counts}.", single]


def _section(name: str, groups: Iterable[tuple[str, list[Row]]], titles: Mapping[str, str]) -> list[str]:
    """A heading, what the table says, and a table a group; nothing where there are no rows."""
    words, parts = _WORDS[name], []
    for heading, rows in groups:
        if rows:
            parts += [f"### {heading}"] if heading else []
            parts.append(_table(rows, _columns(words["columns"], rows), titles))
    return [f"## {words['heading']}\n\n{words['text']}", *parts] if parts else []


def _columns(known: Columns, rows: Sequence[Row]) -> Columns:
    """The known ones, and those of what was measured running free, whatever that is."""
    free = dict.fromkeys(name for row in rows for name in row if name.startswith("free_"))
    return [*known, *((name.removeprefix("free_").replace("_", " "), "number", name) for name in free)]


def _table(rows: Sequence[Row], columns: Columns, titles: Mapping[str, str]) -> str:
    """By suite, label and rule, rules in the order of the titles; a column that no row fills is left out."""
    order = {rule: place for place, rule in enumerate(titles)}
    groups = [(row.get("suite"), row.get("value")) for row in rows]
    places = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    ranks = [
        (places[group], order.get(row.get("rule", ""), len(order)))
        for group, row in zip(groups, rows, strict=True)
    ]
    rows = [rows[place] for place in sorted(range(len(rows)), key=ranks.__getitem__)]
    named = [
        {**row, **{name: titles.get(row[name], row[name]) for name in _RULES & row.keys()}} for row in rows
    ]
    used = [column for column in columns if any(row.get(column[2]) is not None for row in rows)]
    cells = [[_FORMATS[kind](row.get(name)) for _, kind, name in used] for row in named]
    marks = ["---" if kind == "text" else "---:" for _, kind, _ in used]
    lines = [[heading for heading, _, _ in used], marks, *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _grouped(rows: Sequence[Row], keys: Sequence[str]) -> list[tuple[str, list[Row]]]:
    """Rows by these fields, and what their table's heading is."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        heading = ", ".join(_WORDS["headings"].get(row[key], row[key]) for key in keys)
        found.setdefault(heading, []).append(row)
    return [*found.items()]


def _estimate(found: Row | None, show: Callable[[float | None], str] = digits) -> str:
    if found is None:
        return UNKNOWN
    inside = "" if found["low"] is None else f" [{show(found['low'])}, {show(found['high'])}]"
    return show(found["value"]) + inside


def _p(value: float | None) -> str:
    return UNKNOWN if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


_RULES: Final = {"rule", "against"}
_FORMATS: Final[Mapping[str, Callable[[Any], str]]] = {
    "text": lambda value: UNKNOWN if value is None else str(value).replace("|", "\\|"),
    "verdict": lambda value: {True: "reached", False: "missed", None: "not measured"}[value],
    "count": counted,
    "number": digits,
    "percent": percent,
    "estimate": _estimate,
    "share": lambda found: _estimate(found, percent),
    "p": _p,
}
