"""
The tables of the metadata store, and the conversion of nodes and segments to rows and back.

Each row has a CRC, or a sum (parents): SQLite's own check finds damaged pages, but not a flipped bit within a
value, and a wrong offset would be wrong KV. Token ids, pieces and counts are plain bytes and integers.

Files of earlier versions are read as well; a tree that is opened for changes rewrites them.
Version 1: a node's row held its parent and an edit script, pieces were rows, segments had a hash of what came
before them. Scripts and hashes are ignored.
Version 2: a node's row had no deviation.
Version 3: a node's deviation was the largest among its donors and its own; since version 4 they are added.
"""

import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

from delta_tree.errors import InvalidNodeError
from delta_tree.forest import prompt_key
from delta_tree.node import UNKNOWN_DEVIATION, Change, Node, NodeId, Piece, PieceTable, Segment, SegmentId
from delta_tree.spans import tokens_from_bytes

Row = tuple[Any, ...]

SCHEMA_VERSION = 4

# Drops and creates all tables. A parent is a row of its own: if it is evicted, its children stay as they are.
SCHEMA = (
    *(f"DROP TABLE IF EXISTS {table}" for table in ("pieces", "parents", "nodes", "segments")),
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

_SEGMENT_COLUMNS = attrgetter(*(field.name for field in fields(Segment) if field.name != "checksum"))
_SELECT_PARENTS = "SELECT node_id, parent, row_sum = node_id + parent FROM parents"
_SELECT_PIECES = "SELECT node_id, segment_id, start, length FROM pieces ORDER BY node_id, place"
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


def segment_row(segment: Segment) -> Row:
    """Return a segment as `PUT_SEGMENT` takes it."""
    # The checksum has unsigned 64 bits: SQLite has no such type.
    row = (*_SEGMENT_COLUMNS(segment), segment.checksum.to_bytes(8, "little"))
    return (*row, _crc_of(row))


def node_row(node: Node) -> Row:
    """Return a node as `PUT_NODE` takes it."""
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


def load(version: int, execute: Callable[[str], Iterable[Row]]) -> Change:
    """
    Return all that a file of this version holds, as one change to an empty forest.

    Raises:  InvalidNodeError for a row that does not match its checksum; InvalidTokensError, EditRangeError
             for tokens and pieces that cannot be decoded
    """
    segments = tuple(_segment_of(row) for row in execute("SELECT * FROM segments ORDER BY segment_id"))
    pieces: defaultdict[int, list[Piece]] = defaultdict(list)
    parents: dict[NodeId, NodeId] = {}
    if version == 1:
        for node_id, segment_id, start, length in execute(_SELECT_PIECES):
            pieces[node_id].append(Piece(SegmentId(segment_id), start, length))
    else:
        for node_id, parent, is_whole in execute(_SELECT_PARENTS):
            if not is_whole:
                raise InvalidNodeError("a parent's row does not match its sum")
            parents[node_id] = parent
    nodes: list[Node] = []
    for *values, crc, last_used_at, num_hits in execute("SELECT * FROM nodes ORDER BY created_at, node_id"):
        if version == 1:
            values.append(PieceTable(pieces[values[0]]).to_bytes())
        row = _checked(values, crc, "node")
        if version == 1:
            *head, parent, _, exact_length, created_at, pinned, table = row
            row = (*head, table, exact_length, created_at, pinned)
            if parent is not None:
                parents[row[0]] = parent
        if version < 3:
            *head, tokens, table, exact_length, created_at, pinned = row
            deviation = 0.0 if exact_length >= len(tokens) // 4 else UNKNOWN_DEVIATION  # tokens are int32
            row = (*head, tokens, table, exact_length, deviation, created_at, pinned)
        nodes.append(_node_of(row, last_used_at, num_hits))
    if version < SCHEMA_VERSION:
        generations = {segment.segment_id: segment.generation for segment in segments}
        nodes = [_summed(node, generations) for node in nodes]
    return Change(put_segments=segments, put_nodes=tuple(nodes), parents=parents)


def _summed(node: Node, generations: Mapping[SegmentId, int]) -> Node:
    """Multiply a deviation from before version 4 by the generations of its KV: an upper limit for the sum."""
    highest = max((generations.get(segment_id, 0) for segment_id in node.pieces.segment_ids), default=0)
    return replace(node, deviation=min(UNKNOWN_DEVIATION, node.deviation * max(1, highest)))


def _segment_of(row: Row) -> Segment:
    """Return a segment from a row of any version."""
    segment_id, namespace, *figures, checksum = _checked(row[:-1], row[-1], "segment")
    figures = [*figures[:2], *figures[-2:], int.from_bytes(checksum, "little")]  # without version 1's hash
    return Segment(segment_id, sys.intern(namespace), *figures)


def _node_of(row: Row, last_used_at: float, num_hits: int) -> Node:
    """Return a node from the first columns of a row of this version."""
    node_id, namespace, _, tokens, pieces, exact_length, deviation, created_at, pinned = row
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


def _checked(values: Iterable[Any], crc: int, what: str) -> Row:
    """Return the values of a row. Raises InvalidNodeError if they do not match the row's checksum."""
    row = tuple(values)
    if _crc_of(row) != crc:
        raise InvalidNodeError(f"a {what}'s row does not match its checksum")
    return row


def _crc_of(values: Row) -> int:
    crc = 0
    for value in values:
        blob = value if isinstance(value, bytes) else repr(value).encode()
        crc = zlib.crc32(blob, zlib.crc32(len(blob).to_bytes(8, "little"), crc))
    return crc
