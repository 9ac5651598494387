"""
The metadata file as version 1 wrote it: it is read, and written anew when it is opened to be changed.

A node's row held its parent and the edit script from it, pieces were rows, segments had a hash of what came
before them. Scripts and hashes are not read.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable

from delta_tree.node import Node, NodeId, SegmentId
from delta_tree.pieces import Piece, PieceTable
from delta_tree.rows import SELECT_NODES, Row, RowError, crc_of, node_of
from delta_tree.version_2 import with_deviation

SCHEMA_VERSION = 1
TABLES = ("pieces", "nodes", "segments")
_SELECT_PIECES = "SELECT node_id, segment_id, start, length FROM pieces ORDER BY node_id, place"


def load_nodes(execute: Callable[[str], Iterable[Row]]) -> tuple[list[Node], dict[NodeId, NodeId]]:
    """
    All nodes, and the parents of those that are no roots.

    Raises:  RowError, and what decoding tokens and pieces raises
    """
    tables: defaultdict[int, list[Piece]] = defaultdict(list)
    for node_id, segment_id, start, length in execute(_SELECT_PIECES):
        tables[node_id].append(Piece(SegmentId(segment_id), start, length))
    nodes: list[Node] = []
    parents: dict[NodeId, NodeId] = {}
    for row in execute(SELECT_NODES):
        *values, crc, last_used_at, num_hits = row
        pieces = PieceTable(tables[row[0]]).to_bytes()
        if crc_of((*values, pieces)) != crc:
            raise RowError("a node's row does not match its checksum")
        *head, parent, _, exact_length, created_at, pinned = values
        now = [*head, pieces, exact_length, created_at, pinned]
        nodes.append(node_of(with_deviation(now, last_used_at, num_hits)))
        if parent is not None:
            parents[nodes[-1].node_id] = parent
    return nodes, parents
