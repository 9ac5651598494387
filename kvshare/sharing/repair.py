"""
Repairs: positions that are computed again because their tokens match a donor but their context changed.

There are two rules. By place: a window after each edit, which the edit affects most (arXiv:2609.17983), and
the head of each relocated copy, where attention sinks are (EPIC, arXiv:2410.15332).
By attention: an engine chooses a given number of tokens after a probe pass. The tail of the prompt is always
computed, because the answer starts from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from delta_tree import Copy, Span, merge
from kvshare.settings import RepairSettings
from kvshare.sharing.plan import RepairOrder, continues, small_shift
from kvshare.sharing.selection import probes

# If repairs leave fewer tokens of a copy, these are computed, too: that costs less than an additional run.
_MIN_LEFTOVER = 8

RepairRule = Literal["windows", "attention"]


@dataclass(frozen=True, slots=True)
class Repairs:
    """The known repairs, and an order for those that the engine still has to choose."""

    spans: tuple[Span, ...]
    order: RepairOrder | None = None


def repairs_by_place(
    copies: Sequence[Copy],
    *,
    num_tokens: int,
    settings: RepairSettings,
    widened: float = 1.0,
    max_small_shift: int | None = None,
) -> tuple[Span, ...]:
    """
    Return the windows, heads and tail inside approximate `copies`.

    Windows and heads shrink evenly if they exceed `settings.max_budget` of the prompt.
    Units:   token positions of the recipient, half-open; copies ascending by target; `widened`: factor on
             windows and heads; `max_small_shift`: tokens, by default `small_shift(num_tokens)`
    """
    limit = small_shift(num_tokens) if max_small_shift is None else max_small_shift
    heads = [int(widened * head) for head in _head_lengths(copies, max_small_shift=limit, settings=settings)]
    allowed = settings.max_budget * num_tokens
    scale = min(1.0, allowed / sum(heads)) if sum(heads) else 1.0
    return _cut(copies, [int(head * scale) for head in heads], num_tokens, settings)


def repairs_to_choose(
    copies: Sequence[Copy], *, num_tokens: int, wanted: float, settings: RepairSettings
) -> Repairs:
    """
    Return the tail inside approximate `copies`, and an order to choose `wanted` tokens in front of it, at
    most `settings.max_budget` of the prompt.
    """
    stretches = _stretches(copies, num_tokens - settings.tail)
    most = min(sum(len(stretch) for stretch in stretches), int(settings.max_budget * num_tokens))
    count = min(round(wanted), most)
    order = RepairOrder(stretches, tuple(probes(stretches, num_tokens).tolist()), count) if count else None
    return Repairs(tail_repairs(copies, num_tokens=num_tokens, settings=settings), order)


def tail_repairs(copies: Sequence[Copy], *, num_tokens: int, settings: RepairSettings) -> tuple[Span, ...]:
    """Return the tail inside approximate `copies`, and what is too short to be copied."""
    return _cut(copies, [0] * len(copies), num_tokens, settings)


def _cut(
    copies: Sequence[Copy], heads: Sequence[int], num_tokens: int, settings: RepairSettings
) -> tuple[Span, ...]:
    """Return the heads, the tail, and what would remain of copies but is too short to be copied."""
    tail = max(0, num_tokens - settings.tail)
    repairs: list[Span] = []
    for copy, head in zip(copies, heads, strict=True):
        target_start, target_end = copy.target_start, copy.target_start + copy.length
        start = target_start + head if head < copy.length else target_end
        end = target_end if target_end <= tail else max(start, tail)
        if end - start < _MIN_LEFTOVER:
            start = end = target_end
        if start > target_start:
            repairs.append(Span(target_start, start))
        if target_end > end:
            repairs.append(Span(end, target_end))
    return merge(repairs)


def _stretches(copies: Sequence[Copy], end: int) -> tuple[Span, ...]:
    """Return the stretches in front of `end`, without copies that are too short."""
    stretches: list[tuple[int, int]] = []
    before: Copy | None = None
    for copy in copies:
        start, stop = copy.target_start, min(copy.target_start + copy.length, end)
        if stop - start < _MIN_LEFTOVER:
            before = None
            continue
        if before is not None and continues(before, copy):
            start, _ = stretches.pop()
        stretches.append((start, stop))
        before = copy
    return tuple(Span(start, stop) for start, stop in stretches)


def _head_lengths(copies: Sequence[Copy], *, max_small_shift: int, settings: RepairSettings) -> list[int]:
    """Tokens to recompute at the start of each copy: 0 if it continues the copy before it."""
    lengths: list[int] = []
    before: Copy | None = None
    for copy in copies:
        if before is not None and continues(before, copy):
            lengths.append(0)
        else:
            moved_far = abs(copy.target_start - copy.donor_start) > max_small_shift
            is_relocated = moved_far or (before is not None and before.donor != copy.donor)
            lengths.append(settings.relocated_head if is_relocated else settings.edit_window)
        before = copy
    return lengths
