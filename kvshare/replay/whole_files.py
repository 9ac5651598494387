"""
The files of a folder of results. They appear whole or not at all: a run that is killed leaves none that is
half written.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvshare.errors import LogError
from kvshare.replay.results import RESULTS_FILE, SCHEMA_VERSION, Document


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield the path at which to write a file that is to appear at `path`."""
    partial = path.with_suffix(".partial")
    yield partial
    partial.replace(path)


def write_whole(path: Path, content: bytes) -> None:
    with whole(path) as partial:
        partial.write_bytes(content)


def write_document(path: Path, document: Document) -> None:
    write_whole(path, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())


def read_results(folder: Path) -> Document:
    """
    `results.json` in a folder of results.

    Raises:  LogError if there is none, or one of something else or of another schema
    """
    path = folder / RESULTS_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except (OSError, ValueError) as exc:
        raise cannot_be_read(folder, exc) from exc
    results: Document = document if isinstance(document, dict) else {}
    kind, version = results.get("kind"), results.get("schema_version")
    if kind != "replay" or version != SCHEMA_VERSION:
        expected = f"expected one of kind replay and schema version {SCHEMA_VERSION}"
        raise LogError(f"{path}: a document of kind {kind} and schema version {version}, {expected}")
    return results


def cannot_be_read(folder: Path, exc: Exception, *, name: str = RESULTS_FILE) -> LogError:
    return LogError(
        f"{folder}: {name} cannot be read ({type(exc).__name__}); "
        "expected a folder that `kvshare replay --out` has written"
    )
