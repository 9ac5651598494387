"""
Rows of segments in the blocks of requests that copied them: while one user's answer is decoded, another's
near-duplicate of the same donor is copied from its blocks, not from host memory.

Only rows that were not moved: these are the segment's own, byte for byte.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_tree import SegmentId, Span
from kvshare.vllm_connector.metadata import BlockSource
from kvshare.vllm_connector.scheduler.block_places import BlockPlace, place_in
from kvshare.vllm_protocol.messages import WireCopy

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

_KEPT = 8  # of each segment: as many requests as copy from one donor at once


@dataclass(frozen=True, slots=True, eq=False)
class _CopiedRun:
    """`span`: tokens of the segment."""

    span: Span
    place: BlockPlace


class CopiedRows:
    """One per scheduler, part of `BlockDonors`."""

    def __init__(self) -> None:
        self._runs: dict[SegmentId, deque[_CopiedRun]] = {}

    def note(self, copies: Iterable[WireCopy], block_ids: Sequence[int], pool: BlockPool, size: int) -> None:
        """A request with these blocks, of `size` tokens each, holds what was copied, as it was copied."""
        for copy in copies:
            if copy.shift == 0:
                span = Span(copy.offset, copy.offset + copy.length)
                place = place_in(pool, copy.target, block_ids, block_size=size)
                runs = self._runs.setdefault(copy.segment_id, deque(maxlen=_KEPT))
                runs.append(_CopiedRun(span, place))

    def find(self, segment_id: SegmentId, span: Span, pool: BlockPool, size: int) -> BlockSource | None:
        """Where these tokens of the segment can be read as a whole. The newest copy comes first."""
        for run in reversed(self._runs.get(segment_id, ())):
            if run.span.start <= span.start and span.end <= run.span.end:
                part = Span(span.start - run.span.start, span.end - run.span.start)
                if (source := run.place.source(part, pool, block_size=size)) is not None:
                    return source
        return None

    def forget(self, segment_ids: Iterable[SegmentId]) -> None:
        """They are dropped."""
        for segment_id in segment_ids:
            self._runs.pop(segment_id, None)

    def clear(self) -> None:
        self._runs.clear()
