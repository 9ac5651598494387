"""About how many tokens an answer has that passes unread: so long answers do not count as slow ones."""

from __future__ import annotations

import re

_MAX_TAIL = 4096  # bytes; the usage stands at the end of a JSON answer
_USAGE = re.compile(rb'"(?:completion|output)_tokens":\s*(\d{1,9})\b')


class AnswerSize:
    """Counts the events of a stream, which mostly have a token each; of another answer it reads the usage."""

    def __init__(self) -> None:
        self._num_events = 0
        self._tail = b""

    def feed(self, chunk: bytes, *, is_stream: bool) -> None:
        if is_stream:
            self._num_events += chunk.count(b"\n\n")
        else:
            self._tail = (self._tail + chunk[-_MAX_TAIL:])[-_MAX_TAIL:]

    @property
    def num_tokens(self) -> int:
        """0 where the answer does not say."""
        given = _USAGE.findall(self._tail)
        return int(given[-1]) if given else self._num_events
