"""What every API's answers have in common: they are written whole, or piece by piece as a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvshare.engines.base import Delta, GenerationRequest
from kvshare.reasons import cache_miss_reason
from kvshare.requests import SharingReport
from proxy.errors import ErrorReply
from proxy.sse import KEEP_ALIVE


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer took, over all prompts of its request."""

    report: SharingReport
    num_completion_tokens: int

    @property
    def kvshare(self) -> dict[str, Any]:
        """Where the prompt's KV came from, and why not more was shared. Donors are never named."""
        report = self.report
        return {
            "exact": report.num_exact,
            "copied": report.num_copied,
            "recomputed": report.num_recomputed,
            "repaired": report.num_repaired,
            "decision": report.decision,
            "reason": report.reason,
            "cache_miss_reason": cache_miss_reason(report.reason),
            "cache_missed_input_tokens": report.num_missed,
        }


class Answer(ABC):
    """
    Writes one answer in its API's words; it neither reads nor writes sockets.

    Whole: `collect` each delta, then `whole`. As a stream: `opening`, `more` for each delta, and `closing`;
    `broken_off` where it cannot be finished.
    """

    requests: Sequence[GenerationRequest]  # the prompts of the body, each with its `sampling.n` choices
    is_stream: bool
    keep_alive: bytes = KEEP_ALIVE  # what a stream sends while there is nothing to say

    @property
    def has_calls(self) -> bool:
        """Whether tools have been called so far."""
        return False

    @abstractmethod
    def collect(self, delta: Delta) -> None:
        """Add a delta to its choice."""

    @abstractmethod
    def whole(self, usage: Usage) -> dict[str, Any]:
        """The whole answer. Raises EngineError if a choice has no end: clients take that for success."""

    @abstractmethod
    def opening(self, usage: Usage) -> bytes:
        """The events before any text; `usage` has no completion tokens yet."""

    @abstractmethod
    def more(self, delta: Delta) -> bytes:
        """The events of a delta; empty where it has nothing to show yet."""

    @abstractmethod
    def closing(self, usage: Usage) -> bytes:
        """The events after the last delta. Raises EngineError as `whole` does."""

    @abstractmethod
    def broken_off(self, reply: ErrorReply) -> bytes:
        """The last events of a stream that failed: one that merely ends looks like success."""
