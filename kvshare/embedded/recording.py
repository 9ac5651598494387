"""Records distributions of an answer's first tokens, for comparison with a full prefill (`shadows.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

_MOST_TOKENS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """The ids of an answer's first tokens, and log-probabilities (V,) for each of them, on the host."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)

    def note(self, token_id: int, logits: torch.Tensor) -> None:
        """Record a token and what it was drawn from. Shapes:  logits (V,) float32"""
        if len(self.token_ids) < _MOST_TOKENS:
            self.token_ids.append(token_id)
            self.logprobs.append(logits.log_softmax(-1).cpu())
