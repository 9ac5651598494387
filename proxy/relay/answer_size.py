"""Estimates the tokens of an answer without parsing it, so that long answers do not count as slow ones."""

from __future__ import annotations

import re

_MAX_TAIL = 4096  # bytes; the usage stands at the end of a JSON answer
_USAGE = re.compile(rb'"(?:completion|output)_tokens":\s*(\d{1,9})\b')


class AnswerSize:
    """Counts the events of a stream, most of which have one token; in other answers it reads the usage."""

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
        """The number of tokens so far; 0 if the answer does not say."""
        given = _USAGE.findall(self._tail)
        return int(given[-1]) if given else self._num_events
