"""
Makes the draft of a node from a finished sequence: its parent, computed spans, exact length and generations.

Pure functions of a plan and its stored segments, for both engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

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
    """KV of a span of a sequence, stored as a segment."""

    segment_id: SegmentId
    span: Span  # positions in the sequence
    num_bytes: int
    checksum: int = 0  # 0 if the holder of the bytes checks them itself


def computed_spans(plan: Plan | NoPlan, num_tokens: int, segment_tokens: int) -> tuple[Span, ...]:
    """
    Return the computed spans of a sequence: placeholders and the answer, at most `segment_tokens` tokens
    each.

    A segment has one generation, so if repairs were chosen, a span is cut where the KV stops being exact.
    """
    if isinstance(plan, NoPlan):
        return split([Span(0, num_tokens)], segment_tokens)
    spans = [Span(span.start, min(span.end, num_tokens)) for span in plan.placeholders]
    spans.append(Span(min(plan.num_tokens, num_tokens), num_tokens))
    merged = merge(spans)
    return split(merged if plan.exact_until is None else cut(merged, plan.exact_until), segment_tokens)


def draft_node(
    token_ids: TokenIds,
    plan: Plan | NoPlan,
    stored: Sequence[StoredSpan],
    *,
    namespace: str,
    parent: NodeId | None,
) -> NodeDraft:
    """
    Return the draft of the node of a sequence.

    `plan` is the plan as it was executed. Its copies and `stored` together cover every position once.
    Shapes:  token_ids (T,), prompt and answer, as far as their KV was computed
    """
    exact_length, deviation = len(token_ids), 0.0
    if isinstance(plan, Plan) and plan.first_approximate < plan.num_tokens:
        # KV before the first approximate copy is exact.
        exact_length, deviation = plan.first_approximate, min(plan.deviation, UNKNOWN_DEVIATION)
    parts = [(entry.span.start, Piece(entry.segment_id, 0, len(entry.span))) for entry in stored]
    for copy in plan.copies if isinstance(plan, Plan) else ():
        parts.append((copy.target_start, Piece(copy.segment_id, copy.offset, copy.length)))
    return NodeDraft(
        namespace=namespace,
        token_ids=token_ids,
        parent=parent,
        pieces=PieceTable(piece for _, piece in sorted(parts, key=itemgetter(0))),
        new_segments=segments_of(plan, stored, namespace),
        exact_length=exact_length,
        deviation=deviation if exact_length < len(token_ids) else 0.0,
    )


def find_parent(plan: Plan | NoPlan, node_of: Callable[[NodeId], Node | None]) -> NodeId | None:
    """Return the donor with most copied tokens, if it is still stored; else None."""
    if isinstance(plan, NoPlan) or not plan.copies:
        return None
    parent, _ = plan.num_from.most_common(1)[0]
    return parent if node_of(parent) is not None else None


def segments_of(plan: Plan | NoPlan, stored: Sequence[StoredSpan], namespace: str) -> tuple[Segment, ...]:
    """Return the tree's descriptions of the segments stored for a sequence with this plan."""
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
    """Return 0 before the first approximate copy, the plan's generation after it."""
    if isinstance(plan, NoPlan) or plan.first_approximate >= plan.num_tokens:
        return 0
    return plan.generation if span.start >= plan.first_approximate else 0
