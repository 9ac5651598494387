"""Shorter and longer versions of a node, with the same id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from delta_tree.errors import InvalidNodeError
from delta_tree.node import Node, Piece, PieceTable, Segment
from delta_tree.spans import TokenIds, token_ids


def shortened(node: Node, num_tokens: int) -> Node:
    """Return the node cut to its first `num_tokens`. Raises InvalidNodeError if it is not longer."""
    if not 0 < num_tokens < node.num_tokens:
        raise InvalidNodeError(f"a prompt of {node.num_tokens} tokens cannot keep {num_tokens}")
    return replace(
        node,
        token_ids=token_ids(node.token_ids[:num_tokens]),
        pieces=node.pieces.first(num_tokens),
        exact_length=min(node.exact_length, num_tokens),
        deviation=node.deviation if node.exact_length < num_tokens else 0.0,
    )


def lengthened(node: Node, whole: TokenIds, segments: Sequence[Segment]) -> Node:
    """
    Return the node with the tokens `whole`. The segments are the KV of the new tokens, in order.

    If all KV of the node is exact, the new KV counts as exact, too.
    Raises:  InvalidNodeError if `whole` does not continue the node
    """
    length = node.num_tokens
    if len(whole) <= length or not np.array_equal(whole[:length], node.token_ids):
        raise InvalidNodeError(f"{len(whole)} tokens do not continue the {length} of node {node.node_id}")
    added = (Piece(segment.segment_id, 0, segment.num_tokens) for segment in segments)
    return replace(
        node,
        token_ids=whole,
        pieces=PieceTable([*node.pieces, *added]),
        exact_length=len(whole) if node.exact_length == length else node.exact_length,
    )
