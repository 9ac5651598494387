"""
Partial attention: the placeholders of a prompt are computed, everything else is only attended to.

A placeholder at position p attends to every slot in [0, p], reused or fresh, and to nothing after p. Reused
KV does not change during the pass and a layer writes all its new rows before it attends, so one pass over all
runs equals prefilling run after run from left to right.

    slots      0        4        9     12           <- one sequence, 12 tokens
               [ reused ][ run A ][reus][ run B ]
    queries               a b c d e       x y z     <- only these have Q
    run A sees [0, 5) ... [0, 9)       diagonal inside the run, everything before it
    run B sees [0, 13) ... [0, 15)     run A's fresh rows included
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import scaled_dot_product_attention

from delta_tree import Span
from kvshare.kv.listening import Listener, ListeningRows, placed
from kvshare.kv.sequence import SequenceKV

_SHORT = 64  # tokens of a run: below it a call for each costs more than what the others' masks waste
_WASTE = 1.5  # of their ends


@dataclass(frozen=True, eq=False)  # no slots: the cached masks live in __dict__
class PartialPass:
    """
    One forward pass over `runs` of a sequence. Runs are ascending, disjoint and not empty.

    A `listener` writes down what some of the rows attend to.
    """

    kv: SequenceKV
    runs: tuple[Span, ...]
    listener: Listener | None = None

    @property
    def num_queries(self) -> int:
        return sum(len(run) for run in self.runs)

    @property
    def num_visible(self) -> int:
        """Slots that somebody attends to: up to the end of the last run."""
        return self.runs[-1].end

    @cached_property
    def positions(self) -> torch.Tensor:
        """Position of every query, (N,) int64."""
        device = self.kv.geometry.device
        return torch.cat([torch.arange(run.start, run.end, device=device) for run in self.runs])

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Write a layer's new rows, return all KV the queries may see.

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
    ) -> torch.Tensor:
        """
        Exact causal attention of every run over everything before and inside it.

        Shapes:  query (1, H_q, N, D), key and value (1, H, num_visible, D) -> (1, H_q, N, D)
        """
        if self._listening is not None:
            self._listening.observe(layer, query[0], key[0], scaling=scaling)
        first, *others = self._groups
        if not others:
            return first.attend(query, key, value, scaling=scaling)
        output = torch.empty_like(query)
        for group in self._groups:
            rows = query[:, :, group.rows]
            output[:, :, group.rows] = group.attend(rows, key, value, scaling=scaling)
        return output

    @cached_property
    def _listening(self) -> ListeningRows | None:
        """The rows that the listener listens to."""
        return None if self.listener is None else self.listener.rows_of(placed(self.runs))

    @cached_property
    def _groups(self) -> tuple[_Group, ...]:
        """Long runs one by one, as each sees no more than up to its end; short ones in a few calls."""
        groups, short, start = [], [], 0
        for run in self.runs:
            rows = slice(start, start + len(run))
            start = rows.stop
            if len(run) < _SHORT and run.start > 0:
                short.append((rows, run))
            else:
                groups.append(
                    _Group(rows, run.end, self._mask(run), is_causal=run.start == 0 and len(run) > 1)
                )
        return (*groups, *map(self._together, _alike(short)))

    def _together(self, short: Sequence[_PlacedRun]) -> _Group:
        """Short runs in one call."""
        end = short[-1][1].end
        if len(short) == 1:
            ((rows, run),) = short
            return _Group(rows, end, self._mask(run))
        indices = torch.cat([torch.arange(rows.start, rows.stop) for rows, _ in short])
        rows_there = indices.to(self.kv.geometry.device)
        return _Group(rows_there, end, self._mask_of(rows_there, end))

    def _mask(self, run: Span) -> torch.Tensor | None:
        """Additive, (len(run), run.end); None where the kernel needs none."""
        if run.start == 0 or len(run) == 1:
            return None  # the kernel's own causal flag, or a single row that sees everything
        geometry = self.kv.geometry
        mask = torch.full((len(run), run.end), float("-inf"), dtype=geometry.dtype, device=geometry.device)
        return mask.triu_(diagonal=run.start + 1)

    def _mask_of(self, rows: torch.Tensor, end: int) -> torch.Tensor:
        """Additive, (N, end): each row sees the slots up to its own."""
        geometry = self.kv.geometry
        behind = torch.arange(end, device=geometry.device) > self.positions[rows, None]
        mask = torch.zeros(len(rows), end, dtype=geometry.dtype, device=geometry.device)
        return mask.masked_fill_(behind, float("-inf"))


_PlacedRun = tuple[slice, Span]  # of a pass, and the run that they are


def _alike(short: Sequence[_PlacedRun]) -> Iterator[Sequence[_PlacedRun]]:
    """Runs whose ends are not too far apart: a call's mask reaches up to the last one's."""
    first = 0
    for index, (_, run) in enumerate(short):
        if run.end > _WASTE * short[first][1].end:
            yield short[first:index]
            first = index
    if short:
        yield short[first:]


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Rows of a pass that one call of the kernel computes; they see the slots before `end`."""

    rows: slice | torch.Tensor
    end: int
    mask: torch.Tensor | None
    is_causal: bool = False

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float | None
    ) -> torch.Tensor:
        """Shapes:  query (1, H_q, N of these rows, D) -> the same"""
        return scaled_dot_product_attention(
            query,
            key[:, :, : self.end],
            value[:, :, : self.end],
            attn_mask=self.mask,
            is_causal=self.is_causal,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )


def take_pass(
    kv: SequenceKV, placeholders: Sequence[Span], *, max_queries: int, listener: Listener | None = None
) -> tuple[PartialPass, tuple[Span, ...]]:
    """
    The next pass of at most `max_queries` queries, from the left, and the placeholders that remain.

    The result of a prefill does not depend on the split: an earlier pass writes the rows a later one
    attends to.
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
