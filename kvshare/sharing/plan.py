"""
A plan says, position by position, where a prompt's KV comes from. It is a value: printable, serialisable,
hashable.

    position   0                                                        num_tokens
               [ exact prefix ][ placeholder ][repair][ copy ][ph][ copy ][ tail ]
    copies       covers it                              ....        ....
    placeholders                [--- one run --------]        [--]       [------]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from delta_tree import Copy, NodeId, Span, merge


@dataclass(frozen=True, slots=True)
class Estimate:
    """
    What a prefill should take, from measured rates. Seconds.

    The lookup is paid before there is a plan: it counts in what sharing saves, not in whether a plan pays.
    """

    full_s: float
    shared_s: float
    lookup_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """
    Copies and placeholders cover every position of the prompt exactly once.

    `reason` says why not more is shared, where something was refused; else it is None.
    """

    num_tokens: int
    exact_length: int  # leading tokens whose KV was computed after the very same tokens
    copies: tuple[Copy, ...]  # ascending by target; those inside [0, exact_length) are exact
    placeholders: tuple[Span, ...]  # ascending, disjoint, not touching: what is computed
    repairs: tuple[Span, ...]  # the part of the placeholders whose tokens a donor had
    generation: int  # of the KV computed behind the first approximate copy; 0 if there is none
    estimate: Estimate
    reason: str | None = None

    @property
    def decision(self) -> str:
        return "exact" if self.num_copied == 0 else "approx"

    @property
    def num_computed(self) -> int:
        return sum(len(span) for span in self.placeholders)

    @property
    def num_repaired(self) -> int:
        return sum(len(span) for span in self.repairs)

    @property
    def num_recomputed(self) -> int:
        """Tokens that no donor had."""
        return self.num_computed - self.num_repaired

    @property
    def num_copied(self) -> int:
        """Tokens with approximate KV."""
        return self.num_tokens - self.exact_length - self.num_computed

    @property
    def charged_budget(self) -> float:
        """
        Layer-tokens given fresh Q/K/V in prefill, over layers x prompt tokens; there is no selection
        pass.
        """
        return self.num_computed / self.num_tokens

    @property
    def donors(self) -> tuple[NodeId, ...]:
        """In order of first use."""
        return tuple(dict.fromkeys(copy.donor for copy in self.copies))

    @property
    def first_approximate(self) -> int:
        """Position of the first approximate copy; num_tokens if all is exact."""
        starts = (copy.target_start for copy in self.copies if copy.target_start >= self.exact_length)
        return min(starts, default=self.num_tokens)


@dataclass(frozen=True, slots=True)
class NoPlan:
    """
    Nothing is shared, and why. Reasons are fixed words, so that they can be counted:

    off, short_prompt, no_candidates, nothing_in_common, not_enough_saved, does_not_pay, too_much_relocated,
    rotation_unknown, lookup_failed, kv_gone; in front of vLLM also no_connector, replica_gone
    """

    reason: str


def clip(copy: Copy, span: Span) -> Copy | None:
    """The part of a copy whose target lies in `span`, or None."""
    target_start = copy.target_start
    start = max(target_start, span.start)
    length = min(target_start + copy.length, span.end) - start
    if length <= 0:
        return None
    if length == copy.length:
        return copy
    ahead = start - target_start
    return Copy(
        donor=copy.donor,
        segment_id=copy.segment_id,
        offset=copy.offset + ahead,
        length=length,
        target_start=start,
        source_position=copy.source_position + ahead,
        donor_start=copy.donor_start + ahead,
    )


def without(copies: Iterable[Copy], holes: Iterable[Span]) -> tuple[Copy, ...]:
    """The copies, ascending by target, with the holes cut out of them. Linear in copies and holes."""
    sorted_holes = merge(holes)
    first = 0  # of the holes that end behind the copies so far
    kept: list[Copy] = []
    for copy in copies:
        start, end = copy.target_start, copy.target_start + copy.length
        while first < len(sorted_holes) and sorted_holes[first].end <= start:
            first += 1
        if first == len(sorted_holes) or sorted_holes[first].start >= end:
            kept.append(copy)
            continue
        at = first
        while at < len(sorted_holes) and (hole := sorted_holes[at]).start < end:
            if hole.start > start and (part := clip(copy, Span(start, hole.start))):
                kept.append(part)
            start = max(start, hole.end)
            at += 1
        if start < end and (part := clip(copy, Span(start, end))):
            kept.append(part)
    return tuple(kept)
