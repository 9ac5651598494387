"""
`kvshare bench gpu` on a terminal: a column for each attention backend, and why something was not measured.
The words are in gpu_view.yaml.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import yaml
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvshare.cli.templates import Document

_VIEW: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_JINJA = jinja2.Environment(undefined=jinja2.StrictUndefined)


def gpu(document: Document) -> list[RenderableType]:
    backends = document["backends"]
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("attention", *(backend["backend"] for backend in backends)):
        table.add_column(title)
    for name, row in _VIEW["rows"].items():
        cells = (_cell(row, backend[row["part"]]) for backend in backends)
        table.add_row(Text(name, style="bold"), *cells)
    reasons = (
        Text(f"{backend['backend']}, no {part}: {why}")
        for backend in backends
        for part, why in backend["not_measured"].items()
    )
    head = (Text(_JINJA.from_string(_VIEW[line]).render(document)) for line in ("device", "copies"))
    return [*head, "", table, "", *reasons, Text("passed" if document["passed"] else "FAILED")]


def _cell(row: Document, part: Document | None) -> Text:
    if part is None:
        return Text("-")
    return Text(_JINJA.from_string(row["cell"]).render(part, figure=row.get("figure")))
