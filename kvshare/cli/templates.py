"""Templates of lines and tables in a YAML file, and how they are filled from the keys of a document."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from string import Formatter
from typing import Any

import yaml
from rich.box import Box
from rich.table import Table
from rich.text import Text

Document = Mapping[str, Any]

_WIDTH = 80  # columns of a terminal; tables that would need more stand closer together
_LONG_WORDS = 16  # characters; what is shorter is a name or a number with its unit


class Templates(Formatter):
    """
    The templates of one file, by name: a line, or the columns of a table.

    Beside Python's format specs there are `bytes`, `ago`, `idle` and `duration` of seconds, and `count WORD`,
    which adds its plural. None is empty.
    """

    def __init__(self, path: Path) -> None:
        self._templates = yaml.safe_load(path.read_text(encoding="utf-8"))

    def fill(self, name: str, document: Document) -> str:
        """The line of this name."""
        return self.vformat(self._templates[name], (), document)

    def say(self, name: str, document: Document) -> Text:
        """The same, taken as it is: no markup is read out of the document."""
        return Text(self.fill(name, document))

    def cells(self, name: str, document: Document) -> dict[str, str]:
        """One row of the table of this name, by column."""
        return {column: self.vformat(each, (), document) for column, each in self._templates[name].items()}

    def table(
        self,
        name: str,
        rows: Iterable[Document],
        *,
        title: str | None = None,
        box: Box | None = None,
        total: Document | None = None,
    ) -> Table:
        """
        The first column to the left, the others to the right; the total below all rows.

        Where there is no room for all, columns with sentences are wrapped, then names in the first column are
        folded; numbers never are.
        """
        lines = [list(self.cells(name, row).values()) for row in rows]
        sums = [] if total is None else [list(self.cells(name, total).values())]
        columns: dict[str, tuple[str, ...]] = dict.fromkeys(self._templates[name], ())
        columns |= zip(self._templates[name], zip(*lines, *sums, strict=True), strict=False)
        widths = [max(map(len, (*header.split(), *cells))) for header, cells in columns.items()]
        gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= _WIDTH else 1
        padding = (0, gap, 0, 0) if box is None else (0, 1)
        room = _WIDTH - (gap * (len(widths) - 1) if box is None else 2 * len(widths) + 2)
        is_wide = sum(max(len(header), width) for header, width in zip(columns, widths, strict=True)) > room
        table = Table(title=title, title_justify="left", box=box, header_style="bold", padding=padding)
        table.pad_edge = box is not None
        for number, (column, cells) in enumerate(columns.items()):
            is_prose = any(" " in cell.strip() and len(cell) > _LONG_WORDS for cell in cells)
            may_break = is_prose or (number == 0 and sum(widths) > room)
            table.add_column(
                column.replace(" ", "\n") if is_wide and not is_prose else column,
                justify="right" if number else "left",
                no_wrap=not may_break,
                overflow="fold",
            )
        for line in lines:
            table.add_row(*line)
        table.add_section()
        for line in sums:
            table.add_row(*line)
        return table

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return ""
        if unit := _UNITS.get(format_spec):
            return unit(value)
        if format_spec.startswith("count "):
            return f"{value:,} {format_spec.removeprefix('count ')}" + ("" if value == 1 else "s")
        return str(super().format_field(value, format_spec))


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _seconds(duration_s: float) -> str:
    return f"{duration_s * 1000:.0f} ms" if abs(duration_s) < 1 else f"{duration_s:.2f} s"


def _ago(duration_s: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if duration_s >= length:
            return f"{duration_s / length:.0f} {unit} ago"
    return f"{duration_s:.0f} s ago"


def _idle(duration_s: float) -> str:
    return _ago(duration_s).removesuffix(" ago")


_UNITS: Mapping[str, Callable[[float], str]] = {
    "bytes": _bytes,
    "ago": _ago,
    "idle": _idle,
    "duration": _seconds,
}
