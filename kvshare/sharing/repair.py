"""
Repairs: positions that are computed again because their tokens match a donor but their context changed.

There are two rules. By place: a window after each edit, which the edit affects most (arXiv:2609.17983), and
the head of each relocated copy, where attention sinks are (EPIC, arXiv:2410.15332).
By attention: an engine chooses a given number of tokens after a probe pass. The tail of the prompt is always
computed, because the answer starts from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from delta_tree import Span
from kvshare.settings import RepairSettings
from kvshare.sharing.placed import Placed, Places, continued, ends, merged
from kvshare.sharing.plan import RepairOrder, small_shift
from kvshare.sharing.repair_choice import probes

# If repairs leave fewer tokens of a copy, these are computed, too: that costs less than an additional run.
MIN_LEFTOVER = 8

RepairRule = Literal["windows", "attention"]


@dataclass(frozen=True, slots=True)
class Repairs:
    """The known repairs, and an order for those that the engine still has to choose."""

    spans: tuple[Span, ...]
    order: RepairOrder | None = None


def repairs_by_place(
    copies: Placed,
    *,
    num_tokens: int,
    settings: RepairSettings,
    widened: float = 1.0,
    max_small_shift: int | None = None,
) -> tuple[Span, ...]:
    """
    Return the windows, heads and tail inside approximate `copies`.

    Windows and heads shrink evenly if they exceed `settings.max_budget` of the prompt.
    Units:   token positions of the recipient, half-open; `widened`: factor on windows and heads;
             `max_small_shift`: tokens, by default `small_shift(num_tokens)`
    """
    limit = small_shift(num_tokens) if max_small_shift is None else max_small_shift
    heads = (widened * _head_lengths(copies, max_small_shift=limit, settings=settings)).astype(np.int64)
    total, allowed = int(heads.sum()), settings.max_budget * num_tokens
    scale = min(1.0, allowed / total) if total else 1.0
    return _cut(copies, (heads * scale).astype(np.int64), num_tokens, settings)


def repairs_to_choose(copies: Placed, *, num_tokens: int, wanted: float, settings: RepairSettings) -> Repairs:
    """
    Return the tail inside approximate `copies`, and an order to choose `wanted` tokens in front of it, at
    most `settings.max_budget` of the prompt.
    """
    stretches = _repairable(copies, num_tokens - settings.tail)
    most = min(sum(len(stretch) for stretch in stretches), int(settings.max_budget * num_tokens))
    count = min(round(wanted), most)
    order = RepairOrder(stretches, tuple(probes(stretches, num_tokens).tolist()), count) if count else None
    return Repairs(tail_repairs(copies, num_tokens=num_tokens, settings=settings), order)


def tail_repairs(copies: Placed, *, num_tokens: int, settings: RepairSettings) -> tuple[Span, ...]:
    """Return the tail inside approximate `copies`, and what is too short to be copied."""
    return _cut(copies, np.zeros(len(copies), np.int64), num_tokens, settings)


def _cut(copies: Placed, heads: Places, num_tokens: int, settings: RepairSettings) -> tuple[Span, ...]:
    """Return the heads, the tail, and what would remain of copies but is too short to be copied."""
    tail = max(0, num_tokens - settings.tail)
    first, last = copies[:, 1], ends(copies)
    start = np.minimum(first + heads, last)  # what is copied after all, from here
    end = np.where(last <= tail, last, np.maximum(start, tail))  # to here
    is_copied = end - start >= MIN_LEFTOVER
    start, end = np.where(is_copied, start, last), np.where(is_copied, end, last)
    return merged(np.stack([first, end], axis=1).ravel(), np.stack([start, last], axis=1).ravel())


def _repairable(copies: Placed, end: int) -> tuple[Span, ...]:
    """Return the contiguous copies of one donor in front of `end`, without copies that are too short."""
    stops = np.minimum(ends(copies), end)
    is_long = stops - copies[:, 1] >= MIN_LEFTOVER
    goes_on = continued(copies)
    goes_on[1:] &= is_long[:-1]
    begins, starts, stops = ~goes_on[is_long], copies[is_long, 1], stops[is_long]
    if not len(begins):
        return ()
    lasts = stops[np.concatenate((begins[1:], [True]))]
    return tuple(map(Span, starts[begins].tolist(), lasts.tolist()))


def _head_lengths(copies: Placed, *, max_small_shift: int, settings: RepairSettings) -> Places:
    """Return how many tokens to recompute at the start of each copy, (M,): 0 if it continues the last one."""
    is_relocated = np.abs(copies[:, 1] - copies[:, 2]) > max_small_shift
    is_relocated[1:] |= copies[1:, 0] != copies[:-1, 0]
    lengths = np.where(is_relocated, settings.relocated_head, settings.edit_window)
    return np.where(continued(copies), 0, lengths)
