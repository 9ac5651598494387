"""
Rows of segments in the blocks of requests that copied them. While one request is decoded, another
near-duplicate of the same donor is copied from its blocks, not from host memory.

Only rows that were not moved count: these equal the segment's rows, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_tree import SegmentId, Span
from kvshare.vllm_connector.metadata import BlockSource
from kvshare.vllm_connector.scheduler.block_places import BlockPlace, place_in
from kvshare.vllm_protocol.messages import WireCopy

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

_KEPT = 8  # runs of each segment: about as many requests copy from one donor at once


@dataclass(frozen=True, slots=True, eq=False)
class _CopiedRun:
    """`span`: tokens of the segment."""

    segment_id: SegmentId
    span: Span
    place: BlockPlace


class CopiedRows:
    """One per scheduler, part of `BlockDonors`. All runs together have at most `most_blocks` blocks."""

    def __init__(self) -> None:
        self._runs: dict[SegmentId, list[_CopiedRun]] = {}  # the newest last
        self._by_age: dict[_CopiedRun, None] = {}  # all of them, the newest last
        self._num_blocks = 0

    def note(
        self,
        copies: Iterable[WireCopy],
        block_ids: Sequence[int],
        pool: BlockPool,
        size: int,
        *,
        most_blocks: int,
    ) -> None:
        """Note that the blocks of a request, of `size` tokens each, hold what these copies wrote."""
        for copy in copies:
            if copy.shift == 0:
                span = Span(copy.offset, copy.offset + copy.length)
                place = place_in(pool, copy.target, block_ids, block_size=size)
                if not place.is_gone(pool):
                    self._add(_CopiedRun(copy.segment_id, span, place))
        while self._num_blocks > most_blocks:
            self._remove(next(iter(self._by_age)))

    def find(self, segment_id: SegmentId, span: Span, pool: BlockPool, size: int) -> BlockSource | None:
        """Return where these tokens of a segment lie as a whole, by the newest copy that has them, if any."""
        for run in tuple(reversed(self._runs.get(segment_id, ()))):
            if run.place.is_gone(pool):
                self._remove(run)
            elif run.span.start <= span.start and span.end <= run.span.end:
                part = Span(span.start - run.span.start, span.end - run.span.start)
                if (source := run.place.source(part, pool, block_size=size)) is not None:
                    return source
        return None

    def forget(self, segment_ids: Iterable[SegmentId]) -> None:
        """Forget dropped segments."""
        for segment_id in segment_ids:
            for run in tuple(self._runs.get(segment_id, ())):
                self._remove(run)

    def clear(self) -> None:
        self._runs.clear()
        self._by_age.clear()
        self._num_blocks = 0

    def _add(self, run: _CopiedRun) -> None:
        runs = self._runs.setdefault(run.segment_id, [])
        runs.append(run)
        self._by_age[run] = None
        self._num_blocks += len(run.place.block_ids)
        if len(runs) > _KEPT:
            self._remove(runs[0])

    def _remove(self, run: _CopiedRun) -> None:
        del self._by_age[run]
        self._num_blocks -= len(run.place.block_ids)
        runs = self._runs[run.segment_id]
        runs.remove(run)
        if not runs:
            del self._runs[run.segment_id]
