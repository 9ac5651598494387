"""Holds back the log-probabilities of an answer's tokens until their text leaves the engine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from kvshare.engine import TokenLogprob


@dataclass(frozen=True, slots=True)
class _Group:
    """Tokens that together complete the text `[start, end)`, in characters of the answer."""

    start: int
    end: int
    tokens: tuple[TokenLogprob, ...]


class HeldLogprobs:
    """
    Holds back the tokens of one choice as long as their text is held back.

    Several tokens may form one character. They have its offset, and are emitted when it is complete. Tokens
    of a stop string, which is not part of the text, are not emitted. The token that ends an answer is.
    """

    def __init__(self) -> None:
        self._complete: deque[_Group] = deque()
        self._open: list[TokenLogprob] = []  # they have completed no character yet
        self._num_decoded = 0  # characters that tokens have completed

    def add(self, token: TokenLogprob, *, num_decoded: int) -> None:
        """Add a token. `num_decoded`: characters that all tokens have completed, also of stop strings."""
        start = self._num_decoded
        self._open.append(replace(token, offset=start))
        if num_decoded > start:
            self._complete.append(_Group(start, num_decoded, tuple(self._open)))
            self._open.clear()
            self._num_decoded = num_decoded

    def take(self, *, num_shown: int, ended: bool) -> tuple[TokenLogprob, ...]:
        """Take the tokens of the first `num_shown` characters, and at the end those that end the answer."""
        taken: list[TokenLogprob] = []
        while self._complete and (self._complete[0].end <= num_shown or ended):
            group = self._complete.popleft()
            if group.start < num_shown:  # otherwise its text is in a stop string
                taken += group.tokens
        if ended and num_shown == self._num_decoded:  # no stop string was cut off
            taken += self._open
        return tuple(taken)
