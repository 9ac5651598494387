"""The tables of figures in README.md and docs/benchmarks.md."""

import json
from pathlib import Path

import pytest

from measure import QUOTING, ROWS, TABLE, filled, in_words, table
from quote import FOLDER


@pytest.mark.parametrize("name", ROWS)
def test_every_measured_document_is_said_in_words(name: str) -> None:
    """Each row's words find their figures in the document that lies in docs/measured."""
    document = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    for row in (ROWS[name], ROWS[name].get("brief", ROWS[name])):
        words = in_words(row["words"], document)
        assert any(character.isdigit() for character in words)
        assert "\n" not in words


@pytest.mark.parametrize("path", QUOTING, ids=lambda path: path.name)
def test_tables_have_the_measured_figures(path: Path) -> None:
    """Each page has tables, and `lab/scripts/measure.py --write` would change none of them."""
    text = path.read_text(encoding="utf-8")
    assert TABLE.search(text) is not None
    assert filled(text) == text, "run: .venv/bin/python lab/scripts/measure.py --write"


def test_only_tables_are_written() -> None:
    """What stands between the two lines is replaced by the rows that the first line names; the rest stays."""
    text = "Before.\n<!-- measured:begin proxy burst -->\nold\n<!-- measured:end -->\nAfter.\n"
    written = filled(text)
    assert written == text.replace("old\n", table(["proxy", "burst"]))
    assert filled(written) == written
    assert [line.split(" | ")[0] for line in written.splitlines()[4:6]] == [
        f"| {ROWS['proxy']['title']}",
        f"| {ROWS['burst']['title']}",
    ]


def test_a_brief_table_has_the_brief_rows() -> None:
    """A page for strangers has short titles and words of the same figures, and the same commands."""
    text = "<!-- measured:brief proxy -->\nold\n<!-- measured:end -->\n"
    assert filled(text) == text.replace("old\n", table(["proxy"], is_brief=True))
    assert f"| {ROWS['proxy']['brief']['title']} |" in filled(text)
    assert "`kvshare bench proxy --json`" in filled(text)
