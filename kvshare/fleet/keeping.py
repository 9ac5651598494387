"""
Keeping the tree in step with what the replicas hold: they own the bytes, evict as they see fit, and tell.

All methods block, for milliseconds, and may be called from any thread but the event loop's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from delta_tree import DeltaTree, DeltaTreeError, Insertion, Node, NodeDraft, NodeId, SegmentId, TokenIds
from kvshare.fleet.tickets import BadReportError, kept_of
from kvshare.fleet.tier import ReplicaTier
from kvshare.inspection import Answer, Question
from kvshare.sharing.keeper import Keeper
from kvshare.sharing.node_draft import draft_node, find_parent
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.vllm_protocol.messages import Finished

log = logging.getLogger(__name__)


class VllmKeeper(Keeper[ReplicaTier]):
    """
    Writes nodes for what replicas kept, and takes those out whose KV is gone.

    Nodes of the last run are `unclaimed` until the replica that still holds their KV is heard; `settle` ends
    the wait for it.
    """

    def __init__(self, tree: DeltaTree, tier: ReplicaTier, *, min_tokens: int) -> None:
        super().__init__(tree, tier, min_tokens=min_tokens)
        self._nodes_of: dict[SegmentId, set[NodeId]] = {}
        self._unclaimed: set[NodeId] = set()
        for node in tree.nodes():
            self._note(node)
            self._unclaimed.add(node.node_id)

    def keep(
        self,
        replica: str,
        finished: Finished,
        *,
        namespace: str,
        prompt: TokenIds,
        plan: Plan | NoPlan,
    ) -> Node | None:
        """
        Make a node of what a replica kept of a request.

        Returns: the node if it is new; None where it was known, or what was told could not be believed: the
        replica is then to drop its segments. Never raises
        """
        self.tier.add(replica, {entry.segment_id: entry.num_bytes for entry in finished.stored})
        try:
            kept = kept_of(plan, prompt, namespace, finished)
            if kept is None:
                return None
            if kept.sequence.num_tokens >= self._min_tokens:
                parent = find_parent(kept.sequence.plan, self.tree.get)
                with self._writing:
                    insertion = self._insert(draft_node(kept.sequence, kept.stored, parent=parent))
                return insertion.node if insertion.created else None
        except (BadReportError, DeltaTreeError) as exc:
            # A donor may have been evicted since; a report that cannot be true is a bug over there.
            self._note_refused(exc)
        except Exception as exc:
            log.warning("prompt not kept: %s", type(exc).__name__, exc_info=exc)
            self.counters["fallback:commit:error"] += 1
        self.drop_unreferenced(entry.segment_id for entry in finished.stored)
        return None

    def forget(self, segment_ids: Iterable[SegmentId]) -> None:
        """A replica has let go of segments: the prompts that need them leave the tree."""
        gone = frozenset(segment_ids)
        with self._writing:
            self.tier.forget(gone)
            touched = {node_id for entry in gone for node_id in self._nodes_of.get(entry, ())}
            for node_id in touched - self._unclaimed:
                node = self.tree.get(node_id)
                if node is not None and not gone.isdisjoint(node.pieces.segment_ids):
                    if node.pinned:
                        self.tree.unpin(node_id)
                    self._evict(node)
                    self.counters["evictions"] += 1

    def ask(self, question: Question, arguments: Mapping[str, Any]) -> Answer:
        with self._writing:
            answer = super().ask(question, arguments)
            for segment_id in answer.freed_segments:
                self._nodes_of.pop(segment_id, None)
            return answer

    def claim(self, replica: str, held: Iterable[SegmentId]) -> list[Node]:
        """
        A replica is heard, and holds these segments. What it was thought to hold beyond them is gone.

        Returns: the nodes of the last run that are found again; the index must be told of them
        """
        with self._writing:
            now_held = frozenset(held)
            self.forget(self.tier.held_by(replica) - now_held)
            self.tier.add(replica, self._sizes(now_held))
            claimed = [
                node
                for node_id in self._unclaimed
                if (node := self.tree.get(node_id)) is not None and node.pieces.segment_ids <= now_held
            ]
            self._unclaimed.difference_update(node.node_id for node in claimed)
            return claimed

    def lose(self, replica: str) -> None:
        """A replica is gone, and all that it held."""
        with self._writing:
            self.tier.forget(self.tier.held_by(replica))
            self.tier.take_dropped(replica)
            self._discard_unheld()

    def settle(self) -> None:
        """Every replica was heard or given up: what is still unclaimed is gone."""
        with self._writing:
            self._unclaimed.clear()
            self._discard_unheld()

    def orphans(self, replica: str) -> frozenset[SegmentId]:
        """Segments that a replica holds and no prompt refers to."""
        return frozenset(
            entry for entry in self.tier.held_by(replica) if not self.tree.reference_count(entry)
        )

    def drop_unreferenced(self, segment_ids: Iterable[SegmentId]) -> None:
        """Let replicas drop those of the segments that no prompt refers to."""
        with self._writing:
            self.tier.drop(entry for entry in segment_ids if not self.tree.reference_count(entry))

    def _sizes(self, segment_ids: Iterable[SegmentId]) -> Mapping[SegmentId, int]:
        known = {segment.segment_id: segment.num_bytes for segment in self.tree.segments()}
        return {entry: known.get(entry, 0) for entry in segment_ids}

    def _discard_unheld(self) -> None:
        """In one transaction, as it may be all there is; prompts that are unclaimed stay."""
        waiting = [self.tree.get(node_id) for node_id in self._unclaimed]
        alive = self.tier.all_held().union(*(node.pieces.segment_ids for node in waiting if node is not None))
        leaving = [node for node in self.tree.nodes() if not node.pieces.segment_ids <= alive]
        self.tree.discard_missing(alive)
        for node in leaving:
            self.note_evicted(node.namespace, int(node.node_id))
            self._unnote(node)
        self.counters["evictions:lost"] += len(leaving)
        freed = {entry for node in leaving for entry in node.pieces.segment_ids if entry in self.tier}
        self.drop_unreferenced(freed)

    def _insert(self, draft: NodeDraft) -> Insertion:
        insertion = super()._insert(draft)
        self._note(insertion.node)
        return insertion

    def _evict(self, node: Node) -> None:
        super()._evict(node)
        self._unnote(node)

    def _note(self, node: Node) -> None:
        for segment_id in node.pieces.segment_ids:
            self._nodes_of.setdefault(segment_id, set()).add(node.node_id)

    def _unnote(self, node: Node) -> None:
        for segment_id in node.pieces.segment_ids:
            if (nodes := self._nodes_of.get(segment_id)) is not None:
                nodes.discard(node.node_id)
                if not nodes:
                    del self._nodes_of[segment_id]
