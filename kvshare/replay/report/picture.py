"""
A plot as SVG for the page and as PNG. Only this file imports matplotlib, and only when something is drawn.

matplotlib draws in the light colours of report.css. In the SVG they become references to its variables, so
that a plot on the page is light, dark or printed with it; alone, it is light. Tooltips, which matplotlib does
not have, go through it as names of the drawn parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

TEMPLATES: Final = Path(__file__).with_name("templates")
COLOURS: Final = dict(
    re.findall(r"--(\w+): light-dark\((#\w+),", (TEMPLATES / "report.css").read_text(encoding="utf-8"))
)
WIDTH: Final = 880  # of a plot in the page's pixels

_TIP: Final = "tip: "
_SVG: Final = "{http://www.w3.org/2000/svg}"
ElementTree.register_namespace("", _SVG.strip("{}"))
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")


@dataclass(slots=True)
class Picture:
    """Draw on `figure` within `drawing()`; then there are the others."""

    figure: Figure
    svg: str = ""  # an element for a page; also a file
    png: bytes = b""  # in light colours, two pixels for one of the page


@contextmanager
def drawing(title: str, *, height: float = 350) -> Iterator[Picture]:
    """A picture to draw on, so many of the page's pixels high. Equal drawings give equal bytes."""
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(TEMPLATES / "report.mplstyle", after_reset=True):
        picture = Picture(Figure(figsize=(WIDTH / 72, height / 72)))
        yield picture
        picture.png = _saved(picture.figure, "png", {"Title": title})
        picture.svg = _for_the_page(_saved(picture.figure, "svg", {"Title": title, "Date": None}))


def tip(artist: Artist, text: str) -> None:
    """The text that appears when a reader points at this part; screen readers read all of them."""
    artist.set_gid(_TIP + text)


def _saved(figure: Figure, kind: str, metadata: dict[str, str | None]) -> bytes:
    file = BytesIO()
    figure.savefig(file, format=kind, metadata=metadata)
    return file.getvalue()


def _for_the_page(drawn: bytes) -> str:
    """With tooltips and the page's colours, and without style and names, which would be the whole page's."""
    root = ElementTree.fromstring(drawn)
    for part in [*root]:
        if part.tag == f"{_SVG}metadata" or part.find(f"{_SVG}style") is not None:
            root.remove(part)
    tips = []
    for group in [*root.iter(f"{_SVG}g")]:
        name = group.attrib.pop("id", "")
        if name.startswith(_TIP):
            tips.append(name.removeprefix(_TIP))
            ElementTree.SubElement(group, f"{_SVG}title").text = tips[-1]
    ElementTree.SubElement(root, f"{_SVG}desc").text = "; ".join(tips)
    root.attrib |= {"class": "plot", "role": "img", "style": "stroke-linejoin:round"}
    root.attrib |= {side: root.attrib[side].removesuffix("pt") for side in ("width", "height")}
    text = ElementTree.tostring(root, encoding="unicode")
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name},{colour})")
    return text
