"""
A plan says for every position of a prompt where its KV comes from. Plans are immutable values.

    position   0                                                        num_tokens
               [ exact prefix ][ placeholder ][repair][ copy ][ph][ copy ][ tail ]
    copies       covers it                              ....        ....
    placeholders                [--- one run --------]        [--]       [------]
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Container, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import attrgetter

from delta_tree import Copy, NodeId, SegmentId, Span, merge
from kvshare.reasons import Reason
from kvshare.requests import Decision, Prediction
from kvshare.sharing.rates import IDLE, Estimate, PrefillWork, Queue

# The fraction is for short prompts, in which 512 tokens span several documents.
MAX_SMALL_SHIFT, _SMALL_SHIFT_FRACTION = 512, 0.1
MAX_LISTENERS = 32  # the last placeholders: what they attend to is repaired
MAX_RENEWED = 64  # other placeholders recomputed after the repairs
MAX_TAIL_TOKENS = 1024  # with more after the last copy, no repairs are chosen: vLLM computes them in steps


@dataclass(frozen=True, slots=True)
class RepairOrder:
    """
    How many copied tokens an engine computes again, chosen after a probe pass (`sharing.repair_choice`) from
    `stretches`, contiguous approximate copies of one donor. `probes`: positions whose change is measured.
    """

    stretches: tuple[Span, ...]  # ascending, disjoint
    probes: tuple[int, ...]  # ascending
    num_tokens: int  # to repair, exactly


@dataclass(frozen=True, slots=True)
class Plan:
    """
    Copies and placeholders cover every position of the prompt exactly once.
    With an `order` the engine still has to choose repairs among the copies; `with_repairs` gives the plan
    with them. `reason`: why not more is shared, if a better plan was refused; else None.
    """

    num_tokens: int
    exact_length: int  # leading tokens whose KV was computed after the very same tokens
    copies: tuple[Copy, ...]  # ascending by target; those inside [0, exact_length) are exact
    placeholders: tuple[Span, ...]  # ascending, disjoint, not touching: what is computed
    repairs: tuple[Span, ...]  # the part of the placeholders whose tokens a donor had
    generation: int  # of the KV computed after the first approximate copy; 0 if there is none
    estimate: Estimate
    reason: Reason | None = None
    order: RepairOrder | None = None
    exact_until: int | None = None  # set by `with_repairs`: later KV attended to copies that were replaced
    prediction: Prediction | None = None  # for the approximate plan, used or refused
    num_ahead: int = 0  # leading tokens that are computed while copies are read from disk; see `splitting`

    @property
    def deviation(self) -> float:
        """Return the expected KL of an answer with this plan, nats; 0 without approximate copies."""
        return self.prediction.expected if self.prediction is not None and self.num_copied else 0.0

    @property
    def decision(self) -> Decision:
        return Decision.EXACT if self.num_copied == 0 else Decision.APPROX

    @property
    def num_computed(self) -> int:
        """Return the number of tokens whose KV is computed, including repairs that are not chosen yet."""
        return _total(self.placeholders) + self._num_ordered

    @property
    def num_repaired(self) -> int:
        return _total(self.repairs) + self._num_ordered

    @property
    def _num_ordered(self) -> int:
        return 0 if self.order is None else self.order.num_tokens

    @property
    def num_recomputed(self) -> int:
        """Return the number of tokens that no donor had."""
        return self.num_computed - self.num_repaired

    @property
    def num_copied(self) -> int:
        """Return the number of copied tokens with approximate KV."""
        return self.num_tokens - self.num_exact - self.num_computed

    @property
    def num_exact(self) -> int:
        """Return how many tokens of the exact prefix are copied. The others are computed while KV is read."""
        length = self.exact_length
        computed = takewhile(lambda span: span.start < length, self.placeholders)
        return length - sum([min(span.end, length) - span.start for span in computed])

    @property
    def charged_budget(self) -> float:
        """Return layer-tokens with fresh Q/K/V in prefill (selection included) / layers x prompt tokens."""
        return (self.num_computed + self.num_selecting) / self.num_tokens

    @property
    def num_selecting(self) -> int:
        """Return the number of tokens computed to choose repairs, or computed once more after them."""
        if self.order is None:
            return 0
        first = self.first_approximate
        after = self.placeholders[bisect_right(self.placeholders, first, key=attrgetter("end")) :]
        stale = _total(after) - (max(0, first - after[0].start) if after else 0)
        num_listening = _total(self.listeners)
        return len(self.order.probes) + num_listening + min(MAX_RENEWED, max(0, stale - num_listening))

    def work(self, *, num_extra_passes: int = 0, queue: Queue = IDLE) -> PrefillWork:
        """
        Return what carrying out the plan takes, where repairs that are to be chosen attend to half of the
        prompt. `num_extra_passes`: those of an approximate plan, beyond the engine's own
        """
        num_computed = self.num_computed
        num_tokens, in_spans = num_computed + self.num_selecting, num_computed - self._num_ordered
        pairs = sum([span.end**2 - span.start**2 for span in self.placeholders]) / 2
        num_reused = self.num_tokens - num_computed
        extra = num_reused != self.num_exact  # as `decision` says
        return PrefillWork(
            num_tokens=num_tokens,
            num_pairs=pairs + (num_tokens - in_spans) * self.num_tokens / 2,
            num_passes=extra * num_extra_passes + (self.order is not None) + (self.num_ahead > 0),
            num_reused=num_reused,
            num_in_blocks=min(num_reused, self.num_in(queue.in_blocks)),  # chosen repairs are among them
            num_on_disk=min(num_reused, self.num_in(queue.to_read)),
            num_ahead=self.num_ahead,
        )

    @property
    def listeners(self) -> tuple[Span, ...]:
        """Return the last placeholders: what they attend to is repaired, then they are computed again."""
        return last_tokens(self.placeholders, MAX_LISTENERS)

    @property
    def probe_pass(self) -> tuple[Span, ...]:
        """Return the spans that the first pass computes: the placeholders, and the probes of an order."""
        probes = () if self.order is None else self.order.probes
        return merge([*self.placeholders, *(Span(place, place + 1) for place in probes)])

    @property
    def may_compute(self) -> tuple[Span, ...]:
        """Return every position that may be computed: the placeholders, and the stretches of an order."""
        stretches = () if self.order is None else self.order.stretches
        return merge([*self.placeholders, *stretches])

    @property
    def donors(self) -> tuple[NodeId, ...]:
        """Return the donors in the order of first use."""
        return tuple(dict.fromkeys(copy.donor for copy in self.copies))

    @property
    def num_from(self) -> Counter[NodeId]:
        """Count the tokens that are copied from each donor."""
        counts: Counter[NodeId] = Counter()
        for copy in self.copies:
            counts[copy.donor] += copy.length
        return counts

    def num_in(self, place: Container[SegmentId]) -> int:
        """Count the tokens that are copied from these segments."""
        if isinstance(place, Set) and not place:
            return 0
        return sum([copy.length for copy in self.copies if copy.segment_id in place])

    @property
    def first_approximate(self) -> int:
        """Return the position of the first approximate KV; num_tokens if all is exact."""
        starts = (copy.target_start for copy in self.copies if copy.target_start >= self.exact_length)
        first = min(starts, default=self.num_tokens)
        return first if self.exact_until is None else min(first, self.exact_until)

    def with_repairs(self, chosen: Sequence[Span]) -> Plan:
        """
        Return the plan with the chosen repairs, which replace the order. The probe pass attended to the
        copies that are now replaced, so its KV stays approximate (`exact_until`).
        """
        copied = without(self.copies, chosen)
        return replace(
            self,
            copies=copied,
            placeholders=merge([*self.placeholders, *chosen]),
            repairs=merge([*self.repairs, *chosen]),
            order=None,
            exact_until=self.first_approximate,
        )


@dataclass(frozen=True, slots=True)
class NoPlan:
    """Nothing is copied. `reason` says why; None if it does not belong to a request."""

    reason: Reason | None = None
    prediction: Prediction | None = None  # for the refused plan
    refused_by_rates: bool = False  # also where `reason` is an earlier cause: what is left does not pay


def small_shift(num_tokens: int) -> int:
    """Return the largest shift, in tokens, that does not count as a relocation in a prompt of this length."""
    return min(MAX_SMALL_SHIFT, int(_SMALL_SHIFT_FRACTION * num_tokens))


def last_tokens(spans: Sequence[Span], count: int) -> tuple[Span, ...]:
    """The last `count` positions of ascending spans."""
    last: list[Span] = []
    for span in reversed(spans):
        if count <= 0:
            break
        last.append(Span(max(span.start, span.end - count), span.end))
        count -= len(span)
    return tuple(reversed(last))


def cut(spans: Iterable[Span], place: int) -> tuple[Span, ...]:
    """Return the spans; a span that contains `place` is split there."""
    parts: list[Span] = []
    for span in spans:
        middle = min(max(place, span.start), span.end)
        parts += [part for part in (Span(span.start, middle), Span(middle, span.end)) if part]
    return tuple(parts)


def clip(copy: Copy, span: Span) -> Copy | None:
    """Return the part of a copy whose target lies in `span`, or None."""
    target_start = copy.target_start
    start = max(target_start, span.start)
    length = min(target_start + copy.length, span.end) - start
    if length <= 0:
        return None
    if length == copy.length:
        return copy
    ahead = start - target_start
    return copy._replace(
        offset=copy.offset + ahead,
        length=length,
        target_start=start,
        source_position=copy.source_position + ahead,
        donor_start=copy.donor_start + ahead,
    )


def uncovered(copies: Sequence[Copy], num_tokens: int) -> tuple[Span, ...]:
    """Return the positions of a prompt that no copy covers. `copies`: ascending by target, disjoint."""
    gaps, end = [], 0
    for copy in copies:
        if copy.target_start > end:
            gaps.append(Span(end, copy.target_start))
        end = copy.target_start + copy.length
    if end < num_tokens:
        gaps.append(Span(end, num_tokens))
    return tuple(gaps)


def within(copies: Sequence[Copy], span: Span) -> tuple[Copy, ...]:
    """Return the copies clipped to a span. `copies`: ascending by target, disjoint."""
    if not span:
        return ()
    first = bisect_right(copies, span.start, key=lambda copy: copy.target_start + copy.length)
    inside = list(copies[first : bisect_left(copies, span.end, key=attrgetter("target_start"))])
    for edge in (0, -1) if inside else ():
        if (part := clip(inside[edge], span)) is not None:
            inside[edge] = part
    return tuple(inside)


def without(copies: Iterable[Copy], holes: Iterable[Span]) -> tuple[Copy, ...]:
    """Cut the holes out of copies that ascend by target. Linear in copies and holes."""
    sorted_holes = merge(holes)
    first = 0  # index of the first hole that ends after the copy's start
    rest: list[Copy] = []
    for copy in copies:
        start, end = copy.target_start, copy.target_start + copy.length
        while first < len(sorted_holes) and sorted_holes[first].end <= start:
            first += 1
        if first == len(sorted_holes) or sorted_holes[first].start >= end:
            rest.append(copy)
            continue
        at = first
        while at < len(sorted_holes) and (hole := sorted_holes[at]).start < end:
            if hole.start > start and (part := clip(copy, Span(start, hole.start))):
                rest.append(part)
            start = max(start, hole.end)
            at += 1
        if start < end and (part := clip(copy, Span(start, end))):
            rest.append(part)
    return tuple(rest)


def _total(spans: Iterable[Span]) -> int:
    return sum([span.end - span.start for span in spans])
