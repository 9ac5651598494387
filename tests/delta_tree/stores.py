"""What tests of stores on disk have in common."""

import sqlite3
from pathlib import Path

from delta_tree import (
    DeltaTree,
)
from delta_tree.storage import APPLICATION_ID

IDENTITY = "model-a@main float16"


def content(tree: DeltaTree) -> list[tuple[object, ...]]:
    """All of a tree that reuse depends on."""
    return sorted(
        (
            n.node_id,
            n.namespace,
            n.token_ids.tobytes(),
            tree.ancestors(n.node_id),
            n.pieces.to_bytes(),
            n.exact_length,
            n.deviation,
            n.pinned,
            sorted(map(repr, (tree.segment(s) for s in n.pieces.segment_ids))),
        )
        for n in tree.nodes()
    )


def write_earlier(path: Path, version: int) -> None:
    """A file as an earlier version wrote it."""
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.executescript(Path(__file__).with_name(f"store_of_version_{version}.sql").read_text())
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()


def edit(path: Path, statement: str) -> None:
    """Change the file behind the tree's back."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(statement)
    connection.close()
