"""Loads and saves under way: the requests, the segments that their jobs read or write, and the jobs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from delta_tree import SegmentId, Span
from kvshare.vllm_connector.metadata import LoadRequest, LoadResult, SaveRequest
from kvshare.vllm_connector.worker.copying import Job, LoadWork
from kvshare.vllm_connector.worker.segment_store import Stored

if TYPE_CHECKING:
    from kvshare.vllm_connector.worker.choosing import Choosing  # which imports vLLM's model


@dataclass(frozen=True, slots=True, eq=False)
class EarlyPass:
    """
    A pass that began before its load had arrived. `began`, `ended`: marks of the device. `failed`: it raised
    an error. `waits`: for layers, by number. `share`: of the layers, if it ended before the last one.
    `listened`: what rows attended to was recorded. `choosing`: set if the load has a repair order; then this
    was its first pass, and `second` may follow.
    """

    num_tokens: int
    began: Any
    ended: Any
    failed: bool = False
    waits: slice = field(default_factory=lambda: slice(None))
    share: float = 1.0
    listened: bool = False
    choosing: Choosing | None = None
    second: EarlyPass | None = None

    @property
    def passes(self) -> Sequence[EarlyPass]:
        """Return this pass, and the second one if that was early, too."""
        return (self,) if self.second is None else (self, self.second)

    @property
    def has_failed(self) -> bool:
        return any(each.failed for each in self.passes)


@dataclass(eq=False)
class PendingLoad:
    """A load under way. `unreadable`: wanted segments that some rank cannot read, known when it arrives."""

    request: LoadRequest
    held: Mapping[SegmentId, Stored]  # of the wanted segments
    work: LoadWork | None = None
    unreadable: frozenset[SegmentId] = frozenset()
    is_cancelled: bool = False
    has_failed: bool = False  # of a load that joins a step: none of its segments is readable
    late_s: float = 0.0  # that vLLM's stream waited for it
    late: Collection[SegmentId] = ()  # not read from disk in time, known when its job is done
    early: EarlyPass | None = None  # if its placeholders are computed while it arrives
    computes_head: bool = True  # before it arrives, as far as no pass has failed

    @cached_property
    def wanted(self) -> tuple[SegmentId, ...]:
        """Return the wanted segments, in the same order on all ranks. Cached, as every step asks."""
        return tuple(sorted({copy.segment_id for copy in self.request.copies}))

    @cached_property
    def stored_ids(self) -> frozenset[SegmentId]:
        """Return the wanted segments that must be in host memory."""
        return self.request.stored_ids

    @property
    def is_from_blocks(self) -> bool:
        """Return whether all that is copied lies in vLLM's blocks."""
        return bool(self.request.sources) and not self.stored_ids

    @property
    def read_blocks(self) -> frozenset[int]:
        """Return the blocks of other requests that it copies from."""
        sources = self.request.sources.values()
        return frozenset(block_id for source in sources for block_id in source.block_ids)

    @cached_property
    def placeholders(self) -> tuple[Span, ...]:
        """Return the spans that a pass goes over if everything can be read."""
        return self.request.passed()

    @property
    def segments(self) -> Collection[Stored]:
        """Return the segments that its job reads."""
        return self.held.values()

    def cancel_if_in(self, request_ids: Collection[str]) -> None:
        self.is_cancelled = self.is_cancelled or self.request.request_id in request_ids

    def is_readable(self, segment_id: SegmentId) -> bool:
        """Return whether this rank had a segment, with the right bytes. Known when its job is done."""
        assert self.work is not None
        if segment_id not in self.stored_ids:
            return True  # copied from blocks only
        return segment_id in self.held and segment_id not in self.work.damaged

    def failure(self) -> LoadResult:
        """Return a failed result, after which vLLM computes the request's prompt."""
        return LoadResult(True, self.unreadable, late=frozenset(self.late))


@dataclass(eq=False)
class PendingSave:
    """A save under way. `mark`: its rows are computed once vLLM's stream has reached it."""

    request: SaveRequest
    mark: Any
    targets: Mapping[SegmentId, Stored] = field(default_factory=dict)
    has_room: bool = True

    @property
    def segments(self) -> Collection[Stored]:
        """Return the segments that its job writes."""
        return self.targets.values()


@dataclass(eq=False)
class UnderWay:
    """A transfer and its job. `is_lost`: it counts as failed; set on all ranks between the same steps."""

    transfer: PendingLoad | PendingSave
    job: Job
    is_lost: bool = False
