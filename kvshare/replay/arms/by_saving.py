"""
Eviction by expected saving, for replays: what leaves first has saved least for the room it takes.

Greedy-Dual-Size-Frequency (Cherkasova, 1998) with tokens as cost and size; after Cache-Craft (3.3), where
what is least reusable leaves. A server evicts the least recently used; docs/replay.md compares them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from delta_tree import DeltaTree, Node, NodeId
from kvshare.replay.arms.weightless import WeightlessKV, WeightlessTier
from kvshare.sharing.memory_keeper import MemoryKeeper
from kvshare.sharing.plan import NoPlan, Plan


class SavingKeeper(MemoryKeeper[WeightlessKV]):
    """
    A prompt is worth the tokens it is expected to save for each token that only it holds, counted from when
    it was used last: it begins as if it had been copied once whole. What leaves sets the floor that later
    uses count from, so that old merits fade.
    """

    def __init__(self, tree: DeltaTree, tier: WeightlessTier, **settings: Any) -> None:
        super().__init__(tree, tier, **settings)
        self._floor = 0.0
        self._saved: Counter[NodeId] = Counter()  # tokens
        self._since: dict[NodeId, float] = {}  # the floor at the last use

    def note_saving(self, plan: Plan | NoPlan) -> None:
        """Count what a plan's donors gave."""
        for copy in () if isinstance(plan, NoPlan) else plan.copies:
            self._saved[copy.donor] += copy.length
            self._since[copy.donor] = self._floor

    def _next_to_leave(self, namespaces: Collection[str] | None, held: Collection[NodeId]) -> Node | None:
        nodes = (node for node in self.tree.nodes() if not node.pinned and node.node_id not in held)
        if (least := min(nodes, key=self._worth, default=None)) is not None:
            self._floor = max(self._floor, self._worth(least))
        return least

    def _evict(self, node: Node) -> None:
        super()._evict(node)
        self._saved.pop(node.node_id, None)
        self._since.pop(node.node_id, None)

    def _worth(self, node: Node) -> float:
        since = self._since.setdefault(node.node_id, self._floor)
        return since + (node.num_tokens + self._saved[node.node_id]) / max(1, self._num_own_tokens(node))

    def _num_own_tokens(self, node: Node) -> int:
        own = (entry for entry in node.pieces.segment_ids if self.tree.reference_count(entry) == 1)
        return sum(self.tree.segment(entry).num_tokens for entry in own)
