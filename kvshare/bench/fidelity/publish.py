"""Tables and plots of what a folder holds, beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvshare.bench.fidelity.report import report, write
from kvshare.bench.fidelity.rules import RULES


def publish(folder: Path) -> dict[str, Any]:
    """Write the report of each half that is there into FOLDER/report-HALF; returns where, by half."""
    found = {}
    for half in (0, 1):
        paths = [path for path in folder.glob("*/*.jsonl") if f'"half":{half}' in _first_line(path)]
        if not paths:
            continue
        document = report(
            folder,
            titles={name: rule.title for name, rule in RULES.items()},
            published=[name for name, rule in RULES.items() if rule.published],
            regimes=("query", "edit-windows"),
            half=half,
        )
        out = folder / f"report-{half}"
        write(document, out)
        found[f"half {half}"] = str(out)
    return found


def _first_line(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline()
