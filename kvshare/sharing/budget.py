"""Memory for segments: how much of one prompts take, and how much of it may be pinned."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from delta_tree import DeltaTree, NodeId, SegmentId
from kvshare.errors import ErrorCode, RequestError

_MOST_PINNED = 0.5  # of each memory; the rest is for prompts that come and go, or nothing new would be stored


class Budget(Protocol):
    """Memory for segments: what they take, what they may take, and whether one is there."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def max_bytes(self) -> int: ...

    def __contains__(self, segment_id: SegmentId) -> bool: ...


def bytes_of(tree: DeltaTree, node_ids: Iterable[NodeId], budget: Budget) -> int:
    """Of the segments in a budget that these nodes point to."""
    nodes = (tree.get(node_id) for node_id in node_ids)
    segments = {entry for node in nodes if node is not None for entry in node.pieces.segment_ids}
    return sum(tree.segment(entry).num_bytes for entry in segments if entry in budget)


def most_pinned(budget: Budget) -> int:
    """How many bytes of it pinned prompts may point to."""
    return int(budget.max_bytes * _MOST_PINNED)


def check_pins(tree: DeltaTree, node_ids: Collection[NodeId], budgets: Collection[Budget]) -> None:
    """
    Whether these nodes may be pinned beside those that are.

    Raises:  RequestError where the KV of one is in none of the budgets, or too much of one would be pinned
    """
    for node_id in node_ids:
        pieces = tree.node(node_id).pieces.segment_ids
        if not all(any(entry in budget for budget in budgets) for entry in pieces):
            raise RequestError(
                f"node: the KV of node {node_id} is in no memory now: the vLLM replica that had it is not "
                "connected. Pin it when that is back, or send the prompt again first",
                param="node",
                code=ErrorCode.KV_NOT_AT_HAND,
            )
    pinned = tree.pinned()
    for budget in budgets:
        most, now = most_pinned(budget), bytes_of(tree, pinned, budget)
        then = bytes_of(tree, pinned.union(node_ids), budget)
        if now < then and most < then:  # what is pinned elsewhere is no reason to refuse
            raise RequestError(
                f"node: {then:,} bytes of KV would be pinned, {now:,} are; at most {most:,} may be, half of "
                "the memory for KV. Unpin other prompts, or give the server more memory (store.kv_bytes, or "
                "`kvshare vllm --kv-bytes`)",
                param="node",
                code=ErrorCode.TOO_MUCH_PINNED,
            )
