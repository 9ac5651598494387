"""
Which request has the next turn of the thread that computes.

Requests of one tenant take turns in the order in which they come. Tenants get equal shares of the thread's
time (start-time fair queueing, Goyal et al. 1996), and one that asked for less than its share may be a fifth
of a second ahead: a few requests at once wait for the turn in progress, but not for the others' as well.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_CREDIT_S = 0.2  # what a tenant can save up; others wait so long at most


class Turns(Generic[T]):
    """Requests that are ready. Thread-safe; one thread takes them."""

    def __init__(self, tenant_of: Callable[[T], str]) -> None:
        self._tenant_of = tenant_of
        self._lock = threading.Lock()
        self._ready: dict[str, deque[T]] = {}  # by tenant; first the one whose last turn is longest ago
        self._served: dict[str, float] = {}  # seconds, of tenants that are less than the credit back
        self._now = 0.0  # what the tenant that has the turn had been served before

    def add(self, request: T) -> None:
        """The request is ready for a turn."""
        tenant = self._tenant_of(request)
        with self._lock:
            if tenant not in self._ready:
                self._ready[tenant] = deque()
                self._served[tenant] = max(self._served.get(tenant, 0.0), self._now - _CREDIT_S)
            self._ready[tenant].append(request)

    def take(self) -> T:
        """Return the request whose turn it is. Raises ValueError if none is ready."""
        with self._lock:
            tenant = min(self._ready, key=self._served.__getitem__)
            queue = self._ready.pop(tenant)
            request = queue.popleft()
            if queue:
                self._ready[tenant] = queue  # after those that were served as much
            self._now = max(self._now, self._served[tenant])
            return request

    def note(self, tenant: str, seconds: float) -> None:
        """A turn of this tenant took so long."""
        with self._lock:
            self._served[tenant] += seconds
            oldest = self._now - _CREDIT_S
            self._served = {
                name: served
                for name, served in self._served.items()
                if served > oldest or name in self._ready or name == tenant
            }
