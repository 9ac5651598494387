"""
The report of a replay for people: `report.html`, which loads and runs nothing, and its plots as PNG.

    reading.py  results.json and requests.parquet -> what is shown
    plots.py    which plots there are; the policies side by side. shapes.py: one policy, or the log itself
    picture.py  matplotlib: SVG in the page's colours, PNG
    formats.py  numbers as a reader wants them
    templates/  all words of the page, its tables, its style, and that of the plots

In templates/ everything that comes from data is escaped.
"""

import json
import shlex
from collections.abc import Mapping
from functools import cache
from html import unescape
from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kvshare.replay.report.formats import FILTERS
from kvshare.replay.report.picture import TEMPLATES, Picture
from kvshare.replay.report.plots import draw
from kvshare.replay.report.reading import Report, gain, parse_report, read_report
from kvshare.replay.results import Figures, PolicyTimes, finite
from kvshare.replay.whole_files import write_whole

__all__ = ["REPORT_FILE", "parse_report", "render", "verdict", "write_report"]

REPORT_FILE: Final = "report.html"


def write_report(folder: Path) -> Path:
    """
    Draw a finished replay's folder: `report.html`, and `PLOT.png` next to it for each plot.

    Reads `results.json` and, where it is there, `requests.parquet`; returns the page's path. Older pictures
    of plots that cannot be drawn now are removed. Raises:  LogError
    """
    report = read_report(folder)
    pictures = draw(report)
    for name, picture in pictures.items():
        path = folder / f"{name}.png"
        if picture is None:
            path.unlink(missing_ok=True)
        else:
            write_whole(path, picture.png)
    page = folder / REPORT_FILE
    write_whole(page, render(report, pictures).encode())
    return page


def render(report: Report, pictures: Mapping[str, Picture | None]) -> str:
    """Return the whole page. `pictures`: the plots by name; what could not be drawn has a note instead."""
    config = json.dumps(report.config, indent=2, ensure_ascii=False)
    page = _environment().get_template("page.html.jinja")
    return page.render(report=report, pictures=pictures, config=config)


def verdict(report: Report) -> str:
    summary = _environment().get_template("summary.html.jinja").module
    return " ".join(unescape(summary.headline(report)).split())  # type: ignore[attr-defined]  # a macro


@cache
def _environment() -> Environment:
    made = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
    made.trim_blocks = made.lstrip_blocks = True
    made.filters |= {**FILTERS, "finite": finite, "gain": gain, "quote": shlex.quote}
    made.globals |= {"no_figures": Figures(), "no_times": PolicyTimes(), "zip": zip}
    return made
