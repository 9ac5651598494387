"""
Limits of a tenant: requests a minute, and requests at a time, with all its keys together.

Requests a minute are a bucket: a tenant that was quiet may send all of them at once, and then gets one more
each 60 / requests_per_minute seconds. What is refused takes none.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from kvshare.errors import ErrorCode
from kvshare.settings import Access, TenantSettings
from proxy.errors import HttpError


class Limit(StrEnum):
    """The limit that a request exceeded."""

    REQUESTS = "requests_per_minute"
    IN_FLIGHT = "max_in_flight"


@dataclass(frozen=True, slots=True)
class Allowance:
    """The number of requests that a tenant has left, and when it has all of them again."""

    limit: int
    remaining: int
    reset_s: float

    def headers(self, *, is_anthropic: bool) -> dict[str, str]:
        """Return the headers of the API whose client asks."""
        if is_anthropic:
            at = datetime.now(UTC) + timedelta(seconds=self.reset_s)
            reset = at.isoformat(timespec="seconds").replace("+00:00", "Z")
            return self._named("anthropic-ratelimit-requests-{}", reset)
        return self._named("x-ratelimit-{}-requests", duration(self.reset_s))

    def _named(self, name: str, reset: str) -> dict[str, str]:
        parts = {"limit": str(self.limit), "remaining": str(self.remaining), "reset": reset}
        return {name.format(part): value for part, value in parts.items()}


class _Bucket:
    """The requests that a tenant has left; they come back evenly."""

    def __init__(self, limit: int, now: float) -> None:
        self.limit, self._left, self._at = limit, float(limit), now

    def resized(self, limit: int, now: float) -> _Bucket:
        """Make a bucket of another limit, with the same share of it left."""
        self._refill(now)
        other = _Bucket(limit, now)
        other._left = limit * self._left / self.limit
        return other

    def wait_s(self, now: float) -> float:
        """Until a request may come; 0: now."""
        self._refill(now)
        return 0.0 if self._left >= 1 else (1 - self._left) * 60 / self.limit

    def take(self) -> None:
        self._left -= 1

    def allowance(self, now: float) -> Allowance:
        self._refill(now)
        return Allowance(self.limit, max(0, int(self._left)), (self.limit - self._left) * 60 / self.limit)

    def _refill(self, now: float) -> None:
        self._left = min(float(self.limit), self._left + (now - self._at) * self.limit / 60)
        self._at = now


class Quotas:
    """The limits in force and what is used of them. All methods run on the event loop."""

    def __init__(self, access: Access, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._access, self._clock = access, clock
        self._buckets: dict[str, _Bucket] = {}
        self._num_in_flight: Counter[str] = Counter()
        self.num_refused: Counter[tuple[str, Limit]] = Counter()

    def use(self, access: Access) -> None:
        """Go on with these limits. What was used counts on."""
        self._access = access
        for tenant in list(self._buckets):
            limit = self.limits_of(tenant).requests_per_minute
            if limit is None:
                del self._buckets[tenant]
            elif limit != self._buckets[tenant].limit:
                self._buckets[tenant] = self._buckets[tenant].resized(limit, self._clock())

    def limits_of(self, tenant: str) -> TenantSettings:
        return self._access.limits_of(tenant)

    def num_in_flight(self, tenant: str) -> int:
        return self._num_in_flight[tenant]

    @contextmanager
    def admitted(self, tenant: str) -> Iterator[None]:
        """
        Count a request of the tenant while inside.

        Raises:  HttpError 429 if a limit is reached
        """
        limits = self.limits_of(tenant)
        self._check_in_flight(limits)
        if limits.requests_per_minute is not None:
            self._take(limits, limits.requests_per_minute)
        self._num_in_flight[tenant] += 1
        try:
            yield
        finally:
            self._num_in_flight[tenant] -= 1
            if not self._num_in_flight[tenant]:
                del self._num_in_flight[tenant]

    def allowance(self, tenant: str) -> Allowance | None:
        """Return what the tenant has left; None if its requests per minute are not limited."""
        limit = self.limits_of(tenant).requests_per_minute
        return None if limit is None else self._bucket(tenant, limit).allowance(self._clock())

    def _check_in_flight(self, limits: TenantSettings) -> None:
        limit, now = limits.max_in_flight, self._num_in_flight[limits.name]
        if limit is not None and now >= limit:
            message = (
                f"This tenant has {now} requests in progress, and may have {limit} at a time: wait for one."
            )
            self._refuse(limits.name, Limit.IN_FLIGHT, ErrorCode.TENANT_BUSY, message, wait_s=1.0)

    def _take(self, limits: TenantSettings, limit: int) -> None:
        bucket, now = self._bucket(limits.name, limit), self._clock()
        if (wait_s := bucket.wait_s(now)) > 0:
            message = (
                f"This tenant has sent its {limit} requests a minute: the next may come in "
                f"{duration(wait_s)}."
            )
            self._refuse(limits.name, Limit.REQUESTS, ErrorCode.RATE_LIMIT_EXCEEDED, message, wait_s=wait_s)
        bucket.take()

    def _refuse(self, tenant: str, limit: Limit, code: ErrorCode, message: str, *, wait_s: float) -> None:
        self.num_refused[tenant, limit] += 1
        headers = {"Retry-After": str(math.ceil(wait_s)), "retry-after-ms": str(math.ceil(wait_s * 1000))}
        raise HttpError(429, code, message, headers)

    def _bucket(self, tenant: str, limit: int) -> _Bucket:
        return self._buckets.setdefault(tenant, _Bucket(limit, self._clock()))


def duration(seconds: float) -> str:
    """Format seconds as OpenAI does: 120ms, 8.64s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{min(round(seconds, 2), 59.99):g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"
