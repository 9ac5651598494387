"""The parts of views: lines of text, and tables of rows whose cells are computed by column."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvshare.cli.views.units import text

Document = Mapping[str, Any]
Parts = Iterable[RenderableType]  # below each other; text is shown as it is, without markup
Columns = Mapping[str, Callable[[Any], object]]  # by header: the cell of a row; None is empty

_WIDTH = 80  # columns of a terminal; tables that would need more stand closer together
_LONG_WORDS = 16  # characters; what is shorter is a name or a number with its unit
_STATE_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def of(name: str, shown: Callable[..., object] = text, *settings: object) -> Callable[[Document], object]:
    """Return the cell of a column that shows a key of its row."""
    return lambda row: shown(row[name], *settings)


def bold(heading: str, rest: str = "") -> Text:
    return Text.assemble((heading, "bold"), rest)


def cells(row: object, columns: Columns) -> dict[str, str]:
    return {header: text(cell(row)) for header, cell in columns.items()}


def table(
    columns: Columns,
    rows: Iterable[object],
    *,
    title: str | None = None,
    boxed: bool = False,
    total: object = None,
) -> Table:
    """
    Return the first column to the left, the others to the right; the total below all rows.

    Where there is no room for all, columns with sentences are wrapped, then names in the first column are
    folded; numbers never are.
    """
    lines = [list(cells(row, columns).values()) for row in rows]
    sums = [] if total is None else [list(cells(total, columns).values())]
    by_column = list(zip(columns, *lines, *sums, strict=True))  # each has its header, then its cells
    widths = [max(map(len, (*header.split(), *shown)), default=0) for header, *shown in by_column]
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= _WIDTH else 1
    room = _WIDTH - (2 * len(widths) + 2 if boxed else gap * (len(widths) - 1))
    is_wide = sum(max(len(column[0]), width) for column, width in zip(by_column, widths, strict=True)) > room
    drawn = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD if boxed else None,
        header_style="bold",
        padding=(0, 1) if boxed else (0, gap, 0, 0),
        pad_edge=boxed,
    )
    for place, (header, *shown) in enumerate(by_column):
        is_prose = any(" " in cell.strip() and len(cell) > _LONG_WORDS for cell in shown)
        may_break = is_prose or (place == 0 and sum(widths) > room)
        drawn.add_column(
            header.replace(" ", "\n") if is_wide and not is_prose else header,
            justify="right" if place else "left",
            no_wrap=not may_break,
            overflow="fold",
        )
    for line in lines:
        drawn.add_row(*map(Text, line))
    drawn.add_section()
    for line in sums:
        drawn.add_row(*map(Text, line))
    return drawn


def facts(*columns: Mapping[str, object]) -> Table:
    """Return a line for each name, with the values of all columns."""
    drawn = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name in columns[0]:
        drawn.add_row(Text(name, style="bold"), *(Text(str(column[name])) for column in columns))
    return drawn


def findings(checks: Iterable[Document]) -> Table:
    """State, name and detail of each check, and its remedy in a line below."""
    drawn = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for check in checks:
        state = Text(check["state"], style=_STATE_STYLE[check["state"]])
        remedy = f"\n[dim]-> {escape(check['remedy'])}[/]" if check["remedy"] else ""
        drawn.add_row(state, check["name"], escape(check["detail"]) + remedy)
    return drawn
