"""
The lab's report: a folder of measured rows -> a document of plain data -> report.json, report.md and figures.

The texts and the columns of the tables are in report.md.jinja.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kvshare.replay.report.formats import UNKNOWN, counted, digits, percent
from kvshare.replay.whole_files import write_document, write_whole
from kvshare_lab.fidelity import tables
from kvshare_lab.fidelity.plots import draw
from kvshare_lab.fidelity.rows import Row, read_plans, rows_of
from kvshare_lab.fidelity.rules import RULES

_BOUNDS_FILE: Final = "bounds.yaml"  # by half: what was to be reached, see `tables.Bound`
_OURS, _QUERY_GUIDED, _WINDOWS = "kvshare", "query", "edit-windows"  # names of rules
_VERDICTS: Final = {
    True: "reached",
    False: "missed",
    None: "not measured",
    "not at equal b": "a rule without budgets",
}


def publish(folder: Path) -> dict[str, Any]:
    """Write the report of each half of which there are rows to FOLDER/report-HALF; returns where, by half."""
    path = folder / _BOUNDS_FILE
    bounds = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows = (row for file in folder.glob("*/*.jsonl") for row in rows_of(file))
    written = {}
    for half in sorted({row["half"] for row in rows if "half" in row}):
        out = folder / f"report-{half}"
        write(report(folder, half=half, bounds=bounds.get(half, ())), out)
        written[f"half {half}"] = str(out)
    return written


def report(folder: Path, *, half: int | None = None, bounds: Sequence[tables.Bound] = ()) -> Row:
    """
    All results of the rows in this folder, as JSON has them; unknown figures are None.

    `half`: only the rows of this half.
    Raises:  LogError where there are no rows, rows of both halves and none is chosen, or several models
    """
    plans = read_plans(folder, half=half)
    published = [name for name, rule in RULES.items() if rule.source]
    return {
        **{name: plans[0].row[name] for name in ("model", "half")},
        "ours": _OURS,
        "published": published,
        "titles": {name: rule.title for name, rule in RULES.items()},
        "suites": tables.suites(plans),
        "bounds": tables.check_bounds(plans, bounds),
        "comparisons": tables.comparisons(plans, _OURS, published),
        "results": tables.results(plans),
        "noise": tables.noise(plans),
        "answers": tables.answers(plans),
        "labels": tables.labels(plans),
        "regimes": tables.regimes(plans, _QUERY_GUIDED, _WINDOWS),
    }


def write(document: Row, out: Path) -> None:
    """Write report.json, report.md, and each figure as SVG and PNG to this folder, which need not exist."""
    out.mkdir(parents=True, exist_ok=True)
    pictures = draw(document)
    for name, picture in pictures.items():
        write_whole(out / f"{name}.svg", picture.svg.encode())
        write_whole(out / f"{name}.png", picture.png)
    write_document(out / "report.json", document)
    write_whole(out / "report.md", markdown(document, [*pictures]).encode())


def markdown(document: Row, figures: Sequence[str] = ()) -> str:
    """The whole report. `figures`: names of PNG files beside it."""
    loader = FileSystemLoader(Path(__file__).parent)  # Markdown, not HTML: nothing is escaped
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"table": partial(_table, titles=document["titles"]), "verdict": _verdict}
    return environment.get_template("report.md.jinja").render(document, figures=figures).strip() + "\n"


def _table(rows: Sequence[Row], columns: Sequence[tuple[str, str, str]], *, titles: Mapping[str, str]) -> str:
    """
    Markdown, by suite and label, rules in the order of the titles.

    `columns`: heading, format, name in the row; those that no row fills are left out. Scores of free-running
    answers get further columns.
    """
    order = {rule: place for place, rule in enumerate(titles)}
    groups = dict.fromkeys((row.get("suite"), row.get("value")) for row in rows)
    places = {group: place for place, group in enumerate(groups)}

    def rank(row: Row) -> tuple[int, int]:
        return places[row.get("suite"), row.get("value")], order.get(row.get("rule", ""), len(order))

    free = dict.fromkeys(name for row in rows for name in row if name.startswith("free_"))
    further = [(name.removeprefix("free_").replace("_", " "), "number", name) for name in free]
    used = [each for each in (*columns, *further) if any(row.get(each[2]) is not None for row in rows)]
    lines = [[heading for heading, _, _ in used]]
    lines.append(["---" if kind in ("text", "verdict") else "---:" for _, kind, _ in used])
    for row in sorted(rows, key=rank):
        named = {**row, **{name: titles.get(row[name], row[name]) for name in _RULES & row.keys()}}
        lines.append([_FORMATS[kind](named.get(name)) for _, kind, name in used])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _estimate(found: Row | None, show: Callable[[float | None], str] = digits) -> str:
    if found is None:
        return UNKNOWN
    inside = "" if found["low"] is None else f" [{show(found['low'])}, {show(found['high'])}]"
    return show(found["value"]) + inside


def _verdict(value: Any) -> str:
    return str(_VERDICTS.get(value, value))


_RULES: Final = {"rule", "against"}
_FORMATS: Final[Mapping[str, Callable[[Any], str]]] = {
    "text": lambda value: UNKNOWN if value is None else str(value).replace("|", "\\|"),
    "verdict": _verdict,
    "count": counted,
    "number": digits,
    "percent": percent,
    "estimate": _estimate,
    "share": lambda found: _estimate(found, percent),
    "p": lambda value: UNKNOWN if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}",
}
