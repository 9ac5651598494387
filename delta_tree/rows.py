"""
The tables of the metadata store, and the conversion of nodes and segments to rows and back.

Each row has a CRC: SQLite's own check finds damaged pages, but not a flipped bit within a value, and a wrong
offset would be wrong KV. Token ids, pieces and counts are plain bytes and integers.
"""

import sys
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from delta_tree.forest import prompt_key
from delta_tree.node import Node, NodeId, Segment, SegmentId
from delta_tree.pieces import PieceTable
from delta_tree.spans import tokens_from_bytes

Row = tuple[Any, ...]

# A node's parent is a row of its own: when a parent is evicted, its children's rows are not written again.
SCHEMA = (
    """CREATE TABLE segments (
        segment_id INTEGER PRIMARY KEY, namespace TEXT NOT NULL,
        first_position INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
        generation INTEGER NOT NULL, num_bytes INTEGER NOT NULL,
        checksum BLOB NOT NULL, row_crc INTEGER NOT NULL) STRICT""",
    """CREATE TABLE nodes (
        node_id INTEGER PRIMARY KEY, namespace TEXT NOT NULL, prompt_key BLOB NOT NULL UNIQUE,
        token_ids BLOB NOT NULL, pieces BLOB NOT NULL, exact_length INTEGER NOT NULL,
        deviation REAL NOT NULL, created_at REAL NOT NULL, pinned INTEGER NOT NULL, row_crc INTEGER NOT NULL,
        last_used_at REAL NOT NULL, num_hits INTEGER NOT NULL) STRICT""",
    """CREATE TABLE parents (
        node_id INTEGER PRIMARY KEY REFERENCES nodes ON DELETE CASCADE,
        parent INTEGER NOT NULL REFERENCES nodes ON DELETE CASCADE,
        row_sum INTEGER NOT NULL) STRICT""",
    "CREATE INDEX parents_by_parent ON parents (parent)",
)

SELECT_SEGMENTS = "SELECT * FROM segments ORDER BY segment_id"
SELECT_NODES = "SELECT * FROM nodes ORDER BY created_at, node_id"
SELECT_PARENTS = "SELECT node_id, parent, row_sum = node_id + parent FROM parents"
PUT_SEGMENT = "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
# An upsert, not REPLACE: replacing a row deletes it first, and its children would become roots.
PUT_NODE = """INSERT INTO nodes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (node_id) DO UPDATE SET prompt_key = excluded.prompt_key,
    token_ids = excluded.token_ids, pieces = excluded.pieces,
    exact_length = excluded.exact_length, deviation = excluded.deviation,
    pinned = excluded.pinned, row_crc = excluded.row_crc,
    last_used_at = excluded.last_used_at, num_hits = excluded.num_hits"""
PUT_PARENT = "INSERT INTO parents VALUES (:node_id, :parent, :node_id + :parent)"
MOVE_CHILDREN = "UPDATE parents SET parent = :heir, row_sum = node_id + :heir WHERE parent = :gone"


class RowError(Exception):
    """A row does not match its checksum. storage.py turns it into StoreCorruptError."""


def segment_row(segment: Segment) -> Row:
    """A segment as `PUT_SEGMENT` takes it."""
    row = (
        segment.segment_id,
        segment.namespace,
        segment.first_position,
        segment.num_tokens,
        segment.generation,
        segment.num_bytes,
        segment.checksum.to_bytes(8, "little"),  # unsigned 64 bits: SQLite has no such type
    )
    return (*row, _crc_of(row))


def segment_of(row: Row) -> Segment:
    """
    A segment from a row of `SELECT_SEGMENTS`, of any version.

    Raises:  RowError
    """
    *values, crc = row
    segment_id, namespace, first, num_tokens, *_, generation, num_bytes, checksum = checked(
        values, crc, "segment"
    )
    figures = (generation, num_bytes, int.from_bytes(checksum, "little"))
    return Segment(SegmentId(segment_id), sys.intern(namespace), first, num_tokens, *figures)


def node_row(node: Node) -> Row:
    """A node as `PUT_NODE` takes it."""
    row = (
        node.node_id,
        node.namespace,
        prompt_key(node.namespace, node.token_ids),
        node.token_ids.astype("<i4", copy=False).tobytes(),
        node.pieces.to_bytes(),
        node.exact_length,
        float(node.deviation),
        node.created_at,
        int(node.pinned),
    )
    return (*row, _crc_of(row), node.last_used_at, node.num_hits)


def node_of(row: Row) -> Node:
    """
    A node from a row of `SELECT_NODES`.

    Raises:  RowError, and what decoding tokens and pieces raises
    """
    *values, crc, last_used_at, num_hits = row
    return build_node(checked(values, crc, "node"), last_used_at, num_hits)


def build_node(values: Row, last_used_at: float, num_hits: int) -> Node:
    """A node from a row's values; raises what decoding tokens and pieces raises."""
    node_id, namespace, _, tokens, pieces, exact_length, deviation, created_at, pinned = values
    return Node(
        node_id=NodeId(node_id),
        namespace=sys.intern(namespace),
        token_ids=tokens_from_bytes(tokens),
        pieces=PieceTable.from_bytes(pieces),
        exact_length=exact_length,
        deviation=deviation,
        created_at=created_at,
        last_used_at=last_used_at,
        num_hits=num_hits,
        pinned=bool(pinned),
    )


def load_parents(execute: Callable[[str], Iterable[Row]]) -> dict[NodeId, NodeId]:
    """The parent of each node that is no root. Raises RowError."""
    found = list(execute(SELECT_PARENTS))
    if not all(is_whole for _, _, is_whole in found):
        raise RowError("a parent's row does not match its sum")
    return {node_id: parent for node_id, parent, _ in found}


def checked(values: Iterable[Any], crc: int, what: str) -> Row:
    """The values of a row. Raises RowError if they do not match the row's checksum."""
    row = tuple(values)
    if _crc_of(row) != crc:
        raise RowError(f"a {what}'s row does not match its checksum")
    return row


def _crc_of(values: Row) -> int:
    crc = 0
    for value in values:
        blob = value if isinstance(value, bytes) else repr(value).encode()
        crc = zlib.crc32(blob, zlib.crc32(len(blob).to_bytes(8, "little"), crc))
    return crc
