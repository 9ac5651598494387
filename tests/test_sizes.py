"""What a reader can hold in mind: files of at most 300 lines, bodies of at most 40."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("delta_tree", "deploy", "kvshare", "lab", "proxy", "scripts", "tests", "vector_index")
CODE = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
WORDS = [
    path for room in ROOMS for kind in ("toml", "yaml") for path in sorted((ROOT / room).rglob(f"*.{kind}"))
]
MAX_LINES, MAX_BODY_LINES = 300, 40


def num_lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def bodies(path: Path) -> Iterator[tuple[str, int]]:
    """Name and lines of each function, without its docstring."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[ast.get_docstring(node) is not None :]
            yield node.name, (first[-1].end_lineno or 0) - first[0].lineno + 1 if first else 0


def test_no_file_is_longer() -> None:
    """Documents and samples of text aside."""
    assert len(CODE) > 700
    files = [*CODE, *WORDS, *ROOT.glob("*.toml"), ROOT / "Makefile", ROOT / "config.yaml"]
    assert {
        str(path.relative_to(ROOT)): num_lines(path) for path in files if num_lines(path) > MAX_LINES
    } == {}


@pytest.mark.parametrize("room", ROOMS)
def test_no_body_is_longer(room: str) -> None:
    """A table of cases belongs above its test."""
    paths = [path for path in CODE if path.is_relative_to(ROOT / room)]
    long = [
        (path.name, name, lines) for path in paths for name, lines in bodies(path) if lines > MAX_BODY_LINES
    ]
    assert long == []
