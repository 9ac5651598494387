"""
Writes the tree for a fleet: the replicas hold the bytes, and report what they retained. Who leaves for it is
decided here; where a replica has to evict by itself, it reports that, too.

All methods block, for milliseconds, and may be called from any thread but the event loop's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from delta_tree import (
    DeltaTree,
    DeltaTreeError,
    Node,
    NodeDraft,
    NodeId,
    Segment,
    SegmentId,
    Span,
    token_ids,
)
from kvshare.fleet.in_flight import RoutedRequest
from kvshare.fleet.remote_tier import RemoteTier
from kvshare.safe_logging import classes_and_places
from kvshare.sharing.budget import Budget
from kvshare.sharing.keeper import Keeper
from kvshare.sharing.node_draft import StoredSpan, draft_node, find_parent
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.telemetry import Component, EvictionCause, FallbackReason
from kvshare.vllm_protocol.messages import Finished, Prefilled

log = logging.getLogger(__name__)


class BadReportError(ValueError):
    """What a connector says it retained does not fit the ticket it was given."""


class ReplicaKeeper(Keeper[RemoteTier]):
    """
    Writes nodes for what replicas retained, and takes those out whose KV is gone.

    Nodes of the last run are `unclaimed` until the replica that still holds their KV is connected;
    `evict_unclaimed` ends the wait for it.
    """

    def __init__(self, tree: DeltaTree, tier: RemoteTier, *, min_tokens: int) -> None:
        super().__init__(tree, tier, min_tokens=min_tokens)
        self._namespaces_at: dict[str, set[str]] = {}  # by replica: each has its own
        self._unclaimed = {node.node_id for node in tree.nodes()}

    def keep_prompt(
        self, request: RoutedRequest, prefilled: Prefilled, held: Collection[NodeId]
    ) -> Node | None:
        """
        Make a node of a prompt whose answer is still generated; `keep` must follow. Others leave as there.

        Returns: the node if it is new; None also where the prompt makes none without its answer. Never raises
        """

        def store(draft: NodeDraft) -> Node | None:
            if not self._makes_a_node(draft, len(draft.token_ids)):
                return None  # its bytes count once, with its answer's
            node = self._inserted(request.replica, draft, held)
            request.prompt_was_refused = node is None
            return node

        request.prompt_node = self._with_draft(request, prefilled, store)
        if request.prompt_was_refused:
            self.refuse(request.replica, prefilled)
        return request.prompt_node

    def keep(self, request: RoutedRequest, finished: Finished, held: Collection[NodeId]) -> Node | None:
        """
        Make a node of what a replica retained of a request, or add its answer to that of its prompt. Others
        leave for it, but for those that are `held`, until the replica has no more than it may be given.

        Returns: the node if it is new or longer; None where it was known, finds no room, or the report cannot
        be true: the replica is then to drop its segments. Never raises
        """

        def store(draft: NodeDraft) -> Node | None:
            if request.prompt_was_refused:
                return None  # and would be again
            if (prompt := request.prompt_node) is not None:
                return self._lengthened(request.replica, prompt, draft, held)
            assert request.prompt is not None, "it has a draft"
            return self._kept(request.replica, draft, request.prompt.num_tokens, held)

        node = self._with_draft(request, finished, store)
        if node is None:
            self.refuse(request.replica, finished)
        return node

    def _with_draft(
        self, request: RoutedRequest, report: Prefilled | Finished, store: Callable[[NodeDraft], Node | None]
    ) -> Node | None:
        """What `store` makes of a report, None where it fails."""
        try:
            draft = draft_of(request, report, node_of=self.tree.get)
            if draft is not None:
                with self._writing:
                    return store(draft)
        except (BadReportError, DeltaTreeError) as exc:
            # A donor may have been evicted since; a report that cannot be true is a bug over there.
            self._note_refused(exc)
        except Exception as exc:  # noqa: BLE001  logged, without its message
            log.warning("a prompt is not stored: %s", classes_and_places(exc))
            self.telemetry.fallback(Component.COMMIT, FallbackReason.ERROR)
        return None

    def refuse(self, replica: str, report: Prefilled | Finished) -> None:
        """Let a replica drop what it retained, but for what prompts refer to."""
        self.tier.add(replica, {entry.segment_id: entry.num_bytes for entry in report.stored})
        self.drop_unreferenced(entry.segment_id for entry in report.stored)

    def forget(self, segment_ids: Iterable[SegmentId]) -> None:
        """A replica has dropped segments: the prompts that need them leave the tree."""
        gone = frozenset(segment_ids)
        with self._writing:
            self.tier.forget(gone)
            if not any(self.tree.reference_count(entry) for entry in gone):
                return  # mostly: the tree let go of them first
            for node in self.tree.nodes():
                if node.node_id not in self._unclaimed and not gone.isdisjoint(node.pieces.segment_ids):
                    self.tree.unpin(node.node_id)
                    self._evict(node)
                    self.telemetry.evicted(EvictionCause.CAPACITY)

    def claim(self, replica: str, held: Iterable[SegmentId], max_bytes: int) -> list[Node]:
        """
        A replica is connected, holds these segments, and may hold so many bytes. What it was thought to hold
        beyond them is gone.

        Returns: the nodes of the last run that are found again; the index does not have them yet
        """
        with self._writing:
            now_held = frozenset(held)
            self.tier.at(replica).max_bytes = max_bytes
            self.forget(self.tier.held_by(replica) - now_held)
            known = {segment.segment_id: segment.num_bytes for segment in self.tree.segments()}
            self.tier.add(replica, {segment_id: known.get(segment_id, 0) for segment_id in now_held})
            claimed = [
                node
                for node_id in self._unclaimed
                if (node := self.tree.get(node_id)) is not None and node.pieces.segment_ids <= now_held
            ]
            self._unclaimed.difference_update(node.node_id for node in claimed)
            self._namespaces_at.setdefault(replica, set()).update(node.namespace for node in claimed)
            return claimed

    def lose(self, replica: str) -> None:
        """A replica is gone, and all that it held."""
        with self._writing:
            self.tier.forget(self.tier.held_by(replica))
            self.tier.take_dropped(replica)
            self._discard_unheld()

    def evict_unclaimed(self) -> None:
        """Every replica was connected or given up: what is still unclaimed is gone."""
        with self._writing:
            self._unclaimed.clear()
            self._discard_unheld()

    def drop_orphans(self, replica: str) -> None:
        """Let a replica drop the segments that no prompt refers to."""
        self.drop_unreferenced(self.tier.held_by(replica))

    def drop_unreferenced(self, segment_ids: Iterable[SegmentId]) -> None:
        """Let replicas drop those of the segments that no prompt refers to."""
        with self._writing:
            self.tier.drop(entry for entry in segment_ids if not self.tree.reference_count(entry))

    def _budgets(self) -> Collection[Budget]:
        return self.tier.memories

    def _discard_unheld(self) -> None:
        """
        In one change, as it may be all there is; prompts that are unclaimed stay.

        It need not be stored now: after a restart no replica claims them. So a full disk is in nobody's way.
        """
        waiting = [self.tree.get(node_id) for node_id in self._unclaimed]
        alive = self.tier.all_held().union(*(node.pieces.segment_ids for node in waiting if node is not None))
        leaving = [node for node in self.tree.nodes() if not node.pieces.segment_ids <= alive]
        self.tree.discard_missing(alive, lazily=True)
        for node in leaving:
            self.note_evicted(node.namespace, int(node.node_id))
        self.telemetry.evicted(EvictionCause.LOST, len(leaving))
        freed = {entry for node in leaving for entry in node.pieces.segment_ids if entry in self.tier}
        self.drop_unreferenced(freed)

    def _kept(self, replica: str, draft: NodeDraft, num_prompt: int, held: Collection[NodeId]) -> Node | None:
        """First the prompt, then its answer, as the embedded engine does it: so the same prompts leave."""
        prompt = self._prompt_of(draft, num_prompt)
        node = self._inserted(replica, prompt or draft, held)
        if node is None or prompt is None:
            return node
        return self._lengthened(replica, node, draft, held)

    def _lengthened(
        self, replica: str, node: Node, draft: NodeDraft, held: Collection[NodeId]
    ) -> Node | None:
        """The prompt's node with its answer, where there is one and it finds room; None where it has left."""
        now = self.tree.get(node.node_id)
        if now is None:
            return None
        added = [s for s in draft.new_segments if s.first_position >= node.num_tokens]
        num_bytes = sum(segment.num_bytes for segment in added)
        is_known = self.tree.find(draft.namespace, draft.token_ids) is not None
        may_grow = added and not is_known and now.num_tokens == node.num_tokens
        namespaces = self._namespaces_at[replica]
        has_room = may_grow and self._make_room(
            num_bytes, self.tier.at(replica), {*held, node.node_id}, namespaces
        )
        self._add(replica, added)
        if has_room:
            try:
                return self.tree.lengthen(node.node_id, draft.token_ids, added)
            except DeltaTreeError as exc:  # the prompt stays, and is indexed
                self._note_refused(exc)
        self.drop_unreferenced(segment.segment_id for segment in added)
        return now

    def _makes_a_node(self, draft: NodeDraft, num_prompt: int) -> bool:
        """Not one that is too short without its answer, nor one that a donor begins with."""
        tokens = draft.token_ids[:num_prompt]
        # In this order, as in `MemoryKeeper`: to be wanted is a use of the prompt that is stored already.
        return not self._begins(draft.parent, tokens) and self._is_wanted(draft.namespace, tokens)

    def _prompt_of(self, draft: NodeDraft, num_prompt: int) -> NodeDraft | None:
        """Without what was generated; None where that is not kept apart."""
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

    def _inserted(self, replica: str, draft: NodeDraft, held: Collection[NodeId]) -> Node | None:
        """None where it was known, or finds no room."""
        if not self._has_room(replica, draft, held):
            return None
        self._add(replica, draft.new_segments)
        insertion = self._insert(draft)
        return insertion.node if insertion.created else None

    def _add(self, replica: str, segments: Iterable[Segment]) -> None:
        self.tier.add(replica, {segment.segment_id: segment.num_bytes for segment in segments})

    def _has_room(self, replica: str, draft: NodeDraft, held: Collection[NodeId]) -> bool:
        """Whether a prompt is to become a node, and finds room once others have left."""
        namespaces = self._namespaces_at.setdefault(replica, set())
        namespaces.add(draft.namespace)
        if (known := self.tree.find(draft.namespace, draft.token_ids)) is not None:
            self.discard_unreadable([known.node_id])  # one of the last run: this one takes its place
        if not self._is_wanted(draft.namespace, draft.token_ids):
            return False
        num_bytes = sum(segment.num_bytes for segment in draft.new_segments)
        return self._make_room(num_bytes, self.tier.at(replica), held, namespaces)


