"""
Covers a new prompt with stored KV: which tokens are copied from which donors, and which are computed.

First comes the longest exact prefix, then the donor that covers most in an in-order alignment. The rest is
filled with runs from any position of any donor, the longest run first. A token that differs is never copied.
The result depends on the arguments only; nothing is loaded or stored.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from delta_tree.candidate_kgrams import CandidateKGrams
from delta_tree.composition import Composition, Copy, DonorReason, merge_copies
from delta_tree.donors import Donor, Offer
from delta_tree.edits import Match
from delta_tree.kgrams import Hashes, Sieve, quick_hashes
from delta_tree.node import Node, Segment, SegmentId
from delta_tree.runs import Pair
from delta_tree.spans import Span, TokenIds, token_ids

# Alignment is the most expensive step. Only the three most promising donors are aligned, and none that can
# cover hardly more than the best so far: `fill` takes runs from all donors anyway.
_MAX_ALIGNED = 3
_GOOD_ENOUGH = 31 / 32
# Each round places at least one run. Two rounds are usual; the limit is against hostile prompts.
_MAX_ROUNDS = 8


def compose(
    target: TokenIds,
    candidates: Sequence[Node],
    segment_of: Callable[[SegmentId], Segment],
    *,
    min_run: int,
    max_donors: int,
    max_generation: int,
    allow_approximate: bool,
    may_move: bool = True,
) -> Composition:
    """
    Cover `target` with copies from the candidates; what remains are the gaps that must be computed.

    `max_donors` limits the donors of approximate copies. The exact prefix may come from one donor more,
    because it costs no fidelity. With `may_move` False, KV is copied only to the positions it was computed
    for. Where `segment_of` raises UnknownSegmentError, the donor is left out. Among equally good donors the
    first in `candidates` wins.
    Shapes:  target (T,) int32
    """
    if min_run < 1:
        raise ValueError(f"min_run must be at least 1, got {min_run}")
    target = token_ids(target)
    donors = [
        Donor(node, place, target, segment_of, max_generation=max_generation, may_move=may_move)
        for place, node in enumerate(candidates)
    ]
    if not allow_approximate:
        for donor in donors:
            donor.forbid_approximate()
    exact_lengths = [donor.exact_prefix() for donor in donors]
    layout = _Layout(target, exact_length=max(exact_lengths, default=0), min_run=min_run)
    sharing = layout.sharing(donors) if allow_approximate else []
    best = layout.place_best_donor(sharing, max_donors=max_donors)
    holders = [d for d, n in zip(donors, exact_lengths, strict=True) if n == layout.exact_length]
    layout.place_exact_prefix(holders, preferred=best)
    layout.fill(sharing, max_donors=max_donors)
    return layout.result(donors)


class _Layout:
    """The new prompt while it is being covered."""

    def __init__(self, target: TokenIds, *, exact_length: int, min_run: int) -> None:
        self.exact_length = exact_length
        self._target = target
        self._min_run = min_run
        self._copies: list[Copy] = []
        self._is_open = np.ones(len(target), dtype=np.bool_)
        self._mixed: set[int] = set()  # `place` of each donor of approximate copies
        self._usable: list[Donor] = []
        self._kgrams = CandidateKGrams((), min_run)  # of the usable donors

    @cached_property
    def _hashes(self) -> Hashes:
        """Of all k-grams of the prompt; not computed where only its exact prefix is wanted."""
        return quick_hashes(self._target, self._min_run)

    def sharing(self, donors: Sequence[Donor]) -> list[Donor]:
        """
        The donors that share a usable run after the exact prefix.

        The `reason` of a donor that shares a run within the prefix only becomes NOTHING_LEFT.
        """
        self._usable = [donor for donor in donors if donor.usable]
        if not self._usable:
            return []
        self._kgrams = CandidateKGrams([donor.visible for donor in self._usable], self._min_run)
        rest = Span(self.exact_length, len(self._target))
        if len(rest) >= self._min_run:
            self._narrow([rest])
        known = np.sort(self._hashes)
        found: list[Donor] = []
        others: list[tuple[Donor, Pair]] = []
        for number, donor in enumerate(self._usable):
            own = self._kgrams.hashes(number)
            donor.pair = pair = Pair(donor.visible, self._target, own, self._hashes, self._min_run)
            if pair.has_common_run(donor.places, known):
                found.append(donor)
                donor.reason = DonorReason.NOTHING_LEFT
            else:
                others.append((donor, pair))
        anywhere = Sieve(self._hashes) if others else None
        for donor, pair in others:
            assert anywhere is not None
            if pair.has_common_run(anywhere.passing(pair.source_hashes), known):
                donor.reason = DonorReason.NOTHING_LEFT
        return found

    def place_best_donor(self, donors: Sequence[Donor], *, max_donors: int) -> Donor | None:
        """
        Place the runs of the donor that covers most in an in-order alignment, and return that donor.

        Only positions after the exact prefix are covered; the prefix follows, from the same donor if it can.
        """
        rest = Span(self.exact_length, len(self._target))
        if len(rest) < self._min_run or max_donors < 1 or not donors:
            return None
        bounds = {donor.place: donor.most_in_order(self._min_run) for donor in donors}
        in_place = {donor.place: donor.num_in_place(rest.start) for donor in donors}
        promising = sorted(
            (donor for donor in donors if bounds[donor.place]),
            key=lambda donor: (-bounds[donor.place], -in_place[donor.place], donor.place),
        )
        best: tuple[int, Donor, list[Match]] | None = None
        for donor in promising[:_MAX_ALIGNED]:
            if best is not None and best[0] >= bounds[donor.place] * _GOOD_ENOUGH:
                break
            runs = donor.in_order(rest)
            num_covered = sum(run.length for run in runs)
            if num_covered > (best[0] if best else 0):
                best = (num_covered, donor, runs)
        if best is None:
            return None
        _, donor, runs = best
        for run in runs:
            self._place(donor, run)
        self._mixed.add(donor.place)
        return donor

    def place_exact_prefix(self, holders: Sequence[Donor], *, preferred: Donor | None) -> None:
        """Place the exact prefix, from `preferred` if that donor holds it, else from the first that does."""
        if self.exact_length:
            donor = preferred if preferred is not None and preferred in holders else holders[0]
            self._place(donor, Match(0, 0, self.exact_length))

    def fill(self, donors: Sequence[Donor], *, max_donors: int) -> None:
        """Fill open stretches until no donor that may be used has a run for any, or all rounds are used."""
        asked = list(donors)
        for _ in range(_MAX_ROUNDS):
            open_spans = self._open_spans()
            if not open_spans or not asked:
                return
            self._narrow(open_spans)
            offers: list[Offer] = []
            giving: list[Donor] = []
            for donor in asked:
                given = donor.offers(open_spans)
                offers += given
                # Open stretches only shrink: a donor without a run now has none later.
                if given:
                    giving.append(donor)
            for offer in sorted(offers, key=lambda offer: offer.rank):
                if self._admits(offer.donor, max_donors):
                    self._accept(offer)
            asked = [donor for donor in giving if self._admits(donor, max_donors)]

    def result(self, donors: Sequence[Donor]) -> Composition:
        """The copies placed so far, and the reason of each candidate."""
        copies = merge_copies(self._copies, exact_length=self.exact_length)
        return Composition(
            num_tokens=len(self._target),
            exact_length=self.exact_length,
            copies=copies,
            reasons=tuple(donor.reason for donor in donors),
        )

    def _admits(self, donor: Donor, max_donors: int) -> bool:
        if donor.place in self._mixed or len(self._mixed) < max_donors:
            return True
        if donor.reason is not DonorReason.USED:
            donor.reason = DonorReason.MAX_DONORS
        return False

    def _accept(self, offer: Offer) -> None:
        """Place those parts of the offered run that are still open and long enough."""
        run = offer.run
        for part in self._open_parts(Span(run.target, run.target + run.length)):
            source = run.source + part.start - run.target
            self._place(offer.donor, Match(source, part.start, len(part)))
            self._mixed.add(offer.donor.place)

    def _place(self, donor: Donor, run: Match) -> None:
        self._copies.extend(donor.copies(run))
        self._is_open[run.target : run.target + run.length] = False
        donor.reason = DonorReason.USED

    def _open_spans(self) -> list[Span]:
        return self._open_parts(Span(0, len(self._target)))

    def _open_parts(self, span: Span) -> list[Span]:
        """The open stretches within `span` that are long enough for a run, in order."""
        is_open = self._is_open[span.start : span.end]
        if is_open.all():
            return [span] if len(span) >= self._min_run else []
        framed = np.concatenate(([False], is_open, [False]))
        edges = (np.flatnonzero(framed[1:] != framed[:-1]) + span.start).tolist()
        return [
            Span(start, end)
            for start, end in zip(edges[::2], edges[1::2], strict=True)
            if end - start >= self._min_run
        ]

    def _narrow(self, spans: Sequence[Span]) -> None:
        """Restrict each usable donor to the k-grams that may occur in one of the spans."""
        inside = [self._hashes[span.start : span.end - self._min_run + 1] for span in spans]
        narrowed = self._kgrams.narrow(Sieve(np.concatenate(inside)))
        for donor, places in zip(self._usable, narrowed, strict=True):
            donor.places = places
