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


class Templates(Formatter):
    """
    The templates of one file, by name: a line, or the columns of a table.

    Beside Python's format specs there are `bytes`, `ago` and `duration` of seconds, and `count WORD`, which
    adds its plural. None is empty.
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
        """The first column to the left, the others to the right; the total below all rows."""
        padding = (0, 2, 0, 0) if box is None else (0, 1)
        table = Table(title=title, title_justify="left", box=box, header_style="bold", padding=padding)
        for number, column in enumerate(self._templates[name]):
            table.add_column(column, justify="right" if number else "left")
        for row in rows:
            table.add_row(*self.cells(name, row).values())
        if total is not None:
            table.add_section()
            table.add_row(*self.cells(name, total).values())
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


_UNITS: Mapping[str, Callable[[float], str]] = {"bytes": _bytes, "ago": _ago, "duration": _seconds}
