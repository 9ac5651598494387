"""What docs/measured stores of the documents of benchmarks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import quote
from quote import FOLDER, MAX_LINES, QUOTED, cut, in_lines, pattern_of, quoted, store

STORED = sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.json"))
WHOLE = {"a": 1, "rows": [{"rule": "x", "kl": 0.123456, "raw": [1, 2]}, {"rule": "y", "kl": 0.5, "raw": []}]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where documents are stored during a test."""
    monkeypatch.setattr(quote, "FOLDER", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", STORED)
def test_a_stored_document_is_short_and_has_what_pages_quote_only(name: str) -> None:
    """Cut again, it stays as it is."""
    text = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_LINES
    document = json.loads(text)
    assert quoted(name, document) == document


def test_every_rule_of_the_list_is_of_a_stored_document() -> None:
    """A pattern without a document is a rule that nobody needs."""
    used = {pattern_of(name) for name in STORED}
    assert {key for key in QUOTED if not key.startswith(".")} == used - {None}


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        (None, WHOLE),
        ({"a": None}, {"a": 1}),
        ({"a": None, "absent": None}, {"a": 1}),
        ({"rows": {"*": {"rule": None}}}, {"rows": [{"rule": "x"}, {"rule": "y"}]}),
        ({"rows": {"*": {"kl": 2}}}, {"rows": [{"kl": 0.12}, {"kl": 0.5}]}),
        ({"rows": {"where": {"rule": ["y"]}, "*": {"kl": None}}}, {"rows": [{"kl": 0.5}]}),
    ],
    ids=["all", "a key", "a key that is absent", "of each entry", "digits", "some entries"],
)
def test_a_tree_of_keys_names_what_stays(kept: dict[str, object] | None, expected: object) -> None:
    """Keys, each entry of a list, digits of a number, and entries by their values."""
    assert cut(WHOLE, kept) == expected


def test_each_entry_of_a_mapping_is_named_by_a_star() -> None:
    """As of a list."""
    assert cut({"one": {"a": 1, "b": 2}, "two": None}, {"*": {"a": None}}) == {"one": {"a": 1}, "two": None}


def test_a_row_is_a_line() -> None:
    """What is too long for a line has one for each member; the text is the document, whatever is in it."""
    document: dict[str, object] = {
        "rows": [{"name": "é" * 90, "value": number} for number in range(3)],
        "empty": {},
        "none": None,
    }
    lines = in_lines(document).splitlines()
    assert len(lines) == 9
    assert json.loads("\n".join(lines)) == document


def test_what_is_too_long_to_be_read_is_not_stored(folder: Path) -> None:
    """The error says how long it is, and where to say what is quoted."""
    with pytest.raises(ValueError, match=r"big: 404 lines, at most 300 .*quote\.yaml"):
        store("big", {"rows": ["x" * 250] * 400})
    assert not list(folder.iterdir())


def test_a_document_is_cut_from_the_standard_input(tmp_path: Path) -> None:
    """By its name: of a run of chains the means by turn stay, not the rows."""
    script = tmp_path / "lab" / "scripts" / "quote.py"
    script.parent.mkdir(parents=True)
    for source in (Path(quote.__file__), Path(quote.__file__).with_suffix(".yaml")):
        (script.parent / source.name).write_bytes(source.read_bytes())
    document = json.dumps({"turns": 40, "by_turn": {"1": {"kl": 0.1}}, "rows": [1, 2, 3]})
    subprocess.run([sys.executable, script, "chains"], input=document, text=True, check=True)
    stored = json.loads((tmp_path / "docs" / "measured" / "chains.json").read_text())
    assert stored == {"turns": 40, "by_turn": {"1": {"kl": 0.1}}}
