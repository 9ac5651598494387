"""
The budget of tokens that loads may compute in one step. Other loads wait for later steps, in order.

vLLM's own token budget does not count what the connector computes: without this one, fifty planned requests
would be computed in the same step, and all running answers would wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class StepBudget:
    """The first load of a step always fits, and any that computes nothing. Loads never overtake others."""

    max_tokens: int
    _num_tokens: int = field(default=0, init=False)
    _is_over: bool = field(default=False, init=False)

    def admits(self, num_tokens: int) -> bool:
        """Whether so many tokens may be computed in this step, too; if so, they are counted."""
        if self._is_over or (self._num_tokens and self._num_tokens + num_tokens > self.max_tokens):
            self._is_over = True
            return False
        self._num_tokens += num_tokens
        return True

    def next_step(self) -> None:
        self._num_tokens = 0
        self._is_over = False
