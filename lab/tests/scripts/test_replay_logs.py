"""The tables of replays that docs/replay.md quotes."""

import json

import pytest

from quote import FOLDER
from replay_logs import LOGS, VIEWS, rows, table

PAGE = (FOLDER.parent / "replay.md").read_text(encoding="utf-8").splitlines()
DOCUMENTS = sorted(
    path.stem for path in (FOLDER / "replay").glob("*.json") if not path.stem.startswith("paper-")
)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_page_has_the_rows_of_every_document(name: str) -> None:
    """No cell lacks its figure, and each row is a line of docs/replay.md."""
    document = json.loads((FOLDER / "replay" / f"{name}.json").read_text(encoding="utf-8"))
    view = next(view for view in reversed(VIEWS.values()) if name.endswith(view["suffix"]))
    log = name.removesuffix(view["suffix"])
    title = LOGS[log]["title"] if log in LOGS else f"`{log}`"
    for columns in view["tables"]:
        header, _, *lines = table(columns, rows([(title, document)], view["rows"]))
        assert header in PAGE
        assert len(lines) == (4 if view is VIEWS["stores"] else 1)
        assert [line for line in lines if line not in PAGE] == []
