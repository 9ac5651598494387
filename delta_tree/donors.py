"""
One candidate seen from one new prompt: what of it may be used, and what that is worth.

`compose` asks; nothing here chooses between candidates.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from delta_tree.align import common_suffix_length, heaviest_chain
from delta_tree.anchors import tile
from delta_tree.composition import Copy, DonorReason
from delta_tree.edits import Match
from delta_tree.errors import UnknownSegmentError
from delta_tree.kgrams import Hashes, Ids, Places, quick_hashes
from delta_tree.node import Node, Segment, SegmentId
from delta_tree.runs import Pair, common_prefix_length
from delta_tree.spans import Span, TokenIds

_HIDDEN = -1  # no token id; what carries it matches nothing
_ASKED_AT_ONCE = 256  # k-grams; most donors share one of the first
_CONTEXT = 64  # preceding tokens compared to tell two sources of one run apart


@dataclass(frozen=True, slots=True)
class Offer:
    """A run that a donor could fill, with what speaks for it; smaller `rank` is better."""

    donor: "Donor"
    run: Match
    rank: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class KGrams:
    """A donor's k-grams as hashes, and the places of those that may stand in the part asked about."""

    hashes: Hashes
    places: Places


class Donor:
    """A candidate with its pieces resolved. Lives as long as one call of `compose`."""

    def __init__(
        self,
        node: Node,
        place: int,
        segment_of: Callable[[SegmentId], Segment],
        *,
        min_run: int,
        max_generation: int,
    ) -> None:
        self.node = node
        self.place = place  # in the list of candidates, the last tie-break
        self.reason = DonorReason.MISSING_SEGMENT
        self.visible: Ids = node.token_ids
        self._min_run = min_run
        rows = node.pieces.rows()
        self._starts = [start for start, _, _, _ in rows]
        try:
            # (position in the prompt, offset, length, segment)
            self._pieces = [
                (start, offset, length, segment_of(entry)) for start, entry, offset, length in rows
            ]
        except UnknownSegmentError:
            return  # evicted since the candidate was nominated
        if any(segment.namespace != node.namespace for _, _, _, segment in self._pieces):
            return
        hidden = [
            Span(start, start + length)
            for start, _, length, segment in self._pieces
            if segment.generation > max_generation
        ]
        if hidden:
            masked = node.token_ids.copy()
            for span in hidden:
                masked[span.start : span.end] = _HIDDEN
            self.visible = masked
        is_hidden = sum(map(len, hidden)) == node.num_tokens
        self.reason = DonorReason.GENERATION if is_hidden else DonorReason.BELOW_MIN_RUN

    @property
    def usable(self) -> bool:
        """Whether anything of this donor may be copied at all."""
        return self.reason not in (DonorReason.MISSING_SEGMENT, DonorReason.GENERATION)

    def forbid_approximate(self) -> None:
        """Explain that only an exact prefix was asked for."""
        if self.usable:
            self.reason = DonorReason.EXACT_ONLY

    def exact_prefix(self, target: TokenIds) -> int:
        """Leading tokens of `target` whose KV this donor holds exactly."""
        if not self.usable:
            return 0
        limit = self.node.exact_length
        return common_prefix_length(self.visible[:limit], target)

    def num_in_place(self, target: TokenIds, exact_length: int) -> int:
        """Equal tokens at equal positions after the exact prefix."""
        end = min(len(target), len(self.visible))
        if end <= exact_length:
            return 0
        same = self.visible[exact_length:end] == target[exact_length:end]
        return int(np.count_nonzero(same))

    def shares(self, target: TokenIds, kgrams: KGrams, hashes: Hashes, known: Hashes) -> bool:
        """Whether any run of the target is in this donor; `known` are the target's `hashes`, sorted."""
        for start in range(0, len(kgrams.places), _ASKED_AT_ONCE):
            places = kgrams.places[start : start + _ASKED_AT_ONCE]
            asked = kgrams.hashes[places]
            at = np.minimum(known.searchsorted(asked), len(known) - 1)
            for place in places[known[at] == asked].tolist():
                if self._stands_in(target, place, hashes):
                    return True
        return False

    def most_in_order(self, kgrams: KGrams) -> int:
        """An upper bound on the tokens an alignment with the target can keep."""
        if not len(kgrams.places):
            return 0
        steps = np.minimum(np.diff(kgrams.places), self._min_run)
        return int(steps.sum()) + self._min_run

    def in_order(self, target: TokenIds, rest: Span, kgrams: KGrams, hashes: Hashes) -> list[Match]:
        """
        The runs an in-order alignment keeps in the target positions `rest`.

        By common k-grams: as many tokens as rapidfuzz keeps once short runs are dropped, in a
        quarter of the time at 2,000 tokens and a twentieth at 8,000.
        """
        return heaviest_chain(self._runs(target, [rest], kgrams, hashes))

    def offers(self, target: TokenIds, open_spans: list[Span], kgrams: KGrams, hashes: Hashes) -> list[Offer]:
        """Runs for the positions that are still open, wherever they stand in this donor."""
        runs = self._runs(target, open_spans, kgrams, hashes)
        return [Offer(self, run, self._rank(run, target)) for run in runs]

    def copies(self, run: Match, target: TokenIds) -> Iterator[Copy]:
        """The copies that lay `run` into the new prompt, one per piece."""
        # The promise of the whole package: what is copied is equal, token for token.
        source = self.node.token_ids[run.source : run.source + run.length]
        assert (source == target[run.target : run.target + run.length]).all()
        for start, offset, length, segment in self._pieces_of(run):
            skip = max(run.source - start, 0)
            stop = min(run.source + run.length - start, length)
            yield Copy(
                donor=self.node.node_id,
                segment_id=segment.segment_id,
                offset=offset + skip,
                length=stop - skip,
                target_start=run.target + start + skip - run.source,
                source_position=segment.first_position + offset + skip,
                donor_start=start + skip,
            )

    def _runs(self, target: TokenIds, spans: list[Span], kgrams: KGrams, hashes: Hashes) -> list[Match]:
        return tile(Pair(self.visible, target, kgrams.hashes, hashes, self._min_run), spans, kgrams.places)

    def _stands_in(self, target: TokenIds, place: int, hashes: Hashes) -> bool:
        """Whether the k-gram at `place`, known by its hash, is the target's token for token."""
        kgram = self.visible[place : place + self._min_run]
        places = np.flatnonzero(hashes == hashes.dtype.type(quick_hashes(kgram, self._min_run)[0]))
        return any(np.array_equal(kgram, target[at : at + self._min_run]) for at in places[:4].tolist())

    def _pieces_of(self, run: Match) -> list[tuple[int, int, int, Segment]]:
        """The pieces that the run touches."""
        first = bisect_right(self._starts, run.source) - 1
        return self._pieces[first : bisect_left(self._starts, run.source + run.length)]

    def _rank(self, run: Match, target: TokenIds) -> tuple[int, ...]:
        shift, generation = 0, 0
        for start, offset, _, segment in self._pieces_of(run):
            stored = segment.first_position + offset
            shift = max(shift, abs(run.target + start - run.source - stored))
            generation = max(generation, segment.generation)
        before = max(run.source - _CONTEXT, 0), max(run.target - _CONTEXT, 0)
        context = common_suffix_length(
            self.node.token_ids[before[0] : run.source], target[before[1] : run.target]
        )
        return (-run.length, shift, -context, generation, self.place, run.target)
