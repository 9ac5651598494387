"""
The books: which prompts are nodes, and which segments leave with them. The only writer of the tree.

What an engine does before and after (cutting tensors, making room, hearing what vLLM kept) is its own; see
`sharing/memory_keeper.py` and `fleet/keeping.py`. All methods may be called from any thread; those
that block say so.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

from delta_tree import DeltaTree, Insertion, Node, NodeDraft, NodeId, StoreError
from kvshare.inspection import Answer, Question
from kvshare.kv.tier import Tier

log = logging.getLogger(__name__)

TierT = TypeVar("TierT", bound=Tier)


class Keeper(Generic[TierT]):
    """Writes nodes, evicts them, and remembers who left for the index. Counts what went wrong."""

    def __init__(self, tree: DeltaTree, tier: TierT, *, min_tokens: int) -> None:
        self.tree = tree
        self.tier = tier
        self.counters: Counter[str] = Counter()
        self._min_tokens = min_tokens
        self._writing = threading.RLock()  # held for milliseconds: never taken on the event loop
        self._evicted: deque[tuple[str, int]] = deque()
        self._num_unstored = 0  # since the store fails

    def discard_unreadable(self, donors: Iterable[NodeId]) -> None:
        """Take those of the prompts out of the tree, pinned or not, whose KV is not all there. Blocks."""
        with self._writing:
            for node_id in dict.fromkeys(donors):
                node = self.tree.get(node_id)
                if node is None or self._has_all(node):
                    continue  # gone, or stored anew meanwhile
                self.tree.unpin(node_id)
                self._evict(node)

    def ask(self, question: Question, arguments: Mapping[str, Any]) -> Answer:
        """An administrator's question to the tree; what it evicts leaves the tier with it. Blocks."""
        with self._writing:
            answer = question(self.tree, arguments)
            self.tier.drop(answer.freed_segments)
        self._evicted.extend(answer.removed_nodes)
        return answer

    def note_evicted(self, namespace: str, node_id: int) -> None:
        """A node that the index knows and the tree does not."""
        self._evicted.append((namespace, node_id))

    def take_evicted(self) -> list[tuple[str, int]]:
        """Namespaces and ids of the nodes that left since the last call; the index still has them."""
        return [self._evicted.popleft() for _ in range(len(self._evicted))]

    def _insert(self, draft: NodeDraft) -> Insertion:
        """Make a prompt a node; raises what the tree raises, and the draft's segments are then let go."""
        try:
            insertion = self.tree.insert(draft)
        except BaseException:
            self.tier.drop(segment.segment_id for segment in draft.new_segments)
            raise
        if self._num_unstored:
            log.warning("prompts are kept again; %d were not, meanwhile", self._num_unstored)
            self._num_unstored = 0
        self.tier.drop(insertion.freed_segments)
        return insertion

    def _note_refused(self, exc: Exception) -> None:
        """Count a prompt that was not taken. A store that fails does so for all: it is logged once."""
        self.counters["fallback:commit:refused"] += 1
        if not isinstance(exc, StoreError):
            log.warning("prompt not kept: %s", exc)
            return
        self._num_unstored += 1
        if self._num_unstored == 1:
            log.warning("prompts are not kept until the store can be written: %s", exc)

    def _has_all(self, node: Node) -> bool:
        return not self.tier.fetch(node.pieces.segment_ids).missing

    def _evict(self, node: Node) -> None:
        # Written with the next prompt: a full store pays one transaction for both.
        self.tier.drop(self.tree.evict(node.node_id, lazily=True).freed_segments)
        self._evicted.append((node.namespace, int(node.node_id)))
