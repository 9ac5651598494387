"""
A composition says for each position of a new prompt which stored KV is copied there, or that it is a gap.

These are values only; compose.py finds a good composition.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple

from delta_tree.node import NodeId, SegmentId
from delta_tree.spans import Span, gaps


class Copy(NamedTuple):
    """
    `length` tokens of a segment, from `offset` on, copied to `target_start` of the new prompt.

    A tuple, as plans of long prompts make thousands: a frozen dataclass takes three times as long to make.
    """

    donor: NodeId
    segment_id: SegmentId
    offset: int
    length: int
    target_start: int
    source_position: int  # the position for which the first of these tokens was computed
    donor_start: int  # the position of that token in the donor's prompt; differs if the donor copied it, too

    @property
    def target(self) -> Span:
        """Return the positions of the new prompt to which the tokens are copied."""
        return Span(self.target_start, self.target_start + self.length)

    @property
    def target_end(self) -> int:
        """Return the end without making a `Span`: plans of long prompts have hundreds of copies."""
        return self.target_start + self.length

    @property
    def shift(self) -> int:
        """Return by how many positions the keys must be rotated."""
        return self.target_start - self.source_position

    def continues(self, previous: "Copy") -> bool:
        """Return whether this copy follows `previous` without a gap, in segment, donor and target."""
        return (
            self.segment_id == previous.segment_id
            and self.offset == previous.offset + previous.length
            and self.target_start == previous.target_start + previous.length
            and self.donor == previous.donor
            and self.donor_start == previous.donor_start + previous.length
        )


class DonorReason(StrEnum):
    """Whether a candidate was used, and if not, why."""

    USED = "used"
    NOTHING_LEFT = "nothing_left"  # other donors covered all that it shares
    BELOW_MIN_RUN = "below_min_run"  # no usable common run is long enough
    MAX_DONORS = "max_donors"  # it shares a run, but `max_donors` donors were in use
    GENERATION = "generation"  # all its KV is above `max_generation`
    EXACT_ONLY = "exact_only"  # what it shares would be approximate copies, which were not allowed
    MISSING_SEGMENT = "missing_segment"  # a segment was dropped, or belongs to another namespace


@dataclass(frozen=True, slots=True)
class Composition:
    """
    Copies and gaps that together cover `[0, num_tokens)` exactly once.

        0            exact_length                              num_tokens
        |-- exact copies --|-- gap --|-- approximate copy --|-- gap --|

    The copies of the exact prefix have shift 0 and generation 0. Copies and gaps are sorted.
    """

    num_tokens: int
    exact_length: int
    copies: tuple[Copy, ...]
    reasons: tuple[DonorReason, ...] = ()  # by candidate, for `kvshare explain`; none where not asked for
    withheld: bool = False  # where reasons were asked for: approximate copies would take more, if allowed

    @property
    def gaps(self) -> tuple[Span, ...]:
        """Return the positions that no copy covers."""
        return gaps((copy.target for copy in self.copies), self.num_tokens)

    @property
    def num_copied(self) -> int:
        """Return the number of positions whose KV is copied, exact and approximate."""
        return sum(copy.length for copy in self.copies)

    @property
    def donors(self) -> tuple[NodeId, ...]:
        """Return the donors in use, in order of their first copy."""
        return tuple(dict.fromkeys(copy.donor for copy in self.copies))

    @property
    def approximate_donors(self) -> tuple[NodeId, ...]:
        """The donors of copies after the exact prefix, in order of their first such copy."""
        approximate = (copy for copy in self.copies if copy.target_start >= self.exact_length)
        return tuple(dict.fromkeys(copy.donor for copy in approximate))


def merge_copies(copies: Iterable[Copy], *, exact_length: int) -> tuple[Copy, ...]:
    """Sort copies by target, and join those that continue each other, but not across `exact_length`."""
    merged: list[Copy] = []
    for copy in sorted(copies, key=attrgetter("target_start")):
        if merged and copy.continues(merged[-1]) and copy.target_start != exact_length:
            merged[-1] = merged[-1]._replace(length=merged[-1].length + copy.length)
        else:
            merged.append(copy)
    return tuple(merged)
