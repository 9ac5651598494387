"""
Keeping what was computed: new KV becomes segments, the prompt becomes a node, and room is made for both.

Nothing here is on the way of an answer. All methods may be called from any thread; those that block say so.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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

        Returns: the node, or None where nothing was kept (too large, donor gone, store failing); never raises
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

    def discard(self, broken: Iterable[NodeId]) -> None:
        """Take prompts whose KV cannot be read out of the tree, pinned or not. Blocks."""
        with self._writing:
            for node_id in broken:
                if (node := self._tree.get(node_id)) is not None:
                    self._tree.unpin(node_id)
                    self._evict(node)

    def take_evicted(self) -> list[tuple[str, int]]:
        """Namespaces and ids of the nodes that left since the last call; the index still has them."""
        return [self._evicted.popleft() for _ in range(len(self._evicted))]

    def _commit(self, computed: Computed) -> Node | None:
        num_tokens = len(computed.token_ids)
        if num_tokens < self._min_tokens:
            return None
        spans = _computed_spans(computed.plan, num_tokens)
        num_bytes = sum(len(span) for span in spans) * computed.kv.geometry.bytes_per_token
        if num_bytes > self._tier.max_bytes:
            self._counters["fallback:commit:too_large"] += 1
            return None
        kept = [(span, computed.kv.cut(span)) for span in spans]
        segments = [_describe(computed, span, kv) for span, kv in kept]
        draft = NodeDraft(
            namespace=computed.namespace,
            token_ids=computed.token_ids,
            parent=_parent(computed.plan),
            pieces=_piece_table(computed.plan, spans, segments),
            new_segments=tuple(segments),
            exact_length=_exact_length(computed.plan, num_tokens),
        )
        with self._writing:
            if not self._make_room(num_bytes):
                self._counters["fallback:commit:no_room"] += 1
                return None
            insertion = self._tree.insert(draft)
            freed = set(insertion.freed_segments)
            for segment, (_, kv) in zip(segments, kept, strict=True):
                if segment.segment_id not in freed:
                    self._tier.put(segment.segment_id, kv, segment.checksum)
            self._tier.drop(freed)
        return insertion.node

    def _make_room(self, num_bytes: int) -> bool:
        """Evict the least recently used prompts until `num_bytes` fit; held and pinned ones stay."""
        if self._fits(num_bytes):
            return True
        for candidate in self._tree.eviction_candidates():
            if candidate.node_id not in self._held:
                self._evict(candidate)
                self._counters["evictions"] += 1
                if self._fits(num_bytes):
                    return True
        return False

    def _fits(self, num_bytes: int) -> bool:
        return self._tier.num_bytes + num_bytes <= self._tier.max_bytes

    def _evict(self, node: Node) -> None:
        self._tier.drop(self._tree.evict(node.node_id).freed_segments)
        self._evicted.append((node.namespace, int(node.node_id)))


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
    plan = computed.plan
    exact = isinstance(plan, NoPlan) or span.start < plan.first_approximate
    prefix = computed.token_ids[: span.start]
    return Segment(
        segment_id=new_segment_id(),
        namespace=computed.namespace,
        first_position=span.start,
        num_tokens=len(span),
        prefix_hash=hashlib.sha256(prefix.astype("<i4").tobytes()).digest()[:16],
        generation=0 if exact else plan.generation if isinstance(plan, Plan) else 0,
        num_bytes=kv.num_bytes,
        checksum=kv.checksum(),
    )


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


def _parent(plan: Plan | NoPlan) -> NodeId | None:
    """The donor that gave most."""
    if isinstance(plan, NoPlan):
        return None
    given: Counter[NodeId] = Counter()
    for copy in plan.copies:
        given[copy.donor] += copy.length
    return given.most_common(1)[0][0] if given else None
