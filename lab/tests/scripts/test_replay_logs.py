"""The tables of replays that docs/replay.md quotes."""

import json

import pytest

from replay_logs import FOLDER, VIEWS, kept, rows, table

DOCUMENTS = sorted(path.stem for path in FOLDER.glob("*.json") if not path.stem.startswith("paper-"))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_measured_document_fills_its_tables(name: str) -> None:
    """No cell lacks its figure, and a document that is kept again stays as it is."""
    document = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    view = next(view for view in reversed(VIEWS.values()) if name.endswith(view["suffix"]))
    for columns in view["tables"]:
        header, rule, *lines = table(columns, rows([("a log", document)], view["rows"]))
        assert rule.count("|") == header.count("|")
        assert len(lines) == (4 if view is VIEWS["stores"] else 1)
        assert all(line.startswith("| a log |") and "%" in line for line in lines)
    assert kept(document) == document
