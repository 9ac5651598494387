"""
Keeping what was computed: new KV becomes segments, the prompt becomes a node, and room is made for both.

Nothing here is on the way of an answer. All methods may be called from any thread; those that block say so.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from delta_tree import (
    DeltaTree,
    DeltaTreeError,
    Node,
    NodeDraft,
    NodeId,
    Piece,
    PieceTable,
    Segment,
    Span,
    TokenIds,
    merge,
    new_segment_id,
)
from kvshare.inspection import Answer, Question
from kvshare.kv.memory_tier import MemoryTier
from kvshare.kv.segment import SegmentKV
from kvshare.kv.sequence import SequenceKV
from kvshare.plan import NoPlan, Plan

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """A finished sequence: its tokens, the plan it came from, and the KV of as many slots."""

    namespace: str
    token_ids: TokenIds  # (T,) prompt and generated tokens whose KV is computed
    plan: Plan | NoPlan
    kv: SequenceKV


class Keeper:
    """
    The only writer of tree and tier. Counts what went wrong in `counters`.

    Donors in use are held: they are not evicted to make room. An administrator may still evict them.
    """

    def __init__(self, tree: DeltaTree, tier: MemoryTier, *, min_tokens: int, counters: Counter[str]) -> None:
        self._tree = tree
        self._tier = tier
        self._min_tokens = min_tokens
        self._counters = counters
        self._writing = threading.Lock()  # held for milliseconds: never taken on the event loop
        self._held: Counter[NodeId] = Counter()
        self._held_lock = threading.Lock()
        self._evicted: deque[tuple[str, int]] = deque()

    def hold(self, plan: Plan | NoPlan) -> None:
        """Keep a plan's donors from being evicted while the request runs."""
        if isinstance(plan, Plan):
            with self._held_lock:
                self._held.update(plan.donors)

    def release(self, plan: Plan | NoPlan) -> None:
        """Undo `hold`."""
        if isinstance(plan, Plan):
            with self._held_lock:
                self._held.subtract(plan.donors)
                self._held += Counter()  # drops the zeros

    def commit(self, computed: Computed) -> Node | None:
        """
        Keep a finished sequence: new KV as segments, the prompt as a node. Blocks.

        Returns: the node if it is new; None where the prompt was known, or nothing was kept (too large, donor
        gone, store failing); never raises
        """
        try:
            return self._commit(computed)
        except DeltaTreeError as exc:
            # A donor may have been evicted by an administrator in the meantime. Nothing was stored.
            log.warning("prompt not kept: %s", exc)
            self._counters["fallback:commit:refused"] += 1
        except Exception as exc:
            log.warning("prompt not kept: %s", type(exc).__name__, exc_info=exc)
            self._counters["fallback:commit:error"] += 1
        return None

    def discard_unreadable(self, donors: Iterable[NodeId]) -> None:
        """Take those of the prompts out of the tree, pinned or not, whose KV is not all there. Blocks."""
        with self._writing:
            for node_id in dict.fromkeys(donors):
                node = self._tree.get(node_id)
                if node is None or all(segment_id in self._tier for segment_id in node.pieces.segment_ids):
                    continue  # gone, or stored anew meanwhile
                self._tree.unpin(node_id)
                self._evict(node)

    def ask(self, question: Question, arguments: Mapping[str, Any]) -> Answer:
        """An administrator's question to the tree; what it evicts leaves the tier with it. Blocks."""
        with self._writing:
            answer = question(self._tree, arguments)
            self._tier.drop(answer.freed_segments)
        self._evicted.extend(answer.removed_nodes)
        return answer

    def note_evicted(self, namespace: str, node_id: int) -> None:
        """A node that the index knows and the tree does not."""
        self._evicted.append((namespace, node_id))

    def take_evicted(self) -> list[tuple[str, int]]:
        """Namespaces and ids of the nodes that left since the last call; the index still has them."""
        return [self._evicted.popleft() for _ in range(len(self._evicted))]

    def _commit(self, computed: Computed) -> Node | None:
        num_tokens = len(computed.token_ids)
        if num_tokens < self._min_tokens:
            return None
        known = self._tree.find(computed.namespace, computed.token_ids)
        if known is not None and known.exact_length == num_tokens:
            self._tree.touch(known.node_id)
            return None
        num_computed = sum(len(span) for span in _computed_spans(computed.plan, num_tokens))
        if num_computed * computed.kv.geometry.bytes_per_token > self._tier.max_bytes:
            self._counters["fallback:commit:too_large"] += 1
            return None
        draft, kept = _drafted(computed, self._known_parent(computed.plan))
        with self._writing:
            plan = computed.plan
            if isinstance(plan, Plan) and not self._has_all(plan):
                if plan.num_copied:
                    self._counters["fallback:commit:donor_gone"] += 1
                    return None
                # Everything in the slots is exact, wherever it came from: keep it whole.
                draft, kept = _drafted(replace(computed, plan=NoPlan("donor_gone")), None)
            return self._store(draft, kept)

    def _store(self, draft: NodeDraft, kept: Sequence[SegmentKV]) -> Node | None:
        """Make room, then put KV and node in place, in an order in which nobody finds a node without KV."""
        num_bytes = sum(kv.num_bytes for kv in kept)
        if not self._make_room(num_bytes):
            self._counters["fallback:commit:no_room"] += 1
            return None
        for segment, kv in zip(draft.new_segments, kept, strict=True):
            self._tier.put(segment.segment_id, kv, segment.checksum)
        try:
            insertion = self._tree.insert(draft)
        except BaseException:
            self._tier.drop(segment.segment_id for segment in draft.new_segments)
            raise
        self._tier.drop(insertion.freed_segments)
        return insertion.node if insertion.created else None

    def _known_parent(self, plan: Plan | NoPlan) -> NodeId | None:
        """The donor that gave most, if it is still there."""
        if isinstance(plan, NoPlan):
            return None
        given: Counter[NodeId] = Counter()
        for copy in plan.copies:
            given[copy.donor] += copy.length
        parent, _ = given.most_common(1)[0]
        return parent if self._tree.get(parent) is not None else None

    def _has_all(self, plan: Plan) -> bool:
        return all(copy.segment_id in self._tier for copy in plan.copies)

    def _make_room(self, num_bytes: int) -> bool:
        """Evict the least recently used prompts until `num_bytes` fit; held and pinned ones stay."""
        if self._fits(num_bytes):
            return True
        with self._held_lock:
            held = frozenset(self._held)
        if self._kept_bytes(held) + num_bytes > self._tier.max_bytes:
            return False  # evicting all the others would not be enough: evict nobody
        for candidate in self._tree.eviction_candidates():
            if candidate.node_id not in held:
                self._evict(candidate)
                self._counters["evictions"] += 1
                if self._fits(num_bytes):
                    return True
        return False

    def _kept_bytes(self, held: frozenset[NodeId]) -> int:
        """Bytes of the segments that held and pinned nodes point to."""
        kept = {
            segment_id
            for node in self._tree.nodes()
            if node.pinned or node.node_id in held
            for segment_id in node.pieces.segment_ids
        }
        return sum(self._tree.segment(segment_id).num_bytes for segment_id in kept)

    def _fits(self, num_bytes: int) -> bool:
        return self._tier.num_bytes + num_bytes <= self._tier.max_bytes

    def _evict(self, node: Node) -> None:
        self._tier.drop(self._tree.evict(node.node_id).freed_segments)
        self._evicted.append((node.namespace, int(node.node_id)))


