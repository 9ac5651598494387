"""Drafts over given segments."""

from delta_tree import (
    NodeDraft,
    NodeId,
    PieceTable,
    Segment,
    token_ids,
)
from tests.delta_tree.fake_prompts import (
    NAMESPACE,
    whole,
)

GONE = NodeId(77)


def draft_over(
    ids: list[int], segments: list[Segment], *, exact_length: int = 0, parent: NodeId | None = None
) -> NodeDraft:
    """A draft whose pieces are whole segments, all of them new."""
    table = PieceTable(map(whole, segments))
    return NodeDraft(NAMESPACE, token_ids(ids), parent, table, tuple(segments), exact_length)
