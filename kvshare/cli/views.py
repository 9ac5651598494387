"""
How documents look on a terminal. Draws what it is given; asks and computes nothing.

The files in templates/ have Jinja templates over the documents' keys. `views`: the text of each document.
`tables`: their columns, each a template over the keys of a row; so are the rows of facts, which stand below
each other. Functions: `table(name, rows)`, `facts(columns)`, `findings(checks)`, `bold(text)`. Filters:
`bytes`, `ago` and `idle` and `duration` of seconds, `percent`, `number` with one of Python's format specs,
`counted` with a noun. None is empty. `{# -#}` joins a line to the next one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
import typer
import yaml
from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvshare.cli.costs import in_words
from kvshare.tables import read_table

Document = Mapping[str, Any]

_WIDTH = 80  # columns of a terminal; tables that would need more stand closer together
_WIDTH_OFF_TERMINAL = 140
_LONG_WORDS = 16  # characters; what is shorter is a name or a number with its unit
_MOST_INDENTED = 4  # levels; what is further below is indented as much
_STATE_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_FILES = sorted((Path(__file__).parent / "templates").glob("*.yaml"))
_TEMPLATES = [read_table(path) for path in _FILES]
_VIEWS = {name: text for file in _TEMPLATES for name, text in file["views"].items()}
_TABLES = {name: columns for file in _TEMPLATES for name, columns in file["tables"].items()}
_JINJA = jinja2.Environment(
    loader=jinja2.DictLoader(_VIEWS),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=lambda value: "" if value is None else value,
)


def draw(view: str, document: Document, *, width: int | None = None) -> None:
    """
    Write the document to stdout; colours only on a terminal and without NO_COLOR.

    `view`: a key of `views` in one of the templates
    `width`: columns; None is the terminal's, which is at least 80.
    """
    console = Console(highlight=False)
    if width is not None or not console.is_terminal:
        console.width = width or _WIDTH_OFF_TERMINAL

    def shown(part: RenderableType) -> str:
        """Lines, in which styles are escape sequences."""
        with console.capture() as captured:
            console.print(part)
        return captured.get().removesuffix("\n")

    prepare = _PREPARED.get(view, dict)
    text = _JINJA.get_template(view).render(
        {**document, **prepare(document)},
        document=document,
        table=lambda *name_and_rows, **settings: shown(_table(*name_and_rows, **settings)),
        facts=lambda columns: shown(_facts(columns)),
        findings=lambda checks: shown(_findings(checks)),
        bold=lambda text: shown(Text(text, style="bold")),
    )
    for line in shown(Text.from_ansi(text.rstrip("\n"))).splitlines():
        typer.echo(line.rstrip())


def _cells(row: Document, table: str) -> dict[str, str]:
    """One row of the table, by column."""
    return {column: cell.render(row) for column, cell in _columns(table).items()}


@cache
def _columns(table: str) -> dict[str, jinja2.Template]:
    return {column: _JINJA.from_string(cell) for column, cell in _TABLES[table].items()}


def _table(
    name: str,
    rows: Iterable[Document],
    *,
    title: str | None = None,
    boxed: bool = False,
    total: Document | None = None,
) -> Table:
    """
    The first column to the left, the others to the right; the total below all rows.

    Where there is no room for all, columns with sentences are wrapped, then names in the first column are
    folded; numbers never are.
    """
    lines = [list(_cells(row, name).values()) for row in rows]
    sums = [] if total is None else [list(_cells(total, name).values())]
    columns = list(zip(_columns(name), *lines, *sums, strict=True))  # each has its header, then its cells
    widths = [max(map(len, (*header.split(), *cells)), default=0) for header, *cells in columns]
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= _WIDTH else 1
    room = _WIDTH - (2 * len(widths) + 2 if boxed else gap * (len(widths) - 1))
    is_wide = sum(max(len(column[0]), width) for column, width in zip(columns, widths, strict=True)) > room
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD if boxed else None,
        header_style="bold",
        padding=(0, 1) if boxed else (0, gap, 0, 0),
        pad_edge=boxed,
    )
    for number, (header, *cells) in enumerate(columns):
        is_prose = any(" " in cell.strip() and len(cell) > _LONG_WORDS for cell in cells)
        may_break = is_prose or (number == 0 and sum(widths) > room)
        table.add_column(
            header.replace(" ", "\n") if is_wide and not is_prose else header,
            justify="right" if number else "left",
            no_wrap=not may_break,
            overflow="fold",
        )
    for line in lines:
        table.add_row(*map(Text, line))
    table.add_section()
    for line in sums:
        table.add_row(*map(Text, line))
    return table


def _facts(columns: Iterable[Mapping[str, object]]) -> Table:
    """A line for each name, with the values of all columns."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    documents = list(columns)
    for name in documents[0]:
        table.add_row(Text(name, style="bold"), *(Text(str(document[name])) for document in documents))
    return table


