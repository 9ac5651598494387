"""
Reads metadata files of versions 1 and 2; a tree that is opened for changes rewrites them.

Version 1: a node's row held its parent and an edit script, pieces were rows, segments had a hash of what came
before them. Scripts and hashes are ignored.
Version 2: a node's row had no deviation.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable

from delta_tree.node import UNKNOWN_DEVIATION, Node, NodeId, SegmentId
from delta_tree.pieces import Piece, PieceTable
from delta_tree.rows import SELECT_NODES, Row, build_node, checked, load_parents

TABLES = {1: ("pieces", "nodes", "segments"), 2: ("parents", "nodes", "segments")}
_SELECT_PIECES = "SELECT node_id, segment_id, start, length FROM pieces ORDER BY node_id, place"


def load_nodes(
    version: int, execute: Callable[[str], Iterable[Row]]
) -> tuple[list[Node], dict[NodeId, NodeId]]:
    """
    All nodes of a file of this version, and the parent of each that is no root.

    Raises:  RowError, and what decoding tokens and pieces raises
    """
    if version == 1:
        return _load_version_1(execute)
    nodes: list[Node] = []
    for *values, crc, last_used_at, num_hits in execute(SELECT_NODES):
        nodes.append(_node_of(checked(values, crc, "node"), last_used_at, num_hits))
    return nodes, load_parents(execute)


def _load_version_1(execute: Callable[[str], Iterable[Row]]) -> tuple[list[Node], dict[NodeId, NodeId]]:
    tables: defaultdict[int, list[Piece]] = defaultdict(list)
    for node_id, segment_id, start, length in execute(_SELECT_PIECES):
        tables[node_id].append(Piece(SegmentId(segment_id), start, length))
    nodes: list[Node] = []
    parents: dict[NodeId, NodeId] = {}
    for *values, crc, last_used_at, num_hits in execute(SELECT_NODES):
        pieces = PieceTable(tables[values[0]]).to_bytes()
        *head, parent, _, exact_length, created_at, pinned, _ = checked([*values, pieces], crc, "node")
        now = (*head, pieces, exact_length, created_at, pinned)
        nodes.append(_node_of(now, last_used_at, num_hits))
        if parent is not None:
            parents[nodes[-1].node_id] = parent
    return nodes, parents


def _node_of(values: Row, last_used_at: float, num_hits: int) -> Node:
    """A node from the checked values of a version 2 row: its deviation is 0 if exact, else unknown."""
    *head, tokens, pieces, exact_length, created_at, pinned = values
    is_exact = exact_length >= len(tokens) // 4  # int32
    deviation = 0.0 if is_exact else UNKNOWN_DEVIATION
    now = (*head, tokens, pieces, exact_length, deviation, created_at, pinned)
    return build_node(now, last_used_at, num_hits)
