"""
What a person reads of a replay: `report.html`, which loads nothing and runs nothing, and its plots as PNG.

    reading.py  results.json and requests.parquet -> what is shown
    words.py    the summary: what sharing saves here, beside what, and where it does not pay
    svg.py      primitives: scales, axes, lines, bars
    plots.py    the arms side by side, a function a plot; shapes.py: one arm, or the log itself
    figures.py  which plots there are, with their words
    tables.py   HTML tables; page.py: the page around it all, escaped; style.py: light, dark and print
    files.py    results in, the page and the same SVG as PNG out
"""

from kvshare.replay.report.files import REPORT_FILE, write_report

__all__ = ["REPORT_FILE", "write_report"]
