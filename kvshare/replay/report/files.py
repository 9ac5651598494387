"""
Results in, `report.html` and PNGs out.

PNGs have a font of their own, so that the same plot is the same picture on every machine.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

import resvg_py

from kvshare.replay.report.figures import draw
from kvshare.replay.report.page import render
from kvshare.replay.report.reading import read_report
from kvshare.replay.report.style import LIGHT, plot_css

REPORT_FILE: Final = "report.html"
_ZOOM = 2  # pixels a unit: sharp on paper and on dense screens


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


def write_png(path: Path, picture: str) -> None:
    """The picture on white, as it is on the page in light mode."""
    css = plot_css(LIGHT) + f"\ntext{{font-family:{_FAMILY}}}"
    png = resvg_py.svg_to_bytes(
        svg_string=picture,
        background=LIGHT["paper"],
        style_sheet=css,
        skip_system_fonts=True,
        font_files=_FONTS,
        font_family=_FAMILY,
        zoom=_ZOOM,
    )
    partial = path.with_suffix(".partial")
    partial.write_bytes(png)
    partial.replace(path)


def _font_files() -> list[str]:
    """Of the `font-lato` package, which is only files: importing it would load what it does not need."""
    spec = find_spec("font_lato")
    folders = spec.submodule_search_locations if spec else None
    return [str(Path(folder) / "files" / "Lato-Regular.ttf") for folder in folders or ()]


_FAMILY = "Lato"
_FONTS = _font_files()
