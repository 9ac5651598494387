"""
The kvshare arms' store: the real delta tree, with the bytes that KV would take and nothing in them.

Keeps and evicts as `engines/embedded/keeping.py` does, except that the order of last use is kept at hand, so
that an eviction does not sort all nodes.
"""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Collection, Iterable

from delta_tree import DeltaTree, Node, NodeId, SegmentId
from kvshare.drafting import FinishedSequence, StoredSpan, computed_spans, draft_node, find_parent
from kvshare.plan import Plan


class Books:
    """
    Nodes, their bytes, and who was used last. `max_bytes` None: nothing is ever evicted.

    Ids come from `seed`, so that what breaks ties by id breaks them the same way in every run.
    """

    def __init__(self, *, bytes_per_token: int, max_bytes: int | None, min_tokens: int, seed: int) -> None:
        draw = random.Random(seed)
        ticks = itertools.count(1)
        self.tree = DeltaTree.open(
            None,
            identity=None,
            clock=lambda: float(next(ticks)),
            new_id=lambda: NodeId(draw.randrange(1, 2**53)),
        )
        self.num_bytes = 0
        self._segment_ids = itertools.count(1)
        self._bytes_per_token = bytes_per_token
        self._max_bytes = max_bytes
        self._min_tokens = min_tokens
        self._recent: OrderedDict[NodeId, None] = OrderedDict()  # least recently used first
        self._evicted: list[tuple[str, NodeId]] = []

    def touch(self, donors: Iterable[NodeId]) -> None:
        """Count a use of each."""
        for node_id in donors:
            self.tree.touch(node_id)
            self._recent.move_to_end(node_id)

    def keep(self, finished: FinishedSequence) -> Node | None:
        """Make a finished sequence a node; None where it was known, is too short or finds no room."""
        if finished.num_tokens < self._min_tokens:
            return None
        known = self.tree.find(finished.namespace, finished.token_ids)
        if known is not None and known.exact_length == finished.num_tokens:
            self.touch([known.node_id])
            return None
        stored = [
            StoredSpan(SegmentId(next(self._segment_ids)), span, len(span) * self._bytes_per_token)
            for span in computed_spans(finished)
        ]
        num_bytes = sum(entry.num_bytes for entry in stored)
        donors = finished.plan.donors if isinstance(finished.plan, Plan) else ()
        if not self._make_room(num_bytes, held=donors):
            return None
        parent = find_parent(finished.plan, self.tree.get)
        insertion = self.tree.insert(draft_node(finished, stored, parent=parent))
        self.num_bytes += num_bytes - insertion.freed_bytes
        self._recent[insertion.node.node_id] = None
        self._recent.move_to_end(insertion.node.node_id)
        return insertion.node if insertion.created else None

    def take_evicted(self) -> list[tuple[str, NodeId]]:
        """Who left since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def _make_room(self, num_bytes: int, *, held: Collection[NodeId]) -> bool:
        """Evict the least recently used until `num_bytes` fit; donors of the sequence at hand stay."""
        if self._fits(num_bytes):
            return True
        assert self._max_bytes is not None, "an endless store has room"
        if self._bytes_of(held) + num_bytes > self._max_bytes:
            return False
        for node_id in list(self._recent):
            if node_id in held:
                continue
            self._evict(node_id)
            if self._fits(num_bytes):
                return True
        return False

    def _evict(self, node_id: NodeId) -> None:
        namespace = self.tree.node(node_id).namespace
        self.num_bytes -= self.tree.evict(node_id).freed_bytes
        del self._recent[node_id]
        self._evicted.append((namespace, node_id))

    def _bytes_of(self, node_ids: Iterable[NodeId]) -> int:
        segments = {
            segment_id for node_id in node_ids for segment_id in self.tree.node(node_id).pieces.segment_ids
        }
        return sum(self.tree.segment(segment_id).num_bytes for segment_id in segments)

    def _fits(self, num_bytes: int) -> bool:
        return self._max_bytes is None or self.num_bytes + num_bytes <= self._max_bytes
