"""
The size of a prefill's chunks: the tokens that are computed before other requests have their turn.

Alone a prompt gets whole chunks. While other requests decode, a quarter: a long prompt delays their answers
less. For some seconds after another tenant was served, at most some hundredth of a second, down to a
sixteenth: that tenant's next request waits for the chunk that is being computed when it comes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

_SHARED_S = 5.0  # so long after it was served another tenant is expected to come again
_SHORT_S = 0.015  # that its request may wait for a chunk, as far as a sixteenth allows


@dataclass(frozen=True, slots=True)
class _Turn:
    """The last chunk of a tenant."""

    tenant: str
    at: float


class PrefillChunks:
    """The chunks of one server. For one thread."""

    def __init__(self, num_tokens: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`num_tokens`: of a whole chunk."""
        self._whole, self._clock = num_tokens, clock
        self._last = self._before = _Turn("", -math.inf)  # the last one, and that of another tenant

    def next(self, tenant: str, *, others_decode: bool, seconds: Callable[[int], float]) -> int:
        """Return the tokens of this tenant's next chunk. `seconds`: that so many take, by measured rates."""
        chunk = max(1, self._whole // 4) if others_decode else self._whole
        if self._takes_turns(tenant):
            while chunk > max(1, self._whole // 16) and seconds(chunk) > _SHORT_S:
                chunk //= 2
        return chunk

    def _takes_turns(self, tenant: str) -> bool:
        """Note a chunk of the tenant. Returns whether another one had its own just now."""
        now = self._clock()
        if tenant != self._last.tenant:
            self._before = self._last
        self._last = _Turn(tenant, now)
        return now - self._before.at < _SHARED_S
