"""
What a person reads of a replay: `report.html`, which loads and runs nothing, and its plots as PNG.

    reading.py  results.json and requests.parquet -> what is shown
    plots.py    which plots there are; the policies side by side. shapes.py: one policy, or the log itself
    picture.py  matplotlib: SVG in the page's colours, PNG
    formats.py  numbers as a reader wants them
    page.py     results in; the page, from templates/, and the PNGs out
    templates/  all words of the page, its tables, its style, and that of the plots
"""

from kvshare.replay.report.page import REPORT_FILE, verdict, write_report
from kvshare.replay.report.reading import parse_report

__all__ = ["REPORT_FILE", "parse_report", "verdict", "write_report"]
