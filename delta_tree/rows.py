"""
The tables of the metadata store, and how nodes and segments become rows and come back.

Rows carry a CRC: SQLite's own check sees damaged pages, not a flipped bit within a value, and a
wrong offset would be wrong KV. Token ids, scripts and counts are plain bytes and integers.
"""

import sys
import zlib
from typing import Any

from delta_tree.forest import prompt_key
from delta_tree.node import Node, NodeId, Segment, SegmentId
from delta_tree.pieces import PieceTable
from delta_tree.script import EditScript
from delta_tree.spans import tokens_from_bytes

Row = tuple[Any, ...]

# Foreign keys are checked at commit, so that a change may be written in any order.
SCHEMA = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT",
    """CREATE TABLE segments (
        segment_id INTEGER PRIMARY KEY, namespace TEXT NOT NULL,
        first_position INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
        prefix_hash BLOB NOT NULL, generation INTEGER NOT NULL, num_bytes INTEGER NOT NULL,
        checksum BLOB NOT NULL, row_crc INTEGER NOT NULL) STRICT""",
    """CREATE TABLE nodes (
        node_id INTEGER PRIMARY KEY, namespace TEXT NOT NULL, prompt_key BLOB NOT NULL UNIQUE,
        token_ids BLOB NOT NULL,
        parent INTEGER REFERENCES nodes DEFERRABLE INITIALLY DEFERRED, script BLOB,
        exact_length INTEGER NOT NULL, created_at REAL NOT NULL, pinned INTEGER NOT NULL,
        row_crc INTEGER NOT NULL, last_used_at REAL NOT NULL, num_hits INTEGER NOT NULL) STRICT""",
    "CREATE INDEX nodes_by_parent ON nodes (parent)",
    """CREATE TABLE pieces (
        node_id INTEGER NOT NULL REFERENCES nodes ON DELETE CASCADE
            DEFERRABLE INITIALLY DEFERRED,
        place INTEGER NOT NULL,
        segment_id INTEGER NOT NULL REFERENCES segments DEFERRABLE INITIALLY DEFERRED,
        start INTEGER NOT NULL, length INTEGER NOT NULL,
        PRIMARY KEY (node_id, place)) STRICT, WITHOUT ROWID""",
    "CREATE INDEX pieces_by_segment ON pieces (segment_id)",
)

SELECT_SEGMENTS = """SELECT segment_id, namespace, first_position, num_tokens, prefix_hash,
    generation, num_bytes, checksum, row_crc FROM segments ORDER BY segment_id"""
SELECT_PIECES = "SELECT node_id, segment_id, start, length FROM pieces ORDER BY node_id, place"
SELECT_NODES = """SELECT node_id, namespace, prompt_key, token_ids, parent, script, exact_length,
    created_at, pinned, row_crc, last_used_at, num_hits FROM nodes ORDER BY created_at, node_id"""
PUT_SEGMENT = "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
# An upsert, not REPLACE: replacing a row deletes it first, and its children would dangle.
PUT_NODE = """INSERT INTO nodes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (node_id) DO UPDATE SET parent = excluded.parent, script = excluded.script,
    exact_length = excluded.exact_length, pinned = excluded.pinned, row_crc = excluded.row_crc,
    last_used_at = excluded.last_used_at, num_hits = excluded.num_hits"""


class RowError(Exception):
    """A row does not match its checksum. Stays inside the package."""


def segment_row(segment: Segment) -> Row:
    """A segment as `PUT_SEGMENT` takes it."""
    row = (
        segment.segment_id,
        segment.namespace,
        segment.first_position,
        segment.num_tokens,
        segment.prefix_hash,
        segment.generation,
        segment.num_bytes,
        segment.checksum.to_bytes(8, "little"),  # unsigned 64 bits: SQLite has no such type
    )
    return (*row, _crc(row))


def segment_of(row: Row) -> Segment:
    """
    A segment from a row of `SELECT_SEGMENTS`.

    Raises:  RowError
    """
    *values, crc = row
    if _crc(tuple(values)) != crc:
        raise RowError("a segment's row does not match its checksum")
    segment_id, namespace, first, num_tokens, prefix_hash, generation, num_bytes, checksum = values
    return Segment(
        segment_id=SegmentId(segment_id),
        namespace=sys.intern(namespace),
        first_position=first,
        num_tokens=num_tokens,
        prefix_hash=prefix_hash,
        generation=generation,
        num_bytes=num_bytes,
        checksum=int.from_bytes(checksum, "little"),
    )


def node_row(node: Node) -> Row:
    """A node as `PUT_NODE` takes it; its pieces are rows of their own, but under its CRC."""
    row = (
        node.node_id,
        node.namespace,
        prompt_key(node.namespace, node.token_ids),
        node.token_ids.astype("<i4", copy=False).tobytes(),
        node.parent,
        None if node.script is None else node.script.to_bytes(),
        node.exact_length,
        node.created_at,
        int(node.pinned),
    )
    return (*row, _crc((*row, node.pieces.to_bytes())), node.last_used_at, node.num_hits)


def node_of(row: Row, pieces: PieceTable) -> Node:
    """
    A node from a row of `SELECT_NODES`.

    Raises:  RowError, and what decoding tokens and scripts raises
    """
    *values, crc, last_used_at, num_hits = row
    if _crc((*values, pieces.to_bytes())) != crc:
        raise RowError("a node's row does not match its checksum")
    node_id, namespace, _, tokens, parent, script, exact_length, created_at, pinned = values
    return Node(
        node_id=NodeId(node_id),
        namespace=sys.intern(namespace),
        token_ids=tokens_from_bytes(tokens),
        parent=None if parent is None else NodeId(parent),
        script=None if script is None else EditScript.from_bytes(script),
        pieces=pieces,
        exact_length=exact_length,
        created_at=created_at,
        last_used_at=last_used_at,
        num_hits=num_hits,
        pinned=bool(pinned),
    )


def _crc(values: Row) -> int:
    crc = 0
    for value in values:
        blob = value if isinstance(value, bytes) else repr(value).encode()
        crc = zlib.crc32(blob, zlib.crc32(len(blob).to_bytes(8, "little"), crc))
    return crc
