"""Results in, `report.html` and PNGs out."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvshare.replay.report.figures import draw
from kvshare.replay.report.images import write_png
from kvshare.replay.report.page import render
from kvshare.replay.report.reading import read_report

REPORT_FILE: Final = "report.html"


def write_report(folder: Path) -> Path:
    """
    Draw a finished replay's folder: `report.html`, and `PLOT.png` beside it for each plot.

    Reads `results.json` and, where it is there, `requests.parquet`; returns the page's path. Plots that
    cannot be drawn leave no picture behind, an older one's included.
    Raises:  LogError
    """
    report = read_report(folder)
    drawn = draw(report)
    for name, one in drawn.items():
        path = folder / f"{name}.png"
        if one.svg is None:
            path.unlink(missing_ok=True)
        else:
            write_png(path, one.svg)
    page = folder / REPORT_FILE
    partial = page.with_suffix(".partial")
    partial.write_text(render(report, drawn), encoding="utf-8")
    partial.replace(page)
    return page
