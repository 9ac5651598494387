"""
From a finished sequence to the node it becomes: which spans were computed, what is exact, which generation.

Pure functions over a plan and the segments that were stored of it. Who cut and stored them is no matter here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from delta_tree import (
    UNKNOWN_DEVIATION,
    Node,
    NodeDraft,
    NodeId,
    Piece,
    PieceTable,
    Segment,
    SegmentId,
    Span,
    TokenIds,
    merge,
    split,
)
from kvshare.sharing.plan import NoPlan, Plan, cut


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """KV of a stretch of a sequence, kept as a segment."""

    segment_id: SegmentId
    span: Span  # positions in the sequence
    num_bytes: int
    checksum: int = 0  # 0 where whoever holds the bytes checks them


def computed_spans(plan: Plan | NoPlan, num_tokens: int, length: int) -> tuple[Span, ...]:
    """
    What was computed of so many tokens, in segments of `length`: placeholders and everything generated.

    A segment is of one generation: where repairs were chosen, it ends where the KV ceases to be exact.
    """
    if isinstance(plan, NoPlan):
        return split([Span(0, num_tokens)], length)
    spans = [Span(span.start, min(span.end, num_tokens)) for span in plan.placeholders]
    spans.append(Span(min(plan.num_tokens, num_tokens), num_tokens))
    merged = merge(spans)
    return split(merged if plan.exact_until is None else cut(merged, plan.exact_until), length)


def draft_node(
    token_ids: TokenIds,
    plan: Plan | NoPlan,
    stored: Sequence[StoredSpan],
    *,
    namespace: str,
    parent: NodeId | None,
) -> NodeDraft:
    """
    The node for a sequence: tokens (T,) whose KV is computed, prompt and generated ones, and the plan it
    really came from. The plan's copies and `stored` cover every position once.
    """
    exact_length = _exact_length(plan, len(token_ids))
    deviation = 0.0 if isinstance(plan, NoPlan) else min(plan.deviation, UNKNOWN_DEVIATION)
    return NodeDraft(
        namespace=namespace,
        token_ids=token_ids,
        parent=parent,
        pieces=_piece_table(plan, stored),
        new_segments=describe(plan, stored, namespace),
        exact_length=exact_length,
        deviation=deviation if exact_length < len(token_ids) else 0.0,
    )


def find_parent(plan: Plan | NoPlan, node_of: Callable[[NodeId], Node | None]) -> NodeId | None:
    """The donor that gave most, if it is still there."""
    if isinstance(plan, NoPlan) or not plan.copies:
        return None
    given: Counter[NodeId] = Counter()
    for copy in plan.copies:
        given[copy.donor] += copy.length
    parent, _ = given.most_common(1)[0]
    return parent if node_of(parent) is not None else None


def _exact_length(plan: Plan | NoPlan, num_tokens: int) -> int:
    """Everything before the first approximate copy was computed after exact KV only."""
    if isinstance(plan, NoPlan) or plan.first_approximate >= plan.num_tokens:
        return num_tokens
    return plan.first_approximate


def describe(plan: Plan | NoPlan, stored: Sequence[StoredSpan], namespace: str) -> tuple[Segment, ...]:
    """As the tree wants to know what was stored of a sequence with this plan."""
    return tuple(
        Segment(
            segment_id=entry.segment_id,
            namespace=namespace,
            first_position=entry.span.start,
            num_tokens=len(entry.span),
            generation=_generation(plan, entry.span),
            num_bytes=entry.num_bytes,
            checksum=entry.checksum,
        )
        for entry in stored
    )


def _generation(plan: Plan | NoPlan, span: Span) -> int:
    """0 before the first approximate copy, the plan's behind it; 0 everywhere if there is none."""
    if isinstance(plan, NoPlan) or plan.first_approximate >= plan.num_tokens:
        return 0
    return plan.generation if span.start >= plan.first_approximate else 0


def _piece_table(plan: Plan | NoPlan, stored: Sequence[StoredSpan]) -> PieceTable:
    parts = [(entry.span.start, Piece(entry.segment_id, 0, len(entry.span))) for entry in stored]
    if isinstance(plan, Plan):
        parts += [
            (copy.target_start, Piece(copy.segment_id, copy.offset, copy.length)) for copy in plan.copies
        ]
    return PieceTable(piece for _, piece in sorted(parts, key=lambda part: part[0]))
