"""How one request is served: the controller decides it when the request arrives."""

from __future__ import annotations

from dataclasses import dataclass

from kvshare.reasons import Reason
from kvshare.sharing.control.blocks import TimeBlock


@dataclass(slots=True, eq=False)
class Treatment:
    """How a request is served. By default it is no part of the experiment, and shared as far as possible."""

    refusal: Reason | None = None  # why it is neither looked up nor stored; None: it may be
    saves_all: bool = True  # false: it is stored only if it is likely to be copied
    block: TimeBlock | None = None
    num_tokens: int = 0
    began: float = 0.0
    counts: bool = False  # when it arrived, at least half of the requests in flight belonged to its block
    completed_tokens: int | None = None  # tokens of its answer; None: not complete, or failed

    def complete(self, num_tokens: int) -> None:
        """Note that its answer is complete, with so many tokens. Call this before `Controller.take` ends."""
        self.completed_tokens = num_tokens
