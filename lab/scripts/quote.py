"""
Cuts a benchmark's document to what pages quote, and stores it in docs/measured.

    kvshare bench ... --json | .venv/bin/python lab/scripts/quote.py NAME

NAME is that of the stored document, such as `chains` or `pairs/default`. measure.py and replay_logs.py store
theirs in the same way. quote.yaml says which members of which document stay; run the command for the others.
"""

import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "docs" / "measured"
QUOTED: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
MAX_LINES = 300  # of a stored document
_WIDTH = 200  # of a line: a row of a table with its intervals


def pattern_of(name: str) -> str | None:
    """The first line of quote.yaml that is about documents of this name; None if there is none."""
    return next((pattern for pattern in QUOTED if fnmatchcase(name, pattern)), None)


def quoted(name: str, document: Any) -> Any:
    """The members of a document that pages quote; all of them where quote.yaml does not have the name."""
    pattern = pattern_of(name)
    return document if pattern is None else cut(document, QUOTED[pattern])


def cut(value: Any, kept: dict[str, Any] | int | None) -> Any:
    """The members that `kept` names, see quote.yaml: None names all, a number rounds."""
    if isinstance(kept, int) and isinstance(value, float):
        return float(f"{value:.{kept}g}")
    if not isinstance(kept, dict) or not isinstance(value, dict | list):
        return value
    if isinstance(value, list):
        where: dict[str, list[Any]] = kept.get("where", {})
        picked = (entry for entry in value if all(entry[key] in values for key, values in where.items()))
        return [cut(entry, kept["*"]) for entry in picked]
    if "*" in kept:
        return {key: cut(entry, kept["*"]) for key, entry in value.items()}
    return {key: cut(value[key], below) for key, below in kept.items() if key in value}


def in_lines(value: Any, indent: str = "") -> str:
    """A document as JSON: in one line what fits into it, such as a row of a table."""
    line = json.dumps(value, ensure_ascii=False)
    if len(indent + line) <= _WIDTH or not isinstance(value, dict | list):
        return line
    deeper = indent + " "
    if isinstance(value, dict):
        parts = [
            f"{json.dumps(key, ensure_ascii=False)}: {in_lines(entry, deeper)}"
            for key, entry in value.items()
        ]
        return "{\n" + ",\n".join(deeper + part for part in parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(deeper + in_lines(entry, deeper) for entry in value) + f"\n{indent}]"


def store(name: str, document: Any) -> Any:
    """Write and return what pages quote of a document. Raises ValueError where that is too long to read."""
    kept = quoted(name, document)
    text = in_lines(kept) + "\n"
    if (num_lines := text.count("\n")) > MAX_LINES:
        raise ValueError(
            f"{name}: {num_lines} lines, at most {MAX_LINES} are stored: say in quote.yaml what pages quote"
        )
    path = FOLDER / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return kept


if __name__ == "__main__":
    store(sys.argv[1], json.load(sys.stdin))
