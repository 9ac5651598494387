"""Every relative link and anchor of README.md, the other top-level documents and docs/ exists."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


def links(page: Path) -> list[str]:
    """The targets of a page's links that are files of this project."""
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    return [
        target for target in LINK.findall(text) if "://" not in target and not target.startswith("mailto:")
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """A link names a file that exists and, if it has an anchor, a heading of it."""
    for target in links(page):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{target}: no such file"
        assert not anchor or anchor in anchors(file), f"{target}: no such heading"


def test_every_decision_is_in_the_index() -> None:
    """docs/decisions/README.md links each page of its folder."""
    index = ROOT / "docs" / "decisions" / "README.md"
    pages = {page.name for page in index.parent.glob("*.md")} - {index.name}
    assert {target for target in links(index) if "/" not in target} == pages


def test_headings_become_anchors(tmp_path: Path) -> None:
    """Anchors are lower case, with hyphens for blanks and without punctuation; fenced text has none."""
    page = tmp_path / "page.md"
    page.write_text("# How `it` works\n```\n# no heading\n```\n## POST /v1/x, vLLM\n[x](a.md#b) `[y](z)`\n")
    assert anchors(page) == {"how-it-works", "post-v1x-vllm"}
    assert links(page) == ["a.md#b"]
