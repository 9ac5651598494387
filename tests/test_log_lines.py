"""docs/operating.md explains log lines that the code has."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TABLE = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8").split("### When this is in the log\n")[1]
LINES = re.findall(r"^\| `([^`]+)` \|", TABLE, re.MULTILINE)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Every text of the packages, with `...` for each value that is put into it."""
    found = []
    for room in ("kvshare", "proxy", "vector_index"):
        for path in (ROOT / room).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
            found += [re.sub(r"%[sdg]", "...", text) for text in constants if isinstance(text, str)]
    return found


@pytest.mark.parametrize("line", LINES)
def test_the_code_logs_it(line: str, texts: list[str]) -> None:
    """One text has the parts of the line between the `...`, in their order."""
    pattern = re.compile(".*".join(re.escape(part) for part in line.split("...")), re.DOTALL)
    assert any(pattern.match(text) for text in texts)


def test_a_line_that_is_not_logged(texts: list[str]) -> None:
    """The table has lines, and the check above rejects others."""
    assert len(LINES) > 10
    assert not any(text.startswith("the replica has gone shopping") for text in texts)
