"""Records what some rows of a pass attend to, while it runs. The repair rule weighs positions by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch

from delta_tree import Span
from kvshare.kv.layout import PLAIN, AttentionForm, Reach
from kvshare.kv.to_device import to_device

# Bytes of products and weights that a GPU computes at once: head by head, it would launch a dozen kernels for
# each. A CPU computes one head at a time, as its products and weights fit the caches.
_MAX_BYTES = 128 * 1024**2
_BYTES = 4  # of a product and its weight, 16 bits each


def placed(runs: Sequence[Span]) -> list[tuple[int, Span]]:
    """Return (first row, run) for each run of a pass."""
    return list(zip(accumulate(map(len, runs), initial=0), runs, strict=False))


class Listener:
    """
    Records the attention of rows at some positions to every slot: the mean over heads, summed over rows.

    The rows may come in several passes. The weights of these few rows are computed a second time, because
    attention kernels do not return them. Only the first `num_layers` layers are recorded.
    `when_complete`: called as soon as all rows are recorded, in the middle of their last pass.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        *,
        num_layers: int,
        num_slots: int,
        device: torch.device,
        when_complete: Callable[[], None] | None = None,
    ) -> None:
        self._spans = spans
        self._num_rows = self._num_missing = sum(map(len, spans))
        self._when_complete = when_complete
        self._total = torch.zeros(num_layers, num_slots, device=device)

    def rows_of(self, runs: Iterable[tuple[int, Span]]) -> ListeningRows | None:
        """Return the rows of a pass to record; None if it has none. `runs`: see `placed`."""
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

    def note(self, layer: int, rows: ListeningRows) -> None:
        if layer + 1 == len(self._total):
            self._num_missing -= len(rows.indices)
            if not self._num_missing and self._when_complete is not None:
                self._when_complete()

    @property
    def attended(self) -> torch.Tensor:
        """(L, S) the mean over all recorded rows."""
        return self._total / max(1, self._num_rows)


@dataclass(frozen=True, slots=True, eq=False)
class ListeningRows:
    """The rows of one pass that are recorded; made once for all its layers."""

    indices: torch.Tensor  # (N,) into the rows of the pass
    positions: torch.Tensor  # (N,)
    first: int  # the lowest position
    end: int  # the end of the slots that any of these rows sees
    _total: torch.Tensor  # (L, S), of the listener
    _hidden: dict[Reach, torch.Tensor] = field(default_factory=dict)  # result of `hidden`, by reach

    def listen_in(self, layer: int) -> bool:
        return layer < len(self._total)

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
        own = query.index_select(1, self.indices)
        queries = own.view(len(key), -1, *own.shape[1:])  # (H, G, N, D)
        key = key[:, : self.end]
        for heads, first_head in self._heads_at_once(queries):
            weights = attention(
                self.positions,
                queries[heads],
                key[heads],
                scaling=scaling,
                first=self.first,
                form=form,
                group=first_head,
                hidden_slots=self._hidden_slots(form),
                rounds=query.device.type != "cpu",
            )
            summed = weights.flatten(end_dim=-2).sum(dim=0, dtype=torch.float32)
            self.total(layer).add_(summed, alpha=1 / len(query))

    def total(self, layer: int) -> torch.Tensor:
        """Return the sums, (end,), of what all rows attended to in a layer: a view, to which kernels add."""
        return self._total[layer, : self.end]

    def _heads_at_once(self, queries: torch.Tensor) -> Iterable[tuple[int | slice, int]]:
        """Yield the key heads to compute together, with the number of the first one."""
        num_heads, *rest = queries.shape[:3]
        if queries.device.type == "cpu":
            return ((head, head) for head in range(num_heads))
        count = max(1, _MAX_BYTES // (_BYTES * self.end * rest[0] * rest[1]))
        return ((slice(head, head + count), head) for head in range(0, num_heads, count))

    def _hidden_slots(self, form: AttentionForm) -> torch.Tensor:
        if form.reach not in self._hidden:
            seen = hidden(self.positions, Span(0, self.end), form.reach, first=self.first)
            self._hidden[form.reach] = seen
        return self._hidden[form.reach]


def hidden(positions: torch.Tensor, slots: Span, reach: Reach, *, first: int = 0) -> torch.Tensor:
    """
    Return (N, up to len(slots)): whether a slot of the span is hidden from the row at each position.

    If the rows see all earlier slots, the first `first` slots are left out, because every row sees them.
    """
    start = slots.start + (first if reach.size is None else 0)
    at, own = torch.arange(start, slots.end, device=positions.device), positions[:, None]
    return at > own if reach.size is None else (at > own) | (at < reach.firsts(own))


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
    hidden_slots: torch.Tensor | None = None,
    rounds: bool = False,
) -> torch.Tensor:
    """
    Compute causal attention weights in float32. Rows sum to 1; with sinks, to less.

    If keys have 16 bits and the form is plain, products have 16 bits, too. So the mean of all keys is
    subtracted first: that changes no weight, and each product is rounded by less.

    `rounds`: then bfloat16 keys give bfloat16 weights, to save memory. `first`: the lowest position. `group`:
    the number of this group of query heads, or of the first of several. `first_slot`: the slot of the first
    key. `hidden_slots`: the result of `hidden`, if the caller has it.
    Shapes:  positions (N,) of the rows; query (G, N, D) of the heads that share key (S, D), or (H, G, N, D)
             and (H, S, D), slots from `first_slot` on -> (G, N, S) or (H, G, N, S). Unless the form is plain,
             hidden slots may be NaN
    """
    num_slots, dim = key.shape[-2:]
    factor = dim**-0.5 if scaling is None else scaling
    is_plain = form is PLAIN
    if is_plain and key.dtype != torch.float32:
        key = key - _mean(key)
        query = (query * factor).to(key.dtype)
    else:
        query, key = query.float() * factor, key.float()
    scores = (query.flatten(-3, -2) @ key.mT).view(*query.shape[:-1], num_slots)
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    if hidden_slots is None:
        slots = Span(first_slot, first_slot + num_slots)
        hidden_slots = hidden(positions, slots, form.reach, first=first)
    scores[..., num_slots - hidden_slots.shape[1] :].masked_fill_(hidden_slots, float("-inf"))
    if form.sinks is None:
        dtype = torch.bfloat16 if rounds and scores.dtype == torch.bfloat16 else torch.float32
        return scores.softmax(dim=-1, dtype=dtype)
    first_head = group * query.shape[-3]
    sinks = form.sinks[first_head : first_head + query.shape[:-2].numel()].float()
    sinks = sinks.view(*query.shape[:-2], 1, 1).expand(*query.shape[:-1], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]


def _mean(key: torch.Tensor) -> torch.Tensor:
    """Return the mean of all keys, (..., 1, D), summed in float32. A GPU does so unasked, a CPU does not."""
    if key.device.type != "cpu":
        return key.mean(dim=-2, keepdim=True)
    return key.mean(dim=-2, keepdim=True, dtype=torch.float32).to(key.dtype)
