"""
How much sharing may compute in one step. Behind it loads wait their turn, in order.

vLLM's own budget counts the tails that it computes, not what the connector computes before: fifty planned
requests with short tails would all be computed at once, and every running answer would wait for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class StepBudget:
    """The first of a step always fits, and what computes nothing. One that waits is passed by none."""

    max_tokens: int
    _num_tokens: int = field(default=0, init=False)
    _is_over: bool = field(default=False, init=False)

    def admits(self, num_tokens: int) -> bool:
        """Whether so many tokens may be computed in this step as well; they count then."""
        if self._is_over or (self._num_tokens and self._num_tokens + num_tokens > self.max_tokens):
            self._is_over = True
            return False
        self._num_tokens += num_tokens
        return True

    def next_step(self) -> None:
        self._num_tokens = 0
        self._is_over = False
