"""Records what some rows of a pass attend to, while it runs. The repair rule weighs positions by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import Span
from kvshare.kv.layout import PLAIN, AttentionForm
from kvshare.kv.to_device import to_device


def placed(runs: Sequence[Span]) -> list[tuple[int, Span]]:
    """The runs of a pass, each with its first row."""
    return list(zip(accumulate(map(len, runs), initial=0), runs, strict=False))


class Listener:
    """
    Attention of the rows at some positions to every slot: the mean over heads, summed over rows.

    The rows may come in several passes. The weights are computed a second time, for these few rows only:
    attention kernels do not return theirs.
    """

    def __init__(
        self, spans: Sequence[Span], *, num_layers: int, num_slots: int, device: torch.device
    ) -> None:
        self._spans = spans
        self._num_rows = sum(map(len, spans))
        self._total = torch.zeros(num_layers, num_slots, device=device)

    def rows_of(self, runs: Iterable[tuple[int, Span]]) -> ListeningRows | None:
        """The recorded rows in a pass; None if it has none. `runs`: see `placed`."""
        indices: list[int] = []
        positions: list[int] = []
        for first_row, run in runs:
            for span in self._spans:
                common = run.intersection(span)
                positions += range(common.start, common.end)
                indices += range(first_row + common.start - run.start, first_row + common.end - run.start)
        if not indices:
            return None
        rows, own = to_device(self._total.device, np.array(indices), np.array(positions))
        return ListeningRows(rows, own, min(positions), max(positions) + 1, self._total)

    @property
    def attended_there(self) -> torch.Tensor:
        """(L, S), mean over all recorded rows, on the device."""
        return self._total / max(1, self._num_rows)

    @property
    def attended(self) -> NDArray[np.float32]:
        """The same on the host."""
        found: NDArray[np.float32] = self.attended_there.cpu().numpy()
        return found


@dataclass(frozen=True, slots=True, eq=False)
class ListeningRows:
    """The rows of one pass that are recorded, found once for all its layers."""

    indices: torch.Tensor  # (N,) into the rows of the pass
    positions: torch.Tensor  # (N,)
    first: int  # lowest position
    end: int  # end of the slots that any of them sees
    _total: torch.Tensor  # (L, S), of the listener

    def observe(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        *,
        scaling: float | None,
        form: AttentionForm = PLAIN,
    ) -> None:
        """
        Add what these rows attend to in a layer.

        Shapes:  query (H_q, M, D) of all rows of the pass; key (H, S, D), slots [0, S), at least `end`
        """
        groups = query[:, self.indices].chunk(len(key))  # the query heads that share a key head
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
    form: AttentionForm = PLAIN,
    group: int = 0,
    first_slot: int = 0,
) -> torch.Tensor:
    """
    Causal attention weights in float32; rows sum to 1, and to less with sinks.

    With 16-bit keys and a plain form the products have 16 bits, too. The mean of all keys is subtracted
    first: it changes no weight, but it would be rounded with each product. `first`: the lowest position;
    `group`: the number of this group of query heads; `first_slot`: the slot of the first key.
    Shapes:  positions (N,) of the rows; query (G, N, D) of the heads that share key (S, D), slots from
             `first_slot` on, of which hidden ones may be NaN in other forms than the plain one
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
    at, own = torch.arange(first_slot, first_slot + num_slots, device=key.device), positions[:, None]
    if is_plain:
        scores[..., first:].masked_fill_(at[first:] > own, float("-inf"))
        return scores.softmax(dim=-1, dtype=torch.float32)
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    scores = scores.masked_fill((at > own) | (at < form.reach.firsts(own)), float("-inf"))
    if form.sinks is None:
        return scores.softmax(dim=-1)
    heads = slice(group * len(query), (group + 1) * len(query))
    sinks = form.sinks[heads].float()[:, None, None].expand(-1, len(positions), 1)
    return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
