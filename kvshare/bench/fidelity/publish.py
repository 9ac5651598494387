"""Tables and plots of what a folder holds, beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kvshare.bench.fidelity.report import report, write
from kvshare.bench.fidelity.rules import RULES

BOUNDS_FILE = "bounds.yaml"  # by half: what was to be reached, see `comparison.Bound`


def publish(folder: Path) -> dict[str, Any]:
    """Write the report of each half that is there into FOLDER/report-HALF; returns where, by half."""
    path = folder / BOUNDS_FILE
    bounds = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
    found = {}
    for half in (0, 1):
        rows = (file.read_text(encoding="utf-8") for file in folder.glob("*/*.jsonl"))
        if not any(f'"half":{half},' in each for each in rows):
            continue
        document = report(
            folder,
            titles={name: rule.title for name, rule in RULES.items()},
            published=[name for name, rule in RULES.items() if rule.published],
            regimes=("query", "edit-windows"),
            half=half,
            bounds=(bounds or {}).get(half, ()),
        )
        out = folder / f"report-{half}"
        write(document, out)
        found[f"half {half}"] = str(out)
    return found
