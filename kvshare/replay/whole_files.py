"""Files that appear whole or not at all: a run that is killed leaves none that is half written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write a file that is to appear at `path`."""
    partial = path.with_suffix(".partial")
    yield partial
    partial.replace(path)


def write_whole(path: Path, content: bytes) -> None:
    with whole(path) as partial:
        partial.write_bytes(content)


def write_document(path: Path, document: dict[str, Any]) -> None:
    """As JSON."""
    write_whole(path, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