def draft_of(
    request: RoutedRequest, report: Prefilled | Finished, *, node_of: Callable[[NodeId], Node | None]
) -> NodeDraft | None:
    """
    The node for what a replica retained of a request: the plan as it was carried out, and the new segments.

    Returns: None where nothing was retained
    Raises:  BadReportError if copies and segments do not cover the retained positions exactly once
    """
    if not report.stored:
        return None
    assert request.prompt is not None, "it had a ticket"
    assert request.ticket is not None, "found by its ticket"
    plan = _carried_out(request.plan, report.used, [entry.span for entry in report.repaired])
    output_ids = report.output_ids if isinstance(report, Finished) else ()
    stored = [
        StoredSpan(entry.segment_id, Span(entry.start, entry.start + entry.length), entry.num_bytes)
        for entry in report.stored
    ]
    copied = [copy.target for copy in plan.copies] if isinstance(plan, Plan) else []
    num_retained = _covered(copied + [entry.span for entry in stored])
    prompt = request.prompt.token_ids
    tokens = [*prompt.tolist(), *output_ids]
    if num_retained > len(tokens) or (output_ids and num_retained != len(tokens)):
        raise BadReportError(f"{num_retained} tokens retained of {len(prompt)} + {len(output_ids)}")
    namespace, parent = request.ticket.namespace, find_parent(plan, node_of)
    return draft_node(token_ids(tokens[:num_retained]), plan, stored, namespace=namespace, parent=parent)


def _carried_out(plan: Plan | NoPlan, used: Sequence[int], repaired: Sequence[Span]) -> Plan | NoPlan:
    """The plan with the copies that were used and what was repaired of them; all else was computed."""
    if not used:
        return NoPlan()
    if isinstance(plan, NoPlan) or len(set(used)) != len(used) or max(used) >= len(plan.copies):
        raise BadReportError("copies used that are not in the ticket")
    carried_out = replace(plan, copies=tuple(plan.copies[index] for index in sorted(used)))
    return carried_out if plan.order is None else carried_out.with_repairs(repaired)


def _covered(spans: Sequence[Span]) -> int:
    """How many positions from 0 on the spans cover. Raises BadReportError for gaps and overlaps."""
    end = 0
    for span in sorted(spans, key=lambda entry: entry.start):
        if span.start != end or not len(span):
            raise BadReportError(f"expected KV from position {end} on, got [{span.start}, {span.end})")
        end = span.end
    return end
