"""
Stores prompts whose KV is in the replicas. Replicas report what they hold; this decides which prompts to
evict.

A replica that runs out of memory drops segments by itself and reports it. All methods block for milliseconds
and may be called from any thread except the event loop's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial

from delta_tree import DeltaTree, Node, NodeDraft, NodeId, Segment, SegmentId
from kvshare.fleet.remote_tier import RemoteTier
from kvshare.fleet.report_draft import draft_of
from kvshare.fleet.routed_request import RoutedRequest
from kvshare.fleet.unclaimed import Unclaimed
from kvshare.kv.tier import Budget
from kvshare.sharing.keeper import PromptKeeper
from kvshare.telemetry import EvictionCause
from kvshare.vllm_protocol.messages import FinishedReport, Prefilled


class ReplicaKeeper(PromptKeeper[RemoteTier]):
    """
    Stores nodes for KV that replicas retained, and evicts nodes whose KV a replica has lost.

    Nodes of the last run are unclaimed until the replica that holds their KV is connected. `evict_unclaimed`
    evicts those that no replica claimed.
    """

    def __init__(self, tree: DeltaTree, tier: RemoteTier, *, min_tokens: int) -> None:
        super().__init__(tree, tier, min_tokens=min_tokens)
        self._unclaimed = Unclaimed(node.node_id for node in tree.nodes())

    def store_prompt(
        self, request: RoutedRequest, prefilled: Prefilled, held: Collection[NodeId]
    ) -> Node | None:
        """
        Store a prompt whose answer is still generated; `store` must follow.

        Returns: the node if it is new; None if it is stored already, is not stored, or has no node of its own
        without its answer. Never raises.
        """

        def write() -> Node | None:
            draft = draft_of(request, prefilled, node_of=self.tree.get)
            self._note_owner(request, draft)
            with self._writing:
                if draft is None or not self._makes_a_node(draft, len(draft.token_ids)):
                    return None  # `store` adds it together with its answer
                node = self._insert_if_fits(request.replica, draft, held)
            request.progress.prompt_not_stored = node is None
            return node

        request.progress.prompt_node = self._fail_open(write)
        if request.progress.prompt_not_stored:
            self.drop_reported(request.replica, prefilled)
        return request.progress.prompt_node

    def store(
        self, request: RoutedRequest, finished: FinishedReport, held: Collection[NodeId]
    ) -> Node | None:
        """
        Store what a replica retained of a request: as a new node, or added to the node of its prompt.

        Other prompts of the replica are evicted to make room, except those in `held`.
        Returns: the node if it is new or longer. None if it was stored already, does not fit, or the report
        is wrong; the replica then drops the reported segments. Never raises.
        """

        def write() -> Node | None:
            draft = draft_of(request, finished, node_of=self.tree.get)
            self._note_owner(request, draft)
            if draft is None or request.progress.prompt_not_stored:
                return None  # without its prompt the whole would not be stored either
            with self._writing:
                if request.progress.prompt_node is not None:
                    return self._lengthen(request.replica, request.progress.prompt_node, draft, held)
                assert request.incoming.prompt is not None, "it has a draft"
                return self._store_whole(request.replica, draft, request.incoming.prompt.num_tokens, held)

        node = self._fail_open(write)
        if node is None:
            self.drop_reported(request.replica, finished)
        return node

    def _note_owner(self, request: RoutedRequest, draft: NodeDraft | None) -> None:
        if draft is not None:  # it may be forgotten since the request came
            self.tenants.note(draft.namespace, request.incoming.owner)

    def drop_reported(self, replica: str, report: Prefilled | FinishedReport) -> None:
        """Tell a replica to drop the reported segments, except those that prompts use."""
        self.tier.add(replica, {entry.segment_id: entry.num_bytes for entry in report.stored})
        self.drop_unreferenced(entry.segment_id for entry in report.stored)

    def forget(self, segment_ids: Iterable[SegmentId], replica: str | None = None) -> None:
        """
        A replica, or all that hold them, have dropped segments: evict the prompts that used them, unless
        another replica has them, too.
        """
        dropped = frozenset(segment_ids)
        with self._writing:
            self.tier.forget(dropped, replica=replica)
            gone = frozenset(entry for entry in dropped if entry not in self.tier)
            if not any(self.tree.reference_count(entry) for entry in gone):
                return  # the usual case: the prompts were evicted before
            for node in self.tree.nodes():
                if node.node_id not in self._unclaimed and not gone.isdisjoint(node.pieces.segment_ids):
                    self.tree.unpin(node.node_id)
                    self._evict(node)
                    self.telemetry.evicted(EvictionCause.CAPACITY)

    def claim(
        self, replica: str, held: Iterable[SegmentId], max_bytes: int, *, is_listing: bool = False
    ) -> list[Node]:
        """
        A replica is connected, holds exactly the segments `held`, and may hold `max_bytes`.

        `is_listing`: it may find more in a store. Prompts that miss some wait until it is called without.
        Returns: the nodes of the last run whose KV it holds; the index does not have them yet
        """
        with self._writing:
            now_held = frozenset(held)
            self.tier.memories[replica].max_bytes = max_bytes
            gone = self.tier.held_by(replica) - now_held
            if is_listing:
                self._await(replica, gone)
            else:
                self.forget(gone, replica)
            known = {segment.segment_id: segment for segment in self.tree.segments()}
            found = {entry: known[entry].num_bytes if entry in known else 0 for entry in now_held}
            self.tier.add(replica, found)
            self._join_groups(replica, now_held)
            claimed = self._claim(replica, now_held)
            if not is_listing and self._unclaimed.end_waiting(replica):
                self._discard_unheld()
            return claimed

    def _await(self, replica: str, gone: frozenset[SegmentId]) -> None:
        """Prompts that no replica has whole without these are unclaimed again: this one may find them."""
        self.tier.forget(gone, replica=replica)
        missing = frozenset(entry for entry in gone if entry not in self.tier)
        for node in self.tree.nodes() if missing else ():
            if node.node_id not in self._unclaimed and not missing.isdisjoint(node.pieces.segment_ids):
                self._unclaimed.wait_for(replica, node.node_id)
                self.note_evicted(node.namespace, int(node.node_id))  # the index has it when it is claimed

    def adopt(self, replica: str, segments: Mapping[SegmentId, int]) -> list[Node]:
        """
        A replica has found these segments in a shared store; the values are their bytes.

        Returns: the nodes of the last run whose KV it holds now; the index does not have them yet
        """
        with self._writing:
            self.tier.add(replica, segments)
            self._join_groups(replica, segments)
            return self._claim(replica, self.tier.held_by(replica)) if self._unclaimed else []

    def _join_groups(self, replica: str, segment_ids: Iterable[SegmentId]) -> None:
        """Count a replica's segments of stored prompts against its budget; they can leave to make room."""
        used = (entry for entry in segment_ids if self.tree.reference_count(entry))
        namespaces = {self.tree.segment(entry).namespace for entry in used}
        if self._unclaimed:  # they may be evicted when they are claimed
            nodes = self.tree.nodes() if namespaces else ()
            namespaces &= {node.namespace for node in nodes if node.node_id not in self._unclaimed}
        for namespace in namespaces:
            self.tree.put_into(replica, namespace)

    def drop_orphans(self, replica: str, segment_ids: Iterable[SegmentId]) -> None:
        """Tell a replica to drop those of the segments that no prompt uses, and that others may use."""
        with self._writing:
            entries = list(segment_ids)
            self._join_groups(replica, self.tier.held_by(replica).intersection(entries))
            self.tier.drop_orphans(
                replica, [entry for entry in entries if not self.tree.reference_count(entry)]
            )

    def _claim(self, replica: str, held: frozenset[SegmentId]) -> list[Node]:
        claimed = [
            node
            for node_id in self._unclaimed
            if (node := self.tree.get(node_id)) is not None and node.pieces.segment_ids <= held
        ]
        self._unclaimed.difference_update(node.node_id for node in claimed)
        for namespace in {node.namespace for node in claimed}:
            self.tree.put_into(replica, namespace)
        return claimed

    def lose(self, replica: str) -> None:
        """A replica is lost: evict prompts whose KV only it held. What it was to drop may stay in a store."""
        with self._writing:
            self.tier.forget(self.tier.held_by(replica), replica=replica)
            self.tier.take_dropped(replica)
            self.tier.take_orphans(replica)
            self._unclaimed.end_waiting(replica)
            self._discard_unheld()

    def evict_unclaimed(self) -> None:
        """Evict the unclaimed nodes: every replica was connected or is given up."""
        with self._writing:
            self._unclaimed.give_up()
            self._discard_unheld()

    def drop_unreferenced(self, segment_ids: Iterable[SegmentId]) -> None:
        """Tell the replicas to drop those of the segments that no prompt uses."""
        with self._writing:
            self.tier.drop(entry for entry in segment_ids if not self.tree.reference_count(entry))

    def _budgets(self) -> Collection[Budget]:
        return self.tier.memories.values()

    def _discard_unheld(self) -> None:
        """
        Evict, in one transaction, all prompts whose KV no replica holds, except unclaimed ones.

        The transaction is written to disk later, so that a full disk does not block it: after a restart no
        replica claims these prompts.
        """
        waiting = (self.tree.get(node_id) for node_id in self._unclaimed)
        unclaimed = (node.pieces.segment_ids for node in waiting if node is not None)
        alive = frozenset[SegmentId]().union(*map(self.tier.held_by, self.tier.memories), *unclaimed)
        leaving = [node for node in self.tree.nodes() if not node.pieces.segment_ids <= alive]
        self.tree.discard_missing(alive, lazily=True)
        for node in leaving:
            self.note_evicted(node.namespace, int(node.node_id))
        self.telemetry.evicted(EvictionCause.LOST, len(leaving))
        freed = {entry for node in leaving for entry in node.pieces.segment_ids if entry in self.tier}
        self.drop_unreferenced(freed)

    def _store_whole(
        self, replica: str, draft: NodeDraft, num_prompt: int, held: Collection[NodeId]
    ) -> Node | None:
        """Store the prompt, then its answer, as the embedded engine does: so both evict the same prompts."""
        prompt = self._prompt_of(draft, num_prompt)
        node = self._insert_if_fits(replica, prompt or draft, held)
        if node is None or prompt is None:
            return node
        return self._lengthen(replica, node, draft, held)

    def _lengthen(self, replica: str, node: Node, draft: NodeDraft, held: Collection[NodeId]) -> Node | None:
        """Return the prompt's node, with the answer added if it fits; None if the prompt was evicted."""
        now = self.tree.get(node.node_id)
        if now is None:
            return None
        added = [s for s in draft.new_segments if s.first_position >= node.num_tokens]
        num_bytes = sum(segment.num_bytes for segment in added)
        is_known = self.tree.find(draft.namespace, draft.token_ids) is not None
        may_grow = added and not is_known and now.num_tokens == node.num_tokens
        fits = may_grow and self._make_room_at(replica, node.namespace, num_bytes, {*held, node.node_id})
        self._add(replica, added)
        lengthen = partial(self.tree.lengthen, node.node_id, draft.token_ids, added)
        if fits and (whole := self._fail_open(lengthen)) is not None:
            return whole
        self.drop_unreferenced(segment.segment_id for segment in added)
        return now  # without its answer

    def _makes_a_node(self, draft: NodeDraft, num_prompt: int) -> bool:
        """Return whether the prompt gets a node: not if it is too short, or if a donor begins with it."""
        tokens = draft.token_ids[:num_prompt]
        # The same order as in `MemoryKeeper`: `_is_wanted` marks a stored prompt as used.
        return not self._begins(draft.parent, tokens) and self._is_wanted(draft.namespace, tokens)

    def _prompt_of(self, draft: NodeDraft, num_prompt: int) -> NodeDraft | None:
        """Return the draft without the answer; None if they share a segment or the prompt gets no node."""
        is_apart = any(segment.first_position == num_prompt for segment in draft.new_segments)
        if not is_apart or not self._makes_a_node(draft, num_prompt):
            return None
        return replace(
            draft,
            token_ids=draft.token_ids[:num_prompt],
            pieces=draft.pieces.first(num_prompt),
            new_segments=tuple(s for s in draft.new_segments if s.first_position < num_prompt),
            exact_length=min(draft.exact_length, num_prompt),
            deviation=draft.deviation if draft.exact_length < num_prompt else 0.0,
        )

    def _insert_if_fits(self, replica: str, draft: NodeDraft, held: Collection[NodeId]) -> Node | None:
        """Make room and store a node. Returns None if it was stored already or does not fit."""
        if (known := self.tree.find(draft.namespace, draft.token_ids)) is not None:
            self.discard_unreadable([known.node_id])  # evicts an unclaimed one: this replaces it
        num_bytes = sum(segment.num_bytes for segment in draft.new_segments)
        is_wanted = self._is_wanted(draft.namespace, draft.token_ids)
        if not (is_wanted and self._make_room_at(replica, draft.namespace, num_bytes, held)):
            return None
        self._add(replica, draft.new_segments)
        insertion = self._insert(draft, memory=replica)
        return insertion.node if insertion.created else None

    def _make_room_at(self, replica: str, namespace: str, num_bytes: int, held: Collection[NodeId]) -> bool:
        """Return whether so many bytes fit at the replica. Evicts other prompts of it if necessary."""
        if not self._fits_tenant(namespace, num_bytes, held):
            return False
        return self._make_room(num_bytes, self.tier.memories[replica], held, (replica,))

    def _add(self, replica: str, segments: Iterable[Segment]) -> None:
        self.tier.add(replica, {segment.segment_id: segment.num_bytes for segment in segments})
