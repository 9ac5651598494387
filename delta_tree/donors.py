"""
One candidate for one new prompt: which of its tokens may be copied, and how good each run is.

`compose` chooses between candidates; this file does not.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from delta_tree.align import heaviest_chain
from delta_tree.anchors import tile
from delta_tree.composition import Copy, DonorReason
from delta_tree.edits import Match
from delta_tree.errors import UnknownSegmentError
from delta_tree.kgrams import Ids, Places
from delta_tree.node import Node, Segment, SegmentId
from delta_tree.runs import Pair, common_prefix_length, common_suffix_length
from delta_tree.spans import Span, TokenIds, true_spans

_HIDDEN = -1  # in place of a token that may not be copied: it equals no token id
_CONTEXT = 64  # tokens before a run that are compared to choose between two sources of it


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """The part of a candidate that may be copied: its pieces with their segments, and its tokens."""

    reason: DonorReason  # BELOW_MIN_RUN until more is known, or why nothing may be copied
    visible: Ids  # token ids; _HIDDEN where a token may not be copied
    exact_length: int  # leading tokens of the new prompt for which this candidate holds exact KV
    rows: Sequence[tuple[int, SegmentId, int, int]] = ()  # of its pieces, see `PieceTable.rows`
    segments: Sequence[Segment] = ()  # one for each row


def content_of(
    node: Node,
    target: TokenIds,
    segment_of: Callable[[SegmentId], Segment],
    *,
    max_generation: int,
    may_move: bool,
) -> Content:
    """Return what of `node` may be copied to a prompt; if a segment is missing, nothing (see `reason`)."""
    rows = node.pieces.rows()
    try:
        by_id = {segment_id: segment_of(segment_id) for segment_id in {row[1] for row in rows}}
    except UnknownSegmentError:  # evicted since the candidate was nominated
        return Content(DonorReason.MISSING_SEGMENT, node.token_ids, 0)
    if {segment.namespace for segment in by_id.values()} - {node.namespace}:
        return Content(DonorReason.MISSING_SEGMENT, node.token_ids, 0)
    segments = [by_id[row[1]] for row in rows]
    visible, num_hidden = node.token_ids, 0
    may_hide = not may_move or any(segment.generation > max_generation for segment in by_id.values())
    for (start, _, offset, length), segment in zip(rows, segments, strict=True) if may_hide else ():
        if segment.generation > max_generation or not (may_move or segment.first_position + offset == start):
            if visible is node.token_ids:
                visible = visible.copy()
            visible[start : start + length] = _HIDDEN
            num_hidden += length
    is_all_hidden = num_hidden == node.num_tokens
    return Content(
        reason=DonorReason.GENERATION if is_all_hidden else DonorReason.BELOW_MIN_RUN,
        visible=visible,
        exact_length=common_prefix_length(visible[: node.exact_length], target),
        rows=rows,
        segments=segments,
    )


class Donor:
    """A candidate during one call of `compose`."""

    def __init__(self, node: Node, place: int, target: TokenIds, content: Content, *, may_move: bool) -> None:
        self.node = node
        self.place = place  # in the list of candidates, the last tie-break
        self.reason = content.reason
        self.visible, self.exact_length = content.visible, content.exact_length
        self.pair: Pair | None = None  # with the new prompt; set by `compose` if anything is usable
        self.places: Places = np.empty(0, dtype=np.int64)  # of k-grams that may occur in open stretches
        self._target = target
        self._may_move = may_move
        self._content = content

    @cached_property
    def _starts(self) -> Sequence[int]:
        return [row[0] for row in self._content.rows]

    @cached_property
    def _pieces(self) -> Sequence[tuple[int, int, int, Segment]]:
        """Return (start in the prompt, offset, length, segment) per piece; made only if there is a run."""
        rows = zip(self._content.rows, self._content.segments, strict=True)
        return [(start, offset, length, segment) for (start, _, offset, length), segment in rows]

    @property
    def usable(self) -> bool:
        """Return whether anything of this donor may be copied at all."""
        return self.reason not in (DonorReason.MISSING_SEGMENT, DonorReason.GENERATION)

    def num_in_place(self, exact_length: int) -> int:
        """Equal tokens at equal positions after the exact prefix."""
        end = min(len(self._target), len(self.visible))
        if end <= exact_length:
            return 0
        same = self.visible[exact_length:end] == self._target[exact_length:end]
        return int(np.count_nonzero(same))

    def most_in_order(self, min_run: int) -> int:
        """Return an upper bound on the tokens that an alignment with the target can keep."""
        if not len(self.places):
            return 0
        return int(np.minimum(np.diff(self.places), min_run).sum()) + min_run

    def in_order(self, rest: Span) -> list[Match]:
        """
        The runs that an in-order alignment keeps in the target positions `rest`.

        Common k-grams find them. They keep as many tokens as rapidfuzz does in runs of this length, in a
        quarter of the time at 2,000 tokens and a twentieth at 8,000.
        """
        return heaviest_chain(self._runs([rest]))

    def offers(self, open_spans: list[Span]) -> list[tuple[tuple[int, ...], Match]]:
        """Return (rank, run) of this donor's runs that fit open positions; the smallest rank is the best."""
        return [(self._rank(run), run) for run in self._runs(open_spans)]

    def copies(self, run: Match) -> Iterator[Copy]:
        """The copies that put `run` into the new prompt, one per piece."""
        # The package guarantees that copied tokens are equal, token for token.
        first, target, num_tokens = run
        node_id, end, shift = self.node.node_id, first + num_tokens, target - first
        source = self.node.token_ids[first:end]
        assert source.tobytes() == self._target[target : target + num_tokens].tobytes()  # faster than `==`
        for start, offset, length, segment in self._pieces_of(run):
            skip = first - start if start < first else 0
            stop = length if start + length <= end else end - start
            yield Copy(  # positional arguments: there are thousands, and keywords double the time
                node_id,
                segment.segment_id,
                offset + skip,
                stop - skip,
                start + skip + shift,  # in the new prompt
                segment.first_position + offset + skip,  # where it was computed
                start + skip,  # in the donor
            )

    def _runs(self, spans: list[Span]) -> list[Match]:
        if self.pair is None:
            return []
        if self._may_move:
            return tile(self.pair, spans, self.places)
        return [run for span in spans for run in self._runs_in_place(span, self.pair.k)]

    def _runs_in_place(self, span: Span, min_run: int) -> Iterator[Match]:
        """Equal stretches at equal positions."""
        end = min(span.end, len(self.visible))
        same = self.visible[span.start : end] == self._target[span.start : end]
        for part in true_spans(same, span.start, at_least=min_run):
            yield Match(part.start, part.start, len(part))

    def _pieces_of(self, run: Match) -> Sequence[tuple[int, int, int, Segment]]:
        """Return the pieces that the run touches."""
        first = bisect_right(self._starts, run.source) - 1
        return self._pieces[first : bisect_left(self._starts, run.source_end)]

    def _rank(self, run: Match) -> tuple[int, ...]:
        shift, generation = 0, 0
        for start, offset, _, segment in self._pieces_of(run):
            stored = segment.first_position + offset
            shift = max(shift, abs(run.target + start - run.source - stored))
            generation = max(generation, segment.generation)
        before = max(run.source - _CONTEXT, 0), max(run.target - _CONTEXT, 0)
        context = common_suffix_length(
            self.node.token_ids[before[0] : run.source], self._target[before[1] : run.target]
        )
        return (-run.length, shift, -context, generation, self.place, run.target)
