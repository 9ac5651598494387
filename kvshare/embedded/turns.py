"""
Decides which request has the next turn of the thread that computes.

Requests of one tenant take turns in the order in which they come. Tenants get equal shares of the thread's
time (start-time fair queueing, Goyal et al. 1996), with one exception: a tenant with a shorter prefill goes
first if it has had less than a fifth of a second more than the tenant that was served least. So a few short
requests at once wait for the turn in progress, but not for all the turns that a long prompt still needs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_AHEAD_S = 0.2  # a tenant with shorter prefills may be this far ahead of another ready tenant


class TenantTurns(Generic[T]):
    """Requests that are ready. Thread-safe; one thread takes them."""

    def __init__(self, tenant_of: Callable[[T], str], left_of: Callable[[T], int | None]) -> None:
        """`left_of`: the tokens that a request's prefill has yet to compute; None once it decodes."""
        self._tenant_of, self._left_of = tenant_of, left_of
        self._lock = threading.Lock()
        self._ready: dict[str, deque[T]] = {}  # by tenant; the tenant that has waited longest is first
        self._served: dict[str, float] = {}  # seconds, by tenant, of tenants that are ready or ahead
        self._now = 0.0  # seconds that a tenant counts as served when it comes after a pause

    def add(self, request: T) -> None:
        """Add a request that is ready for a turn."""
        tenant = self._tenant_of(request)
        with self._lock:
            if tenant not in self._ready:
                self._ready[tenant] = deque()
                self._served[tenant] = max(self._served.get(tenant, 0.0), self._now)
            self._ready[tenant].append(request)

    def take(self) -> T:
        """Return the request whose turn it is. Raises ValueError if none is ready."""
        with self._lock:
            tenant = self._next()
            queue = self._ready.pop(tenant)
            request = queue.popleft()
            if queue:
                self._ready[tenant] = queue  # after tenants that were served as much
            return request

    def _next(self) -> str:
        """Return the tenant that was served least, or a tenant whose next request has a shorter prefill."""
        least = min(self._ready, key=self._served.__getitem__)
        self._now = max(self._now, self._served[least])
        if len(self._ready) == 1 or self._left_of(self._ready[least][0]) is None:
            return least
        lefts = {
            tenant: left
            for tenant, queue in self._ready.items()
            if self._served[tenant] < self._served[least] + _AHEAD_S
            and (left := self._left_of(queue[0])) is not None
        }
        return min(lefts, key=lambda tenant: (lefts[tenant], self._served[tenant]))

    def note(self, tenant: str, seconds: float) -> None:
        """Add the seconds that a turn of this tenant took."""
        with self._lock:
            self._served[tenant] += seconds
            self._served = {
                name: served
                for name, served in self._served.items()
                if served > self._now or name in self._ready or name == tenant
            }
