"""
The interface of a tier of KV; the tier in this process; one that claims to hold all, for offline explaining.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from delta_tree import Segment, SegmentId
from kvshare.status import TierStatus

if TYPE_CHECKING:
    from kvshare.kv.sequence import SegmentKV  # imports torch


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """
    The result of a fetch. A tier whose bytes are elsewhere returns no segments.

    `late`: held, and not read within the time that was given, or not readable now. `read_bytes` came from
    disk, in `read_s`, with parts of what was late. `is_slow`: reads took longer than that. `has_pace`: parts
    of what was late are known, too. `reads`: what is still read, if the tier did not wait for it.
    """

    segments: Mapping[SegmentId, SegmentKV]
    missing: frozenset[SegmentId]
    late: frozenset[SegmentId] = frozenset()
    read_bytes: int = 0
    read_s: float = 0.0
    is_slow: bool = False
    has_pace: bool = False
    reads: PendingReads | None = None


class PendingReads(Protocol):
    """Reads from disk that are under way. For one thread at a time."""

    def wait(self, at_most_s: float) -> bool:
        """Wait until all is read, or late; return whether it is by then."""

    def end(self) -> Fetched:
        """Give up what is not read yet, which is late. Returns what `fetch` does."""

    def cancel(self) -> object:
        """Give up what is not read yet, because it is not needed any more."""


class Budget(Protocol):
    """A memory for segments: bytes in use, its limit, and which segments it holds."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def max_bytes(self) -> int: ...

    def __contains__(self, segment_id: SegmentId) -> bool: ...


class Tier(Protocol):
    """Holds segments, or knows which replica does. Thread-safe."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def on_disk(self) -> Container[SegmentId]:
        """Return the segments that must be read from disk."""

    def __contains__(self, segment_id: object) -> bool: ...

    def fetch(
        self, segment_ids: Iterable[SegmentId], *, within_s: float = math.inf, doubt_s: float = math.inf
    ) -> Fetched:
        """
        The segments, and the ids of those that are missing or damaged, or are not read in time; `doubt_s`:
        from then on reads are given up that will not be, at their pace.
        """

    def drop(self, segment_ids: Iterable[SegmentId]) -> object:
        """Free segments; unknown ids are ignored."""


@runtime_checkable
class ReadsMeanwhile(Protocol):
    """A tier whose callers may do something else while it reads."""

    def begin(self, segment_ids: Iterable[SegmentId], *, within_s: float, doubt_s: float) -> Fetched:
        """
        Do what `fetch` does without waiting: what is read is not in the result, but `reads` is. The
        segments are read in the given order.
        """


class Sized(Protocol):
    """An entry of a `SegmentTable`."""

    @property
    def num_bytes(self) -> int: ...


SizedT = TypeVar("SizedT", bound=Sized)


class SegmentTable(Generic[SizedT]):
    """Segments by id, in the order of their arrival, and their bytes in total. Thread-safe."""

    on_disk: Container[SegmentId] = frozenset()

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: dict[SegmentId, SizedT] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, segment_id: object) -> bool:
        return segment_id in self._entries

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """Return the budgets for which prompts are evicted."""
        return (self,)

    def add(self, segment_id: SegmentId, entry: SizedT) -> None:
        """Add an entry; the caller has made room. Raises ValueError if the id is held already."""
        with self._lock:
            if segment_id in self._entries:
                raise ValueError(f"segment {segment_id} is already held")
            self._entries[segment_id] = entry
            self.num_bytes += entry.num_bytes

    def drop(self, segment_ids: Iterable[SegmentId]) -> list[SegmentId]:
        """Free segments; unknown ids are ignored. Returns the ids that were freed."""
        with self._lock:
            held = [segment_id for segment_id in dict.fromkeys(segment_ids) if segment_id in self._entries]
            self.num_bytes -= sum(self._entries.pop(segment_id).num_bytes for segment_id in held)
            return held


class _Stored(NamedTuple):
    segment: SegmentKV
    checksum: int

    @property
    def num_bytes(self) -> int:
        return self.segment.num_bytes


class MemoryTier(SegmentTable[_Stored]):
    """
    Segments in host memory with their checksums, lost when the process ends. `kvshare.sharing` frees them.

    A segment that is dropped while a request reads it stays in memory until the request has finished with it,
    as Python counts references to its tensors. It leaves the accounting at once.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._num_hits = self._num_misses = 0

    def put(self, segment: Segment, kv: SegmentKV) -> None:
        """Store a segment. Raises ValueError for one that is stored already."""
        self.add(segment.segment_id, _Stored(kv, segment.checksum))

    def close(self) -> None:
        """Do nothing: nothing is to be written."""

    def status(self) -> tuple[TierStatus, ...]:
        """Return how much is held."""
        return (
            TierStatus("memory", len(self), self.num_bytes, self.max_bytes, self._num_hits, self._num_misses),
        )

    def fetch(
        self, segment_ids: Iterable[SegmentId], *, within_s: float = math.inf, doubt_s: float = math.inf
    ) -> Fetched:
        """Return the segments whose bytes still have their checksums; the others are missing."""
        wanted = frozenset(segment_ids)
        entries = ((segment_id, self._entries.get(segment_id)) for segment_id in wanted)
        segments = {
            segment_id: entry.segment
            for segment_id, entry in entries
            if entry is not None and entry.segment.computed_checksum() == entry.checksum
        }
        self._num_hits += len(segments)
        self._num_misses += len(wanted) - len(segments)
        return Fetched(segments, wanted - segments.keys())


class EverySegment:
    """A tier that claims to hold every segment and has no bytes: for planning without computing."""

    num_bytes = 0
    on_disk: Container[SegmentId] = frozenset()

    def __contains__(self, segment_id: object) -> bool:
        return True

    def fetch(
        self, segment_ids: Iterable[SegmentId], *, within_s: float = math.inf, doubt_s: float = math.inf
    ) -> Fetched:
        return Fetched({}, frozenset())

    def drop(self, segment_ids: Iterable[SegmentId]) -> None:
        """Do nothing: there are no bytes to free."""
