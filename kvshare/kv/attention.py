"""
Partial attention: only the placeholders of a prompt are computed; all other positions are only attended to.

A placeholder at position p attends to every slot in [0, p], reused or newly computed, and to none after p.
Reused KV does not change during the pass, and each layer writes all its new rows before it attends. So one
pass over all runs gives the same result as prefilling the runs one after the other from left to right.

    slots      0        4        9     12           <- one sequence, 12 tokens
               [ reused ][ run A ][reus][ run B ]
    queries               a b c d e       x y z     <- only these have Q
    run A sees [0, 5) ... [0, 9)       causal inside the run, and everything before it
    run B sees [0, 13) ... [0, 15)     with the new rows of run A

A layer with a sliding window or chunked attention sees only a part of these slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch.nn.functional import scaled_dot_product_attention

from delta_tree import Span
from kvshare.kv.form import PLAIN, Form
from kvshare.kv.layout import ALL_EARLIER, Reach
from kvshare.kv.listening import Listener, ListeningRows, placed
from kvshare.kv.sequence import SequenceKV

_SHORT = 64  # tokens; shorter runs share a call: calls of their own cost more than masked scores do
_WASTE = 1.5  # largest ratio between the last and the first end of short runs that share a call
_SCORES = 1 << 22  # attention scores in memory at a time where no kernel computes them: 16 MB


@dataclass(frozen=True, eq=False)  # no slots: the cached masks live in __dict__
class PartialPass:
    """
    One forward pass over `runs` of a sequence. Runs are ascending, disjoint and not empty.

    A `listener` records what some of the rows attend to.
    """

    kv: SequenceKV
    runs: tuple[Span, ...]
    listener: Listener | None = None
    forms: dict[int, Form] = field(default_factory=dict)  # by layer, set when the layer attends

    @property
    def num_queries(self) -> int:
        return sum(len(run) for run in self.runs)

    @property
    def num_visible(self) -> int:
        """Slots that any query attends to: up to the end of the last run."""
        return self.runs[-1].end

    @cached_property
    def positions(self) -> torch.Tensor:
        """Position of every query, (N,) int64."""
        device = self.kv.layout.device
        return torch.cat([torch.arange(run.start, run.end, device=device) for run in self.runs])

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Write a layer's new rows. Returns all KV that the queries may see.

        Shapes:  k, v (1, H, N, D) -> (1, H, num_visible, D)
        """
        self.kv.write(layer, self.positions, k[0], v[0])
        return self.kv.layer(layer, self.num_visible)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        form: Form = PLAIN,
    ) -> torch.Tensor:
        """
        Exact causal attention of every run over the slots before it and inside it that the layer sees.

        Shapes:  query (1, H_q, N, D), key and value (1, H, num_visible, D) -> (1, H_q, N, D of value)
        """
        if self._listening is not None:
            self._listening.observe(layer, query[0], key[0], scaling=scaling, form=form)
        groups = self._groups(form.reach)
        if len(groups) == 1:
            return groups[0].attend(query, key, value, scaling=scaling, form=form)
        output = query.new_empty(*query.shape[:3], value.shape[3])
        for group in groups:
            rows = query[:, :, group.rows]
            output[:, :, group.rows] = group.attend(rows, key, value, scaling=scaling, form=form)
        return output

    @cached_property
    def _listening(self) -> ListeningRows | None:
        """The rows of this pass that the listener records."""
        return None if self.listener is None else self.listener.rows_of(placed(self.runs))

    def _groups(self, reach: Reach) -> tuple[_Group, ...]:
        """The attention calls of a layer with this reach, made once for all such layers of the pass."""
        reach = reach if reach.size is None or reach.size < self.num_visible else ALL_EARLIER
        if reach not in self._known_groups:
            found = self._all_earlier() if reach.size is None else tuple(self._near(reach))
            self._known_groups[reach] = found
        return self._known_groups[reach]

    @cached_property
    def _known_groups(self) -> dict[Reach, tuple[_Group, ...]]:
        return {}

    def _all_earlier(self) -> tuple[_Group, ...]:
        """One call for each long run, with slots up to its end; a few calls for all short runs."""
        groups, short = [], []
        for row, run in placed(self.runs):
            rows = slice(row, row + len(run))
            if len(run) < _SHORT and run.start > 0:
                short.append((rows, run))
            else:
                causal = run.start == 0 and len(run) > 1
                groups.append(_Group(rows, Span(0, run.end), self._mask(run), is_causal=causal))
        return (*groups, *map(self._together, _alike(short)))

    def _near(self, reach: Reach) -> Iterator[_Group]:
        """For windows and chunks: short blocks of rows, as each block gets all slots that any row sees."""
        assert reach.size is not None
        for row, run in placed(self.runs):
            for start in range(run.start, run.end, max(reach.size, _SHORT)):
                part = Span(start, min(run.end, start + max(reach.size, _SHORT)))
                slots = Span(reach.first(part.start), part.end)
                rows = slice(row + part.start - run.start, row + part.end - run.start)
                mask = self._mask_of(rows, slots, reach) if len(part) > 1 else None
                yield _Group(rows, slots, mask)

    def _together(self, short: Sequence[_PlacedRun]) -> _Group:
        """One call for several short runs."""
        slots = Span(0, short[-1][1].end)
        if len(short) == 1:
            ((rows, run),) = short
            return _Group(rows, slots, self._mask(run))
        indices = torch.cat([torch.arange(rows.start, rows.stop) for rows, _ in short])
        rows_there = indices.to(self.kv.layout.device)
        return _Group(rows_there, slots, self._mask_of(rows_there, slots, ALL_EARLIER))

    def _mask(self, run: Span) -> torch.Tensor | None:
        """Additive mask (len(run), run.end) of one run; None where the kernel needs none."""
        if run.start == 0 or len(run) == 1:
            return None  # the kernel's own causal flag, or a single row that sees everything
        layout = self.kv.layout
        mask = torch.full((len(run), run.end), float("-inf"), dtype=layout.dtype, device=layout.device)
        return mask.triu_(diagonal=run.start + 1)

    def _mask_of(self, rows: torch.Tensor | slice, slots: Span, reach: Reach) -> torch.Tensor:
        """Additive mask (N, len(slots)): which of these slots each of these rows sees."""
        layout = self.kv.layout
        at = torch.arange(slots.start, slots.end, device=layout.device)
        own = self.positions[rows, None]
        hidden = at > own
        if reach.size is not None:
            hidden |= at < reach.firsts(own)
        mask = torch.zeros(hidden.shape, dtype=layout.dtype, device=layout.device)
        return mask.masked_fill_(hidden, float("-inf"))


