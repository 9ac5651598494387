"""
Which segments a shared store holds, for vLLMs that share it: each tells the others what it has written.

    <prefix>:segments    a stream: what a segment is (id, namespace, place, bytes, checksum)

With the operator's key, messages are sealed for this stream. A segment is announced once its value is there.
If the value has expired since, reading it is a miss. Only the proxy knows the tokens of prompts, so it finds
the prompts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Final

from delta_tree import Segment, SegmentId
from kvshare.tiers.seal import SealError
from kvshare.tiers.shared_backend import News
from kvshare.tiers.shared_tier import SharedStore

_MOST: Final = 100_000
_PAGE: Final = 256
_NEWS_S: Final = 30 * 86400  # how long messages are kept after the last one


class SegmentNews:
    """Methods block, and raise BackendError. `announce` may run next to the others."""

    def __init__(self, store: SharedStore) -> None:
        self.store = store
        self.num_damaged = 0  # messages that cannot be opened or read
        self._channel = f"{store.prefix}:segments"
        self._after: str | None = None  # place of the newest message taken; None: none yet
        self._before: str | None = None  # place of the oldest message that `take_earlier` took

    def announce(self, segment: Segment) -> None:
        """Tell the other vLLMs of a segment whose value is in the store."""
        store = self.store
        line = json.dumps(astuple(segment), separators=(",", ":")).encode()
        message, keep_s = store.seal.sealed(self._channel, line), max(_NEWS_S, store.keep_s)
        store.breaker.call(lambda: store.backend.announce(self._channel, message, most=_MOST, keep_s=keep_s))

    def take(self, adopt: Callable[[list[Segment]], None]) -> bool:
        """
        Call `adopt` with the readable ones of the next page of new segments; if it raises, they come again.

        Returns: whether there were new messages
        """
        backend, after = self.store.backend, self._after
        news = self.store.breaker.call(lambda: backend.news(self._channel, after=after, most=_PAGE))
        if news:
            adopt(self._segments(news))
            self._after = news[-1].place
        return bool(news)

    def take_earlier(self, adopt: Callable[[list[Segment]], None]) -> bool:
        """
        Do the same with a page of earlier segments, from the newest one at the first call backwards.

        Returns: whether there may be more
        """
        backend, before = self.store.backend, self._before
        news = self.store.breaker.call(lambda: backend.latest(self._channel, before=before, most=_PAGE))
        if news:
            adopt(self._segments(news))
            self._before, self._after = news[-1].place, self._after or news[0].place
        return len(news) == _PAGE

    def those_there(self, segments: Sequence[Segment]) -> list[Segment]:
        """Return the segments whose values have not expired, and renew these values."""
        there = self.store.renew([self.store.segment_key(segment) for segment in segments])
        return [segment for segment, is_there in zip(segments, there, strict=True) if is_there]

    def _segments(self, news: Sequence[News]) -> list[Segment]:
        found = (self._opened(each.message) for each in news)
        return [segment for segment in found if segment is not None]

    def _opened(self, message: bytes) -> Segment | None:
        try:
            raw = self.store.seal.opened(self._channel, message).tobytes()
            segment_id, namespace, *numbers = json.loads(raw)
            if not isinstance(namespace, str):
                raise TypeError("expected text")
            first_position, num_tokens, generation, num_bytes, checksum = map(int, numbers)
            segment = Segment(
                *(SegmentId(int(segment_id)), namespace, first_position),
                *(num_tokens, generation, num_bytes, checksum),
            )
        except (SealError, ValueError, TypeError, OverflowError, RecursionError):
            self.num_damaged += 1
            return None
        is_one = 0 < segment.segment_id < 2**63 and 0 <= segment.checksum < 2**64
        if not is_one or min(num_tokens, num_bytes) <= 0 or generation or first_position < 0:
            self.num_damaged += 1
            return None
        return segment
