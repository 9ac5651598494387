"""
Drops segments: from the index at once, from the workers with the next step, in the proxy by an event.
Evictions of segments that stay on disk go the same way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from delta_tree import SegmentId
from kvshare.vllm_connector.scheduler.event_log import EventLog
from kvshare.vllm_connector.scheduler.segment_index import SegmentIndex
from kvshare.vllm_protocol.messages import Dropped
from kvshare.vllm_protocol.places import OnDiskOnly


class Drops:
    """Thread-safe: the control server drops, too."""

    def __init__(self, segments: SegmentIndex, events: EventLog) -> None:
        self._segments, self._events = segments, events
        self._pending: list[SegmentId] = []  # drops that the workers do not know yet
        self._evicted: list[SegmentId] = []  # evictions from memory that the workers do not know yet
        self._lock = threading.Lock()

    @property
    def pending(self) -> tuple[SegmentId, ...]:
        return tuple(self._pending)

    def drop(self, segment_ids: Iterable[SegmentId]) -> int:
        """Drop segments. Returns how many were held."""
        removed = self._segments.drop(segment_ids)
        self._note_dropped(removed)
        return len(removed)

    def note(self, segment_ids: Sequence[SegmentId]) -> None:
        """Note segments that have left memory in the index; those that are not on disk are dropped."""
        evicted = [segment_id for segment_id in segment_ids if segment_id in self._segments.disk]
        if evicted:
            with self._lock:
                self._evicted.extend(evicted)
            self._events.append(OnDiskOnly(came=tuple(evicted)))
        self._note_dropped([segment_id for segment_id in segment_ids if segment_id not in evicted])

    def take(self) -> tuple[SegmentId, ...]:
        """Return the drops that no step has had yet, for the workers."""
        with self._lock:
            taken, self._pending = tuple(self._pending), []
        return taken

    def take_evicted(self) -> tuple[SegmentId, ...]:
        """Return the evictions from memory that no step has had yet, of segments that stay on disk."""
        with self._lock:
            taken, self._evicted = tuple(self._evicted), []
        return taken

    def _note_dropped(self, segment_ids: Sequence[SegmentId]) -> None:
        if segment_ids:
            with self._lock:
                self._pending.extend(segment_ids)
            self._events.append(Dropped(tuple(segment_ids)))
