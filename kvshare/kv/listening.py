"""What some rows of a pass attend to, written down while the pass runs: the repair rule's first factor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import Span


class Listener:
    """
    Attention of the rows at some positions to every slot, summed over rows and meant over heads.

    The rows may come in several passes. The weights are computed beside the model's own attention, which
    does not give them away: for a few rows, in float32.
    """

    def __init__(
        self, spans: Sequence[Span], *, num_layers: int, num_slots: int, device: torch.device
    ) -> None:
        self._spans = spans
        places = [place for span in spans for place in range(span.start, span.end)]
        self._places = torch.tensor(places, dtype=torch.int64, device=device)
        self._total = torch.zeros(num_layers, num_slots, device=device)

    def is_in(self, run: Span) -> bool:
        """Whether a run has rows of ours."""
        return any(run.intersection(span) for span in self._spans)

    def observe(
        self,
        layer: int,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        *,
        scaling: float | None,
    ) -> None:
        """
        Add what our rows among these attend to in a layer.

        Shapes:  positions (N,) of the rows; query (H_q, N, D); key (H, S, D), slots [0, S)
        """
        rows = torch.isin(positions, self._places).nonzero()[:, 0]
        if len(rows):
            groups = query[:, rows].chunk(len(key))  # of the heads that share keys; one at a time, for memory
            for group, keys in zip(groups, key, strict=True):
                weights = attention(positions[rows], group, keys[None], scaling=scaling)
                self._total[layer, : key.shape[1]] += weights.sum(dim=(0, 1)) / len(query)

    @property
    def attended_there(self) -> torch.Tensor:
        """(L, S), mean over all rows, on the device."""
        return self._total / max(1, len(self._places))

    @property
    def attended(self) -> NDArray[np.float32]:
        """The same on the host."""
        found: NDArray[np.float32] = self.attended_there.cpu().numpy()
        return found


def attention(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *, scaling: float | None
) -> torch.Tensor:
    """
    Causal attention weights in float32.

    Shapes:  positions (N,) of the rows; query (H_q, N, D); key (H, S, D), slots [0, S) -> (H_q, N, S)
    """
    num_heads, num_slots, dim = key.shape
    queries = query.float().reshape(num_heads, -1, dim)  # (H, H_q / H * N, D)
    scores = queries @ key.float().transpose(1, 2) * (dim**-0.5 if scaling is None else scaling)
    scores = scores.view(-1, len(positions), num_slots)
    behind = torch.arange(num_slots, device=key.device) > positions[:, None]
    return scores.masked_fill_(behind, float("-inf")).softmax(dim=-1)
