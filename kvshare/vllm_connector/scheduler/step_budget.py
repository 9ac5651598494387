"""
How much sharing may be asked of one step. Behind it requests wait their turn, in order.

vLLM's own budget counts the tails that it computes, not what the connector lays and computes before: fifty
planned requests with short tails would all be admitted at once, and every running answer would wait for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class StepBudget:
    """
    The first of a step always fits.

    Units: tokens that are computed; bytes that are copied, over all ranks
    """

    max_tokens: int
    max_bytes: int
    _num_tokens: int = field(default=0, init=False)
    _num_bytes: int = field(default=0, init=False)
    _is_over: bool = field(default=False, init=False)  # one waits: those behind it must not pass

    def admits(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether this may be asked of the step as well; it counts then."""
        is_first = not self._num_tokens and not self._num_bytes
        fits = (
            self._num_tokens + num_tokens <= self.max_tokens and self._num_bytes + num_bytes <= self.max_bytes
        )
        if self._is_over or not (is_first or fits):
            self._is_over = True
            return False
        self._num_tokens += num_tokens
        self._num_bytes += num_bytes
        return True

    def next_step(self) -> None:
        self._num_tokens = self._num_bytes = 0
        self._is_over = False
