"""The batches of copies that are launched on a GPU and not finished."""

from __future__ import annotations

from collections import deque

from kvshare.vllm_connector.worker.gpu import Event, Gpu

_MOST = 8  # at a time, so that the next batch is chosen late


class BatchesAhead:
    """Used by the thread that copies."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._ends: deque[Event] = deque()

    @property
    def has_room(self) -> bool:
        while self._ends and self._gpu.is_past(self._ends[0]):
            self._ends.popleft()
        return len(self._ends) < _MOST

    def add(self, end: Event) -> None:
        """Add a launched batch that ends with this event."""
        self._ends.append(end)
