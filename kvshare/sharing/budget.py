"""Counts the bytes of a memory that prompts use, and limits how many of them are pinned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from delta_tree import DeltaTree, NodeId
from kvshare.errors import ErrorCode, RequestError
from kvshare.kv.tier import Budget
from kvshare.sharing.plan import Plan

_MOST_PINNED = 0.5  # share of each memory; the rest can be evicted, so that new prompts can be stored


def bytes_of(tree: DeltaTree, node_ids: Iterable[NodeId], budget: Budget) -> int:
    """Return the bytes of the segments in a budget to which these nodes refer."""
    nodes = (tree.get(node_id) for node_id in node_ids)
    segments = {entry for node in nodes if node is not None for entry in node.pieces.segment_ids}
    return sum(tree.segment(entry).num_bytes for entry in segments if entry in budget)


def most_pinned(budget: Budget) -> int:
    """Return the bytes of a budget that pinned prompts may use."""
    return int(budget.max_bytes * _MOST_PINNED)


def check_pins(tree: DeltaTree, node_ids: Collection[NodeId], budgets: Collection[Budget]) -> None:
    """
    Check that these nodes may be pinned in addition to the pinned ones.

    Raises:  RequestError if the KV of a node is in no budget, or if too much of a budget would be pinned
    """
    for node_id in node_ids:
        pieces = tree.node(node_id).pieces.segment_ids
        if not all(any(entry in budget for budget in budgets) for entry in pieces):
            raise RequestError(
                f"node: the KV of node {node_id} is in no memory now: the vLLM replica that had it is not "
                "connected. Pin it when the replica is back, or send the prompt again first",
                param="node",
                code=ErrorCode.KV_NOT_AT_HAND,
            )
    pinned = tree.pinned()
    for budget in budgets:
        most, now = most_pinned(budget), bytes_of(tree, pinned, budget)
        then = bytes_of(tree, pinned.union(node_ids), budget)
        if now < then and most < then:  # a budget over its limit is no reason, if the nodes add nothing to it
            raise RequestError(
                f"node: {then:,} bytes of KV would be pinned, {now:,} are; at most {most:,} may be, half of "
                "the memory for KV. Unpin other prompts, or give the server more memory (store.kv_bytes, or "
                "`kvshare vllm --kv-bytes`)",
                param="node",
                code=ErrorCode.TOO_MUCH_PINNED,
            )


def copied_to_others(plan: Plan) -> Counter[NodeId]:
    """
    Count the tokens that were copied from each donor to a different text. A beginning that prompt and donor
    have in common does not count: it is an earlier turn of the same chat, or the same text again.
    """
    copied: Counter[NodeId] = Counter()
    begun: Counter[NodeId] = Counter()  # length of the common beginning with each donor
    for copy in plan.copies:
        if copy.donor_start == copy.target_start == begun[copy.donor]:
            begun[copy.donor] += copy.length
        else:
            copied[copy.donor] += copy.length
    return copied