_PlacedRun = tuple[slice, Span]  # the rows of a pass that hold a run, and the run


def _alike(short: Sequence[_PlacedRun]) -> Iterator[Sequence[_PlacedRun]]:
    """Groups of runs with near ends: the mask of a call covers all slots up to the end of its last run."""
    first = 0
    for index, (_, run) in enumerate(short):
        if run.end > _WASTE * short[first][1].end:
            yield short[first:index]
            first = index
    if short:
        yield short[first:]


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Rows of a pass that one call of the kernel computes, and the slots that any of them sees."""

    rows: slice | torch.Tensor
    slots: Span
    mask: torch.Tensor | None
    is_causal: bool = False

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        form: Form,
    ) -> torch.Tensor:
        """Shapes:  query (1, H_q, N of these rows, D) -> (1, H_q, N, D of value)"""
        seen = slice(self.slots.start, self.slots.end)
        key, value = key[:, :, seen], value[:, :, seen]
        if form.softcap is not None or form.sinks is not None:
            factor = query.shape[-1] ** -0.5 if scaling is None else scaling
            return self._attend_in_steps(query.float() * factor, key, value, form).to(query.dtype)
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=self.mask,
            is_causal=self.is_causal,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def _attend_in_steps(
        self, scaled_query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: Form
    ) -> torch.Tensor:
        """Capped scores and attention sinks, which no kernel has. Some rows at a time, in float32."""
        _, num_heads, num_rows, _ = scaled_query.shape
        num_kv_heads, num_slots = key.shape[1:3]
        group = num_heads // num_kv_heads
        output = scaled_query.new_empty(1, num_heads, num_rows, value.shape[3])
        step = max(1, _SCORES // (group * num_slots))
        for head in range(num_kv_heads):
            heads = slice(head * group, (head + 1) * group)
            keys, values = key[0, head].float(), value[0, head].float()
            for start in range(0, num_rows, step):
                rows = slice(start, min(num_rows, start + step))
                scores = scaled_query[0, heads, rows] @ keys.T
                hidden = self._hidden(rows, num_slots, scores.device)
                weights = form.weights(scores, hidden, heads=heads)  # (G, n, S)
                output[0, heads, rows] = weights @ values
        return output

    def _hidden(self, rows: slice, num_slots: int, device: torch.device) -> torch.Tensor | None:
        """(n, S) bool: slots that these rows do not see; None where they see all."""
        if not self.is_causal:
            return None if self.mask is None else self.mask[rows] < 0
        at = torch.arange(num_slots, device=device)
        return at > torch.arange(rows.start, rows.stop, device=device)[:, None]


def take_pass(
    kv: SequenceKV, placeholders: Sequence[Span], *, max_queries: int, listener: Listener | None = None
) -> tuple[PartialPass, tuple[Span, ...]]:
    """
    The next pass of at most `max_queries` queries, from the left, and the placeholders that remain after it.

    The split does not change the result of a prefill: an earlier pass writes the rows that later ones attend
    to.
    """
    room = max_queries
    for index, span in enumerate(placeholders):
        if len(span) > room:
            middle = span.start + room
            runs = (*placeholders[:index], Span(span.start, middle))
            rest = (Span(middle, span.end), *placeholders[index + 1 :])
            return PartialPass(kv, tuple(filter(None, runs)), listener), rest
        room -= len(span)
    return PartialPass(kv, tuple(placeholders), listener), ()
