"""
The metadata file as version 2 wrote it: it is read, and written anew when it is opened to be changed.

A node's row did not say how far an answer behind it may be off.
"""

from collections.abc import Callable, Iterable

from delta_tree.node import UNKNOWN_DEVIATION, Node, NodeId
from delta_tree.rows import SELECT_NODES, SELECT_PARENTS, Row, RowError, crc_of, node_of

SCHEMA_VERSION = 2
TABLES = ("parents", "nodes", "segments")


def load_nodes(execute: Callable[[str], Iterable[Row]]) -> tuple[list[Node], dict[NodeId, NodeId]]:
    """
    All nodes, and the parents of those that are no roots.

    Raises:  RowError, and what decoding tokens and pieces raises
    """
    nodes = [_node_of(row) for row in execute(SELECT_NODES)]
    return nodes, load_parents(execute)


def load_parents(execute: Callable[[str], Iterable[Row]]) -> dict[NodeId, NodeId]:
    """Raises RowError. Version 3 has the same table."""
    found = list(execute(SELECT_PARENTS))
    if not all(is_whole for _, _, is_whole in found):
        raise RowError("a parent's row does not match its sum")
    return {node_id: parent for node_id, parent, _ in found}


def _node_of(row: Row) -> Node:
    *values, crc, last_used_at, num_hits = row
    if crc_of(tuple(values)) != crc:
        raise RowError("a node's row does not match its checksum")
    return node_of(with_deviation(values, last_used_at, num_hits))


def with_deviation(values: list[object], last_used_at: float, num_hits: int) -> Row:
    """A node's row of this version from the checked values of an earlier one."""
    *head, tokens, pieces, exact_length, created_at, pinned = values
    assert isinstance(tokens, bytes)
    assert isinstance(exact_length, int)
    is_exact = exact_length >= len(tokens) // 4  # int32
    now = (*head, tokens, pieces, exact_length, 0.0 if is_exact else UNKNOWN_DEVIATION, created_at, pinned)
    return (*now, crc_of(now), last_used_at, num_hits)
