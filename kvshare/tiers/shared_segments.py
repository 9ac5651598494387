"""
Which segments lie in a shared store, for vLLMs that share it: each tells the others what it has written.

    <prefix>:segments    a stream: what a segment is (id, namespace, place, bytes, checksum)

With the operator's key messages are sealed for this stream. A segment is announced when its value is there.
One that has ended since is a miss for who reads it. What a prompt's tokens are is known to the proxy alone,
which is where prompts are found.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple
from typing import Final

from delta_tree import Segment, SegmentId
from kvshare.tiers.seal import SealError
from kvshare.tiers.shared_tier import SharedStore

_MOST: Final = 100_000
_PAGE: Final = 256
_NEWS_S: Final = 30 * 86400  # after the last


class SegmentNews:
    """Methods block, and raise BackendError. `announce` may run next to the others."""

    def __init__(self, store: SharedStore) -> None:
        self.store = store
        self.num_damaged = 0  # messages that no vLLM with this key has written
        self._channel = f"{store.prefix}:segments"
        self._after: str | None = None

    def announce(self, segment: Segment) -> None:
        """Its value is there."""
        store = self.store
        line = json.dumps(astuple(segment), separators=(",", ":")).encode()
        message, keep_s = store.seal.sealed(self._channel, line), max(_NEWS_S, store.keep_s)
        store.breaker.call(lambda: store.backend.announce(self._channel, message, most=_MOST, keep_s=keep_s))

    def page(self) -> list[Segment] | None:
        """What was announced after the last page, as far as it can be read; None: there is nothing new."""
        backend, after = self.store.backend, self._after
        news = self.store.breaker.call(lambda: backend.news(self._channel, after=after, most=_PAGE))
        if not news:
            return None
        self._after = news[-1].place
        found = (self._opened(each.message) for each in news)
        return [segment for segment in found if segment is not None]

    def those_there(self, segments: Sequence[Segment]) -> list[Segment]:
        """Those whose values have not ended, which are kept again from now on."""
        store = self.store
        if store.renew([store.segment_key(segment) for segment in segments]) == len(segments):
            return list(segments)
        return [segment for segment in segments if store.renew([store.segment_key(segment)])]

    def _opened(self, message: bytes) -> Segment | None:
        try:
            raw = self.store.seal.opened(self._channel, message).tobytes()
            segment_id, namespace, *numbers = json.loads(raw)
            if not isinstance(namespace, str):
                raise TypeError("expected text")
            first_position, num_tokens, generation, num_bytes, checksum = map(int, numbers)
            found = Segment(
                *(SegmentId(int(segment_id)), namespace, first_position),
                *(num_tokens, generation, num_bytes, checksum),
            )
        except (SealError, ValueError, TypeError, OverflowError, RecursionError):
            self.num_damaged += 1
            return None
        is_one = 0 < found.segment_id < 2**63 and 0 <= found.checksum < 2**64
        if not is_one or min(num_tokens, num_bytes) <= 0 or generation or first_position < 0:
            self.num_damaged += 1
            return None
        return found
