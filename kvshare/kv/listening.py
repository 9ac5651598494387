"""What some rows of a pass attend to, written down while the pass runs: the repair rule's first factor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import Span
from kvshare.kv.form import PLAIN, Form


def placed(runs: Sequence[Span]) -> list[tuple[int, Span]]:
    """The runs of a pass, each with its first row."""
    return list(zip(accumulate(map(len, runs), initial=0), runs, strict=False))


class Listener:
    """
    Attention of the rows at some positions to every slot, summed over rows and meant over heads.

    The rows may come in several passes. The weights are computed beside the model's own attention, which
    does not give them away: for a few rows.
    """

    def __init__(
        self, spans: Sequence[Span], *, num_layers: int, num_slots: int, device: torch.device
    ) -> None:
        self._spans = spans
        self._num_rows = sum(map(len, spans))
        self._total = torch.zeros(num_layers, num_slots, device=device)

    def rows_of(self, runs: Iterable[tuple[int, Span]]) -> ListeningRows | None:
        """Ours among the rows of a pass; None if there is none. `runs`: each with its first row."""
        indices: list[int] = []
        positions: list[int] = []
        for first_row, run in runs:
            for span in self._spans:
                ours = run.intersection(span)
                positions += range(ours.start, ours.end)
                indices += range(first_row + ours.start - run.start, first_row + ours.end - run.start)
        return ListeningRows.of(indices, positions, self._total) if indices else None

    @property
    def attended_there(self) -> torch.Tensor:
        """(L, S), mean over all rows, on the device."""
        return self._total / max(1, self._num_rows)

    @property
    def attended(self) -> NDArray[np.float32]:
        """The same on the host."""
        found: NDArray[np.float32] = self.attended_there.cpu().numpy()
        return found


@dataclass(frozen=True, slots=True, eq=False)
class ListeningRows:
    """Rows of one pass that are listened to. Found once for all its layers."""

    indices: torch.Tensor  # (N,) among the pass's rows
    positions: torch.Tensor  # (N,)
    first: int  # lowest position
    end: int  # of the slots that any of them sees
    _total: torch.Tensor  # (L, S), of the listener

    @classmethod
    def of(cls, indices: Sequence[int], positions: Sequence[int], total: torch.Tensor) -> ListeningRows:
        there = [
            torch.tensor(numbers, dtype=torch.int64).to(total.device) for numbers in (indices, positions)
        ]
        return cls(there[0], there[1], min(positions), max(positions) + 1, total)

    def observe(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, *, scaling: float | None, form: Form = PLAIN
    ) -> None:
        """
        Add what these rows attend to in a layer.

        Shapes:  query (H_q, M, D) of all rows of the pass; key (H, S, D), slots [0, S), at least `end`
        """
        groups = query[:, self.indices].chunk(len(key))  # of the heads that share keys
        for number, keys in enumerate(key[:, : self.end]):  # one at a time, for memory
            weights = attention(
                self.positions,
                groups[number],
                keys,
                scaling=scaling,
                first=self.first,
                form=form,
                group=number,
            )
            self._total[layer, : self.end] += weights.sum(dim=(0, 1)) / len(query)


def attention(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    scaling: float | None,
    first: int = 0,
    form: Form = PLAIN,
    group: int = 0,
) -> torch.Tensor:
    """
    Causal attention weights in float32.

    Where keys have 16 bits and nothing but the softmax follows, products have as many. What all keys have in
    common is taken off before: it cancels, but not once it is rounded. `first`: no position is lower; `group`
    numbers the group of heads.
    Shapes:  positions (N,) of the rows; query (G, N, D) of the heads that share key (S, D), slots [0, S)
             -> (G, N, S)
    """
    num_slots, dim = key.shape
    factor = dim**-0.5 if scaling is None else scaling
    is_plain = form is PLAIN
    if is_plain and key.dtype != torch.float32:
        key = key - key.mean(dim=0, dtype=torch.float32).to(key.dtype)
        query = (query * factor).to(key.dtype)
    else:
        query, key = query.float() * factor, key.float()
    scores = (query.flatten(0, 1) @ key.T).view(*query.shape[:2], num_slots)
    at, own = torch.arange(num_slots, device=key.device), positions[:, None]
    if is_plain:
        scores[..., first:].masked_fill_(at[first:] > own, float("-inf"))
        return scores.softmax(dim=-1, dtype=torch.float32)
    hidden = (at > own) | (at < form.reach.firsts(own))
    return form.weights(scores, hidden, heads=slice(group * len(query), (group + 1) * len(query)))
