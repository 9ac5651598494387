"""Where segments' bytes are: this process's memory, or the vLLM replicas that computed them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from delta_tree import SegmentId

if TYPE_CHECKING:
    from kvshare.kv.segment import SegmentKV  # imports torch


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """What a plan's segments came to. A tier whose bytes stay where they are hands out none of them."""

    segments: Mapping[SegmentId, SegmentKV]
    missing: frozenset[SegmentId]


class Tier(Protocol):
    """Holds segments, or knows who does. Thread-safe."""

    @property
    def num_bytes(self) -> int: ...

    def __contains__(self, segment_id: object) -> bool: ...

    def fetch(self, segment_ids: Iterable[SegmentId]) -> Fetched:
        """The segments, and which of them are not here or not whole."""

    def drop(self, segment_ids: Iterable[SegmentId]) -> object:
        """Let go of segments; ids that are not here are ignored."""


class Sized(Protocol):
    """What stands for a segment in a table."""

    @property
    def num_bytes(self) -> int: ...


SizedT = TypeVar("SizedT", bound=Sized)


class SegmentTable(Generic[SizedT]):
    """Segments by id, in the order in which they came, and the bytes they take together. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: dict[SegmentId, SizedT] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, segment_id: object) -> bool:
        return segment_id in self._entries

    def add(self, segment_id: SegmentId, entry: SizedT) -> None:
        """The caller has made room. Raises ValueError for an id that is held: ids are never reused."""
        with self._lock:
            if segment_id in self._entries:
                raise ValueError(f"segment {segment_id} is already held")
            self._entries[segment_id] = entry
            self.num_bytes += entry.num_bytes

    def drop(self, segment_ids: Iterable[SegmentId]) -> list[SegmentId]:
        """Let go of segments; ids that are not here are ignored. Returns those that were."""
        with self._lock:
            held = [segment_id for segment_id in dict.fromkeys(segment_ids) if segment_id in self._entries]
            self.num_bytes -= sum(self._entries.pop(segment_id).num_bytes for segment_id in held)
            return held


class EverySegment:
    """A tier that has every segment and no bytes of any: for planning where nothing is computed."""

    num_bytes = 0

    def __contains__(self, segment_id: object) -> bool:
        return True

    def fetch(self, segment_ids: Iterable[SegmentId]) -> Fetched:
        return Fetched({}, frozenset())

    def drop(self, segment_ids: Iterable[SegmentId]) -> None:
        """Nothing is held."""