def _findings(checks: Iterable[Document]) -> Table:
    """State, name and detail of each check, and its remedy in a line below."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for check in checks:
        state = Text(check["state"], style=_STATE_STYLE[check["state"]])
        remedy = f"\n[dim]-> {escape(check['remedy'])}[/]" if check["remedy"] else ""
        table.add_row(state, check["name"], escape(check["detail"]) + remedy)
    return table


def _stats(document: Document) -> Document:
    """Add the costs of a running server; those of another version are not shown."""
    said = in_words(document.get("costs"))
    if said is None:
        return {"cost_lines": []}
    return {"cost_lines": [said.origin, said.rates, f"{said.break_even} if a tenth is computed"]}


def _tree(document: Document) -> Document:
    """The rows of each namespace; prompts are indented below those that they were edited from."""
    namespaces: dict[str, list[Document]] = {}
    for root in document["roots"]:
        namespaces.setdefault(root["namespace"], []).extend(_branch(root, level=0))
    return {"namespaces": namespaces}


def _branch(entry: Document, level: int) -> Iterator[Document]:
    """A prompt's row, then those of what is below it."""
    indent = "  " * min(level, _MOST_INDENTED)
    yield {**entry, "prompt": f"{indent}{entry['id']}"}
    for child in entry["children"]:
        yield from _branch(child, level + 1)
    if hidden := entry["num_children"] - len(entry["children"]):
        yield {**dict.fromkeys(entry), "prompt": f"{indent}  {hidden} more"}


def _verified(document: Document) -> Document:
    """Layers that are alike in one row, with the largest error and the smallest control."""
    alike: dict[tuple[object, ...], list[Document]] = {}
    for layer in document["layers"] if document["shares"] != "nothing" else ():
        for rows in layer["rows"]:
            moves = rows["moves"] or f"not known: {rows['why']}"
            found = {**rows, "layer": layer["layer"], "sees": layer["sees"], "moves": moves}
            key = tuple(found[name] for name in ("name", "heads", "dim", "moves", "sees"))
            alike.setdefault(key, []).append(found)
    table = [
        {
            **group[0],
            "layers": _ranges([rows["layer"] for rows in group]),
            "error": max(rows["error"] for rows in group),
            "control": min((rows["control"] for rows in group if rows["control"] is not None), default=None),
        }
        for group in alike.values()
    ]
    return {"verified": table}


def _ranges(numbers: Sequence[int]) -> str:
    """0-3, 5, 7-8"""
    runs = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    parts = [[number for _, number in run] for _, run in runs]
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _versions(document: Document) -> Document:
    libraries = {name: found or "not installed" for name, found in document["libraries"].items()}
    return {"versions": {"kvshare": document["kvshare"], "python": document["python"], **libraries}}


def _flat(document: Document, at: str = "") -> Iterator[tuple[str, str]]:
    """Nested keys as dotted paths."""
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _flat(value, at=f"{at}{name}.")
        elif isinstance(value, Sequence) and value and all(isinstance(entry, Mapping) for entry in value):
            for index, entry in enumerate(value):
                yield from _flat(entry, at=f"{at}{name}.{index}.")
        else:
            yield f"{at}{name}", f"{value:.4g}" if isinstance(value, float) else str(value)


def _replay(document: Document) -> Document:
    """The four main policies and the verdict; the report has all policies."""
    from kvshare.replay.report import parse_report, verdict

    report = parse_report(dict(document))
    policies = [policy.model_dump() for policy in report.main]
    return {"policies": policies, "num_others": len(report.arms) - len(policies), "verdict": verdict(report)}


_PREPARED: Mapping[str, Callable[[Document], Document]] = {
    "stats": _stats,
    "tree": _tree,
    "verify": _verified,
    "version": _versions,
    "bench": lambda document: {"figures": dict(_flat(document))},
    "replay": _replay,
}
"""By view: what its template needs besides the keys of the document."""


def _unit(text: Callable[..., str]) -> Callable[..., str]:
    """A filter for numbers; None is empty."""

    @wraps(text)
    def of(value: float | None, *settings: object) -> str:
        return "" if value is None else text(value, *settings)

    return of


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _owner(owner: Document) -> str:
    """Whose a namespace is, by the configured keys."""
    keys = (
        f", {'key' if len(owner['keys']) == 1 else 'keys'} {', '.join(owner['keys'])}"
        if owner["keys"]
        else ""
    )
    return f"tenant {owner['tenant']}{' (private)' if owner['scope'] == 'private' else ''}{keys}"


def _idle(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


_JINJA.filters |= {
    "bytes": _unit(_bytes),
    "duration": _unit(lambda seconds: f"{seconds * 1000:.0f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"),
    "idle": _unit(_idle),
    "ago": _unit(lambda seconds: f"{_idle(seconds)} ago"),
    "number": _unit(lambda value, spec=",": format(value, spec)),
    "counted": _unit(lambda count, noun: f"{count:,} {noun}" + ("" if count == 1 else "s")),
    "percent": _unit(lambda share, digits=2: f"{100 * share:.{digits}f} %"),
    "owner": _owner,
    "cells": _cells,
    "yaml": lambda document: yaml.safe_dump(dict(document), sort_keys=False).rstrip(),
}
