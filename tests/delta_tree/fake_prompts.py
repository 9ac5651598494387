"""Small prompts, segments and drafts for the tests of the delta tree."""

from collections.abc import Sequence
from itertools import count

from hypothesis import strategies as st

from delta_tree import NodeDraft, Piece, PieceTable, Segment, token_ids
from delta_tree.node import Node, NodeId, SegmentId

BYTES_PER_TOKEN = 10
NAMESPACE = "tenant-a"

# Counted, not random, so that a failing example of Hypothesis fails again.
_segment_ids = count(100_000)  # above those in the stores of earlier versions


def count_segments_from(first: int) -> None:
    """Give a second process ids of its own."""
    global _segment_ids
    _segment_ids = count(first)


def segment(
    num_tokens: int,
    *,
    namespace: str = NAMESPACE,
    first_position: int = 0,
    generation: int = 0,
    segment_id: SegmentId | None = None,
) -> Segment:
    """A segment of made-up KV."""
    return Segment(
        segment_id=segment_id or SegmentId(next(_segment_ids)),
        namespace=namespace,
        first_position=first_position,
        num_tokens=num_tokens,
        generation=generation,
        num_bytes=num_tokens * BYTES_PER_TOKEN,
        checksum=2**64 - 1,
    )


def whole(segment: Segment) -> Piece:
    """The piece that is all of a segment."""
    return Piece(segment.segment_id, 0, segment.num_tokens)


def fresh_draft(
    tokens: Sequence[int], *, namespace: str = NAMESPACE, parent: NodeId | None = None
) -> NodeDraft:
    """A prompt that was computed in full."""
    own = segment(len(tokens), namespace=namespace)
    return NodeDraft(namespace, token_ids(tokens), parent, PieceTable([whole(own)]), (own,), len(tokens))


def child_draft(parent: Node, num_kept: int, added: Sequence[int]) -> NodeDraft:
    """A prompt that keeps the head of its parent and computes what follows."""
    own = segment(len(added), namespace=parent.namespace, first_position=num_kept)
    return NodeDraft(
        parent.namespace,
        token_ids([*parent.token_ids[:num_kept].tolist(), *added]),
        parent.node_id,
        PieceTable([*parent.pieces.first(num_kept), whole(own)]),
        (own,),
        min(num_kept, parent.exact_length),
    )


def tokens(max_size: int = 40, max_id: int = 3, min_size: int = 0) -> st.SearchStrategy[list[int]]:
    """Short prompts over few token ids, so that they have much in common by chance."""
    return st.lists(st.integers(0, max_id), min_size=min_size, max_size=max_size)


@st.composite
def edited_pairs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """A prompt and what some edits, and perhaps a move, made of it."""
    source = draw(tokens(60, draw(st.sampled_from([0, 1, 3, 1000]))))
    target = list(source)
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(target)))
        stop = min(start + draw(st.integers(0, 8)), len(target))
        target[start:stop] = draw(tokens(8))
    if draw(st.booleans()):
        turn = draw(st.integers(0, len(target)))
        target = target[turn:] + target[:turn]
    return source, target


ADVERSARIAL = {
    "both empty": ([], []),
    "empty source": ([], [1, 2, 3]),
    "empty target": ([1, 2, 3], []),
    "length one, same": ([7], [7]),
    "length one, other": ([7], [8]),
    "all equal": ([5] * 50, [5] * 80),
    "periodic": ([1, 2, 3] * 30, [2, 3, 1] * 25),
    "disjoint": (list(range(50)), list(range(100, 160))),
    "reversed": (list(range(60)), list(range(60))[::-1]),
    "halves swapped": (list(range(80)), [*range(40, 80), *range(40)]),
    "doubled": (list(range(40)), [*range(40), *range(40)]),
    "largest ids": ([2**31 - 1] * 20, [2**31 - 1] * 19 + [0]),
}
