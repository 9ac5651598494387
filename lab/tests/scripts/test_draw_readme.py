"""The charts of README.md and docs/benchmarks.md."""

import pytest
from matplotlib.figure import Figure
from PIL import Image

from draw_readme import DOCS, IMAGES, drawn, figures


@pytest.mark.parametrize(("name", "figure"), figures().items())
def test_charts_have_the_measured_figures(name: str, figure: Figure) -> None:
    """What an image says that it shows is what docs/measured has, and a page shows it."""
    with Image.open(IMAGES / f"{name}.png") as image:
        assert image.info["Description"] == drawn(figure), "run: .venv/bin/python lab/scripts/draw_readme.py"
    pages = (DOCS.parent / "README.md", DOCS / "benchmarks.md")
    assert any(f"images/{name}.png)" in page.read_text(encoding="utf-8") for page in pages)
