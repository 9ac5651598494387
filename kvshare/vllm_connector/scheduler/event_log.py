"""Events in order, for the proxy to read. The log is bounded: a reader that falls behind gets a `gap`."""

from __future__ import annotations

import secrets
import threading
from collections import deque

from kvshare.vllm_protocol.messages import Journal, JournalEvent

_MAX_EVENTS = 4096


class EventLog:
    """Events of one run of the process (`epoch`), numbered from 1. Thread-safe."""

    def __init__(self, *, max_events: int = _MAX_EVENTS) -> None:
        self.epoch = secrets.token_hex(8)
        self._events: deque[JournalEvent] = deque(maxlen=max_events)
        self._last = 0
        self._changed = threading.Condition()

    @property
    def last(self) -> int:
        """Return the number of the newest event; 0 before the first one."""
        return self._last

    def append(self, event: JournalEvent) -> None:
        with self._changed:
            self._events.append(event)
            self._last += 1
            self._changed.notify_all()

    def read(self, after: int, *, wait_s: float = 0.0) -> Journal:
        """Return the events after number `after`. If there are none, wait up to `wait_s` for the first."""
        with self._changed:
            if after == self._last and wait_s > 0:
                self._changed.wait_for(lambda: self._last > after, timeout=wait_s)
            num_new = max(0, self._last - after)
            new = list(self._events)[-num_new:] if num_new else []
            gap = after > self._last or len(new) < num_new
            return Journal(epoch=self.epoch, last=self._last, gap=gap, events=tuple(new))
