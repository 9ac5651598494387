"""Which replica holds which segment. The bytes stay there; the replicas' journals say what they hold."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from delta_tree import SegmentId
from kvshare.kv.tier import Fetched


@dataclass(frozen=True, slots=True)
class ReplicaBudget:
    """What one replica holds, and what it may be given; a `Budget` of `sharing/keeper.py`."""

    tier: RemoteTier
    replica: str
    max_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.tier.num_bytes_at(self.replica)

    def __contains__(self, segment_id: SegmentId) -> bool:
        return self.tier.holds(self.replica, segment_id)


class RemoteTier:
    """
    A tier whose bytes are in the replicas. Thread-safe.

    What the tree lets go of (`drop`) is still over there: it waits in `take_dropped` to be sent to the
    replica, and `on_drop` is called with the replica's name, from any thread.
    """

    def __init__(self) -> None:
        self.on_drop: Callable[[str], None] | None = None
        self._holders: dict[SegmentId, tuple[str, int]] = {}  # replica's name, bytes
        self._num_segments: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()
        self._dropped: dict[str, list[SegmentId]] = {}
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return sum(self._num_bytes.values())

    def num_bytes_at(self, replica: str) -> int:
        return self._num_bytes[replica]

    def num_segments_at(self, replica: str) -> int:
        return self._num_segments[replica]

    def __contains__(self, segment_id: object) -> bool:
        return segment_id in self._holders

    def holds(self, replica: str, segment_id: SegmentId) -> bool:
        return self._holders.get(segment_id, ("", 0))[0] == replica

    def fetch(self, segment_ids: Iterable[SegmentId]) -> Fetched:
        """No bytes, only what is missing: the plan goes to where they are."""
        return Fetched({}, frozenset(entry for entry in segment_ids if entry not in self._holders))

    def held_by(self, replica: str) -> frozenset[SegmentId]:
        with self._lock:
            return frozenset(entry for entry, (holder, _) in self._holders.items() if holder == replica)

    def all_held(self) -> frozenset[SegmentId]:
        with self._lock:
            return frozenset(self._holders)

    def add(self, replica: str, segments: Mapping[SegmentId, int]) -> None:
        """A replica holds these segments, of so many bytes."""
        with self._lock:
            for segment_id, num_bytes in segments.items():
                self._remove(segment_id)
                self._holders[segment_id] = (replica, num_bytes)
                self._num_segments[replica] += 1
                self._num_bytes[replica] += num_bytes

    def forget(self, segment_ids: Iterable[SegmentId]) -> None:
        """The replica has dropped these by itself: nothing is to be sent."""
        with self._lock:
            for segment_id in segment_ids:
                self._remove(segment_id)

    def drop(self, segment_ids: Iterable[SegmentId]) -> None:
        """No prompt refers to these any more: their replicas are to drop them, too."""
        holders = set()
        with self._lock:
            for segment_id in segment_ids:
                if (holder := self._remove(segment_id)) is not None:
                    self._dropped.setdefault(holder, []).append(segment_id)
                    holders.add(holder)
        if (on_drop := self.on_drop) is not None:
            for holder in holders:
                on_drop(holder)

    def take_dropped(self, replica: str) -> list[SegmentId]:
        """What a replica is yet to drop; the caller sends it."""
        with self._lock:
            return self._dropped.pop(replica, [])

    def drop_again(self, replica: str, segment_ids: Iterable[SegmentId]) -> None:
        """They could not be sent to the replica: they are sent with the next."""
        with self._lock:
            self._dropped.setdefault(replica, []).extend(segment_ids)

    def _remove(self, segment_id: SegmentId) -> str | None:
        entry = self._holders.pop(segment_id, None)
        if entry is None:
            return None
        holder, num_bytes = entry
        self._num_segments[holder] -= 1
        self._num_bytes[holder] -= num_bytes
        return holder
