"""How one request is served: the controller decides it when the request arrives."""

from __future__ import annotations

from dataclasses import dataclass

from kvshare.reasons import Reason
from kvshare.sharing.control.blocks import TimeBlock


@dataclass(slots=True, eq=False)
class Treatment:
    """One request of the experiment. The default: it takes no part, and is shared as far as it can be."""

    refusal: Reason | None = None  # why it is neither looked up nor stored; None: it may be
    saves_all: bool = True  # false: it is stored only if it is likely to be copied
    block: TimeBlock | None = None
    num_tokens: int = 0
    began: float = 0.0
    counts: bool = False  # most of what was in flight when it arrived was of its own block
    completed_tokens: int | None = None  # tokens of its answer; None: it did not end well, and says nothing

    def complete(self, num_tokens: int) -> None:
        """Its answer is complete, with so many tokens; called before it is over."""
        self.completed_tokens = num_tokens
