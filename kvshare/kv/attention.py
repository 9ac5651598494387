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
from kvshare.kv.layout import ALL_EARLIER, PLAIN, AttentionForm, Reach
from kvshare.kv.listening import Listener, ListeningRows, attention, placed
from kvshare.kv.sequence import SequenceKV

_SHORT = 64  # tokens; shorter runs share a call: more calls would cost more than masked scores do
_WASTE = 1.5  # largest ratio between the last and the first end of short runs that share a call
_SCORES = 1 << 22  # attention scores in memory at a time if no kernel computes them: 16 MB


@dataclass(frozen=True, eq=False)  # no slots: the cached masks live in __dict__
class PartialPass:
    """
    One forward pass over `runs` of a sequence. Runs are ascending, disjoint and not empty.

    A `listener` records what some of the rows attend to.
    """

    kv: SequenceKV
    runs: tuple[Span, ...]
    listener: Listener | None = None
    forms: dict[int, AttentionForm] = field(default_factory=dict)  # by layer, set when the layer attends
    _groups_of: dict[Reach, tuple[_Group, ...]] = field(default_factory=dict, init=False)

    @property
    def num_queries(self) -> int:
        return sum(len(run) for run in self.runs)

    @property
    def num_visible(self) -> int:
        """Return the number of slots to which any query may attend: up to the end of the last run."""
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
        form: AttentionForm = PLAIN,
    ) -> torch.Tensor:
        """
        Compute the causal attention of every run over the slots before and inside it that the layer sees.

        Shapes:  query (1, H_q, N, D), key and value (1, H, num_visible, D) -> (1, H_q, N, D of value)
        """
        if self._listening is not None and self._listening.listen_in(layer):
            self._listening.observe(layer, query[0], key[0], scaling=scaling, form=form)
        groups = self._groups(form.reach)
        if len(groups) == 1:
            return self._attend_group(groups[0], query, key, value, scaling=scaling, form=form)
        output = query.new_empty(*query.shape[:3], value.shape[3])
        for group in groups:
            rows = query[:, :, group.rows]
            output[:, :, group.rows] = self._attend_group(group, rows, key, value, scaling=scaling, form=form)
        return output

    def _attend_group(
        self,
        group: _Group,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        form: AttentionForm,
    ) -> torch.Tensor:
        """Shapes:  query (1, H_q, N of these rows, D) -> (1, H_q, N, D of value)"""
        seen = slice(group.slots.start, group.slots.end)
        key, value = key[:, :, seen], value[:, :, seen]
        num_shared = query.shape[1] // key.shape[1]  # query heads that share a key head
        if form.softcap is None and form.sinks is None:
            return scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=group.mask,
                is_causal=group.is_causal,
                scale=scaling,
                enable_gqa=num_shared > 1,
            )
        # No kernel has capped scores or attention sinks: some rows at a time, in float32.
        positions = self.positions[group.rows]
        output = query.new_empty(*query.shape[:3], value.shape[3])
        step = max(1, _SCORES // (num_shared * len(group.slots)))
        for head in range(key.shape[1]):
            heads = slice(head * num_shared, (head + 1) * num_shared)
            keys, values = key[0, head].float(), value[0, head].float()
            for start in range(0, len(positions), step):
                rows = slice(start, start + step)
                weights = attention(
                    positions[rows],
                    query[0, heads, rows],
                    keys,
                    scaling=scaling,
                    form=form,
                    group=head,
                    first_slot=group.slots.start,
                )
                output[0, heads, rows] = (weights @ values).to(output.dtype)
        return output

    @cached_property
    def _listening(self) -> ListeningRows | None:
        return None if self.listener is None else self.listener.rows_of(placed(self.runs))

    def _groups(self, reach: Reach) -> tuple[_Group, ...]:
        """Return the attention calls of a layer with this reach; all such layers of the pass share them."""
        reach = reach if reach.size is None or reach.size < self.num_visible else ALL_EARLIER
        if reach not in self._groups_of:
            found = self._all_earlier() if reach.size is None else self._near(reach)
            self._groups_of[reach] = tuple(found)
        return self._groups_of[reach]

    def _all_earlier(self) -> Iterator[_Group]:
        """Yield one call for each long run, with slots up to its end, and a few calls for all short runs."""
        short: list[_PlacedRun] = []
        for row, run in placed(self.runs):
            if len(run) < _SHORT and run.start > 0:
                short.append((row, run))
            else:
                yield self._group(slice(row, row + len(run)), Span(0, run.end), ALL_EARLIER)
        for alike in _alike(short):
            rows = torch.cat([torch.arange(row, row + len(run)) for row, run in alike])
            yield self._group(rows.to(self.kv.layout.device), Span(0, alike[-1][1].end), ALL_EARLIER)

    def _near(self, reach: Reach) -> Iterator[_Group]:
        """Yield short blocks of rows for windows and chunks: each block gets all slots that any row sees."""
        assert reach.size is not None
        for row, run in placed(self.runs):
            for start in range(run.start, run.end, max(reach.size, _SHORT)):
                part = Span(start, min(run.end, start + max(reach.size, _SHORT)))
                rows = slice(row + part.start - run.start, row + part.end - run.start)
                yield self._group(rows, Span(reach.first(part.start), part.end), reach)

    def _group(self, rows: torch.Tensor | slice, slots: Span, reach: Reach) -> _Group:
        """Make the call for these rows, with an additive mask (N, len(slots)) if the kernel needs one."""
        positions = self.positions[rows, None]
        is_whole = len(positions) == slots.end and reach.size is None  # one run from the start of the prompt
        if len(positions) == 1 or is_whole:
            return _Group(rows, slots, None, is_causal=len(positions) > 1)
        layout = self.kv.layout
        at = torch.arange(slots.start, slots.end, device=layout.device)
        hidden = at > positions
        if reach.size is not None:
            hidden |= at < reach.firsts(positions)
        mask = torch.zeros(hidden.shape, dtype=layout.dtype, device=layout.device)
        return _Group(rows, slots, mask.masked_fill_(hidden, float("-inf")))


_PlacedRun = tuple[int, Span]  # the first row of a run in a pass, and the run


def _alike(short: Sequence[_PlacedRun]) -> Iterator[Sequence[_PlacedRun]]:
    """Yield groups of runs with near ends: a call's mask covers all slots up to the end of its last run."""
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


def take_pass(
    kv: SequenceKV, placeholders: Sequence[Span], *, max_queries: int, listener: Listener | None = None
) -> tuple[PartialPass, tuple[Span, ...]]:
    """
    Return the next pass of at most `max_queries` queries, from the left, and the remaining placeholders.

    The split does not change the result of a prefill: an earlier pass writes the rows to which later passes
    attend.
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
