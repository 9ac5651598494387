"""
Covers a new prompt with stored KV: which tokens are copied from which donors, and which are computed.

First comes the longest exact prefix, then the donor that covers most in an in-order alignment. The rest is
filled with runs from any position of any donor, the longest run first. A token that differs is never copied.
If one donor has all that can be copied, `near_duplicate` finds these copies without a search. If one donor
has clearly the most (`nearest`), no other donor is aligned.
The result depends on the arguments only; nothing is loaded or stored.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from operator import itemgetter

import numpy as np

from delta_tree.composition import Composition, Copy, DonorReason, merge_copies
from delta_tree.donors import Donor
from delta_tree.edits import Match
from delta_tree.kgrams import CandidateKGrams, Hashes, Sieve
from delta_tree.nearest import nearest_or_composed, without_others
from delta_tree.node import Node, Segment, SegmentId
from delta_tree.spans import Span, TokenIds, true_spans
from delta_tree.target import Look, Target

# Alignment is the most expensive step. At most the three most promising donors are aligned. No further donor
# is aligned if it can cover hardly more than the best donor so far: `fill` takes runs from all donors anyway.
_MAX_ALIGNED = 3
_GOOD_ENOUGH = 31 / 32
# Each round places at least one run. Two rounds are usual; the limit protects against hostile prompts.
_MAX_ROUNDS = 8


def compose(
    target: TokenIds | Target,
    candidates: Sequence[Node],
    segment_of: Callable[[SegmentId], Segment],
    *,
    min_run: int,
    max_donors: int,
    max_generation: int,
    allow_approximate: bool,
    may_move: bool = True,
    gives_reasons: bool = True,
) -> Composition:
    """
    Cover `target` with copies from the candidates; the gaps between the copies must be computed.

    `max_donors` limits the donors of approximate copies. The exact prefix may come from one more donor,
    because an exact copy costs no fidelity. With `may_move` False, KV is copied only to the positions for
    which the KV was computed. With `gives_reasons` False, `reasons` is empty, and composing takes less time.
    If `segment_of` raises UnknownSegmentError for a segment of a donor, that donor is left out. Among equally
    good donors the first in `candidates` wins.
    Shapes:  target (T,) int32, or a `Target` made with the same `min_run`, for a prompt composed repeatedly
    """
    if not isinstance(target, Target):
        target = Target(target, min_run=min_run)
    elif target.min_run != min_run:
        raise ValueError(f"the target was made for a min_run of {target.min_run}, got {min_run}")
    content = partial(target.content, segment_of=segment_of, max_generation=max_generation, may_move=may_move)
    nearest, nearly = None, None
    if candidates and allow_approximate and max_donors:
        nearest, nearly = target.once(
            ("nearest", max_generation, may_move, *map(id, candidates)),
            candidates,
            lambda: nearest_or_composed(target, candidates, content, may_move=may_move),
        )
    if nearly is not None and not gives_reasons:
        return nearly
    if nearest is not None and max_donors == 1 and not gives_reasons:
        candidates, nearest = without_others(target, candidates, content, nearest)
    donors = [
        Donor(node, place, target.tokens, content(node), may_move=may_move)
        for place, node in enumerate(candidates)
    ]
    layout = _Layout(target, donors, may_move=may_move, max_donors=max_donors, gives_reasons=gives_reasons)
    if nearest is not None:
        layout.prefer(donors[nearest])
    sharing = layout.sharing(allow_approximate)
    if nearly is not None:
        return layout.with_reasons(nearly)
    best = layout.place_best_donor(sharing)
    layout.place_exact_prefix(preferred=best)
    layout.fill(sharing)
    return layout.result()


class _Layout:
    """The new prompt while it is being covered."""

    def __init__(
        self,
        target: Target,
        donors: Sequence[Donor],
        *,
        may_move: bool,
        max_donors: int,
        gives_reasons: bool,
    ) -> None:
        self._shared, self._target = target, target.tokens
        self._may_move = may_move
        self._donors = donors
        self._usable = [donor for donor in donors if donor.usable]
        self._exact_length = max((donor.exact_length for donor in donors), default=0)
        self._rest = Span(self._exact_length, len(self._target))
        self._min_run = target.min_run
        self._max_donors, self._gives_reasons = max_donors, gives_reasons
        self._looks: dict[Donor, Look] = {}  # of the usable donors
        self._nearest: Donor | None = None
        self._withheld = False
        self._copies: list[Copy] = []
        self._is_open = np.ones(len(self._target), dtype=np.bool_)
        self._mixed: set[Donor] = set()  # donors of approximate copies

    @cached_property
    def _hashes(self) -> list[Hashes]:
        return self._shared.hashes_of([donor.visible for donor in self._usable])

    def _kgrams(self, donors: Sequence[Donor]) -> CandidateKGrams:
        hashes = [donor.pair.source_hashes for donor in donors if donor.pair is not None]
        has_looked = all(donor in self._looks for donor in donors)
        return CandidateKGrams(hashes, [donor.places for donor in donors] if has_looked else None)

    def prefer(self, nearest: Donor) -> None:
        """Align only this donor, which has clearly the most, unless some of its tokens may not be copied."""
        if nearest.usable and nearest.visible is nearest.node.token_ids:
            self._nearest = nearest

    def sharing(self, allow_approximate: bool) -> list[Donor]:
        """
        Return the donors that share a run after the exact prefix; none if only exact copies are allowed.

        If a donor shares a run, after or within the prefix, its reason is NOTHING_LEFT until it is used.
        """
        if not self._usable or not (allow_approximate or self._gives_reasons):
            return []
        for donor, hashes in zip(self._usable, self._hashes, strict=True):
            donor.pair = self._shared.pair(donor.visible, hashes)
        asked = self._usable if self._nearest is None or self._gives_reasons else [self._nearest]
        prompts = [donor.visible for donor in asked]
        looks = self._shared.looks(prompts, self._rest.start, may_move=self._may_move)
        for donor, look in zip(asked, looks, strict=True):
            self._looks[donor], donor.places = look, look.places
        if len(asked) < len(self._usable):  # the others were not searched: they may share a run
            return self._usable
        sharers = [donor for donor in asked if self._looks[donor].shares]
        for donor in asked if self._gives_reasons else sharers:
            if donor in sharers or self._shares_before(donor, self._looks[donor]):
                donor.reason = DonorReason.NOTHING_LEFT
        return sharers if allow_approximate else self._withhold(sharers)

    def _withhold(self, sharing: Sequence[Donor]) -> list[Donor]:
        """Note that text which these donors share may not be copied. Returns no donors."""
        self._withheld = bool(sharing)
        for donor in sharing:
            donor.reason = DonorReason.EXACT_ONLY
        return []

    def _shares_before(self, donor: Donor, look: Look) -> bool:
        """Return whether a donor that shares no run after the prefix shares any run with the prompt."""
        if donor.exact_length >= self._min_run:
            return True
        return self._shared.has_any_of(look)

    def place_best_donor(self, donors: Sequence[Donor]) -> Donor | None:
        """
        Place the runs of the donor that covers most in an in-order alignment, and return that donor.

        Only positions after the exact prefix are covered; `place_exact_prefix` prefers the same donor.
        """
        if len(self._rest) < self._min_run or self._max_donors < 1:
            return None
        asked = donors if self._nearest is None else [self._nearest]
        bounds = {donor: donor.most_in_order(self._min_run) for donor in asked}
        promising = sorted(
            (donor for donor in asked if bounds[donor]),
            key=lambda donor: (-bounds[donor], -donor.num_in_place(self._rest.start), donor.place),
        )
        best: Donor | None = None
        best_runs: list[Match] = []
        most_covered = 0
        for donor in promising[:_MAX_ALIGNED]:
            if most_covered >= bounds[donor] * _GOOD_ENOUGH:
                break
            runs = self._in_order(donor)
            num_covered = sum(run.length for run in runs)
            if num_covered > most_covered:
                best, best_runs, most_covered = donor, runs, num_covered
        if best is not None:
            self._mixed.add(best)
            for run in best_runs:
                self._place(best, run)
        return best

    def _in_order(self, donor: Donor) -> list[Match]:
        look = self._looks[donor]
        if look.in_order is None:
            look.in_order = donor.in_order(self._rest)
        return look.in_order

    def place_exact_prefix(self, *, preferred: Donor | None) -> None:
        """Place the exact prefix: from `preferred` if it holds the prefix, else from the first holder."""
        if self._exact_length:
            donor = max(self._donors, key=lambda donor: (donor.exact_length, donor is preferred))
            self._place(donor, Match(0, 0, self._exact_length))

    def fill(self, donors: Sequence[Donor]) -> None:
        """Fill open stretches with runs of these donors until no run fits, in up to `_MAX_ROUNDS` rounds."""
        asked = [donor for donor in donors if self._admits(donor)]
        narrowed, kgrams = asked, self._kgrams(asked)
        for _ in range(_MAX_ROUNDS):
            open_spans = self._open_parts(Span(0, len(self._target)))
            if not open_spans or not asked:
                return
            for donor, places in zip(narrowed, kgrams.narrow(self._sieve(open_spans)), strict=True):
                donor.places = places  # of the donor's k-grams that may occur in these spans
            offers = {donor: donor.offers(open_spans) for donor in asked}
            ranked = [(rank, donor, run) for donor, given in offers.items() for rank, run in given]
            for _, donor, run in sorted(ranked, key=itemgetter(0)):
                if self._admits(donor):
                    self._accept(donor, run)
            # Open stretches only shrink, so a donor without a run now has no run in a later round.
            asked = [donor for donor, given in offers.items() if given and self._admits(donor)]

    def with_reasons(self, composition: Composition) -> Composition:
        """Add the reason of each candidate to a composition that was made without this layout."""
        used = set(composition.donors)
        reasons = (DonorReason.USED if donor.node.node_id in used else donor.reason for donor in self._donors)
        return replace(composition, reasons=tuple(reasons))

    def result(self) -> Composition:
        """Return the copies placed so far, and the reason of each candidate."""
        return Composition(
            num_tokens=len(self._target),
            exact_length=self._exact_length,
            copies=merge_copies(self._copies, exact_length=self._exact_length),
            reasons=tuple(donor.reason for donor in self._donors) if self._gives_reasons else (),
            withheld=self._withheld,
        )

    def _admits(self, donor: Donor) -> bool:
        if donor in self._mixed or len(self._mixed) < self._max_donors:
            return True
        if donor.reason is not DonorReason.USED:
            donor.reason = DonorReason.MAX_DONORS
        return False

    def _accept(self, donor: Donor, run: Match) -> None:
        """Place the parts of the offered run that are still open and long enough."""
        for part in self._open_parts(Span(run.target, run.target_end)):
            source = run.source + part.start - run.target
            self._place(donor, Match(source, part.start, len(part)))
            self._mixed.add(donor)

    def _place(self, donor: Donor, run: Match) -> None:
        self._copies.extend(donor.copies(run))
        self._is_open[run.target : run.target_end] = False
        donor.reason = DonorReason.USED

    def _open_parts(self, span: Span) -> list[Span]:
        """Return the open stretches within `span` that are long enough for a run, in order."""
        is_open = self._is_open[span.start : span.end]
        return true_spans(is_open, span.start, at_least=self._min_run)

    def _sieve(self, spans: Sequence[Span]) -> Sieve:
        """Make the sieve of the k-grams in these spans of the prompt."""
        hashes = self._shared.hashes
        return Sieve(np.concatenate([hashes[span.start : span.end - self._min_run + 1] for span in spans]))