def _drafted(computed: Computed, parent: NodeId | None) -> tuple[NodeDraft, list[SegmentKV]]:
    """The node for a finished sequence, and the KV of its new segments, cut out of the slots."""
    num_tokens = len(computed.token_ids)
    spans = _computed_spans(computed.plan, num_tokens)
    kept = [computed.kv.cut(span) for span in spans]
    segments = [_describe(computed, span, kv) for span, kv in zip(spans, kept, strict=True)]
    draft = NodeDraft(
        namespace=computed.namespace,
        token_ids=computed.token_ids,
        parent=parent,
        pieces=_piece_table(computed.plan, spans, segments),
        new_segments=tuple(segments),
        exact_length=_exact_length(computed.plan, num_tokens),
    )
    return draft, kept


def _computed_spans(plan: Plan | NoPlan, num_tokens: int) -> tuple[Span, ...]:
    """What was computed for this sequence: the placeholders, and everything that was generated."""
    if isinstance(plan, NoPlan):
        return (Span(0, num_tokens),)
    spans = [Span(span.start, min(span.end, num_tokens)) for span in plan.placeholders]
    return merge([*spans, Span(min(plan.num_tokens, num_tokens), num_tokens)])


def _exact_length(plan: Plan | NoPlan, num_tokens: int) -> int:
    """Everything before the first approximate copy was computed after exact KV only."""
    if isinstance(plan, NoPlan) or plan.first_approximate >= plan.num_tokens:
        return num_tokens
    return plan.first_approximate


def _describe(computed: Computed, span: Span, kv: SegmentKV) -> Segment:
    prefix = computed.token_ids[: span.start]
    return Segment(
        segment_id=new_segment_id(),
        namespace=computed.namespace,
        first_position=span.start,
        num_tokens=len(span),
        prefix_hash=hashlib.sha256(prefix.astype("<i4").tobytes()).digest()[:16],
        generation=_generation(computed.plan, span),
        num_bytes=kv.num_bytes,
        checksum=kv.checksum(),
    )


def _generation(plan: Plan | NoPlan, span: Span) -> int:
    """0 before the first approximate copy, the plan's behind it."""
    if isinstance(plan, NoPlan) or span.start < plan.first_approximate:
        return 0
    return plan.generation


def _piece_table(plan: Plan | NoPlan, spans: Sequence[Span], segments: Sequence[Segment]) -> PieceTable:
    parts = [
        (span.start, Piece(segment.segment_id, 0, len(span)))
        for span, segment in zip(spans, segments, strict=True)
    ]
    if isinstance(plan, Plan):
        parts += [
            (copy.target_start, Piece(copy.segment_id, copy.offset, copy.length)) for copy in plan.copies
        ]
    return PieceTable(piece for _, piece in sorted(parts, key=lambda part: part[0]))
