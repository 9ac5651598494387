"""Names of the product: one public class, one thing."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("delta_tree", "kvshare", "proxy", "vector_index")


def test_the_name_of_a_public_class_is_unique() -> None:
    """A reader who finds `Choice` in a traceback knows which one it is."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_"):
                places[statement.name].append(path.relative_to(ROOT).as_posix())
    assert len(places) > 400
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
