"""
What is computed again although a donor had it: positions whose tokens match but whose context changed.

Two ways to say which. By place: after an edit, a contiguous window behind it carries most of what the edited
value left in the text (measured in arXiv:2609.17983); a copy that comes from elsewhere needs its head, where
attention sinks sit (EPIC, arXiv:2410.15332). Or an engine chooses as many as it is given after a probe pass.
The tail of the prompt is always fresh, because the answer starts from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from delta_tree import Copy, Span, merge
from kvshare.settings import RepairSettings
from kvshare.sharing.plan import RepairOrder, continues, small_shift
from kvshare.sharing.selection import probes

# What is left of a copy after its repairs; below this a further run costs more than computing the tokens.
_MIN_LEFTOVER = 8

RepairRule = Literal["windows", "attention"]


@dataclass(frozen=True, slots=True)
class Repairs:
    """What is computed again for certain, and what is still to be chosen."""

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
    The windows, heads and tail inside approximate `copies`.

    Source:  see above; windows shrink evenly when they exceed `settings.max_budget` of the prompt
    Units:   token positions of the recipient, half-open; copies ascending by target; `widened`: times what
             the settings say; `max_small_shift`: tokens, by default `small_shift`'s
    """
    limit = small_shift(num_tokens) if max_small_shift is None else max_small_shift
    heads = [
        int(widened * _head_length(copy, before, max_small_shift=limit, settings=settings))
        for before, copy in zip([None, *copies], copies, strict=False)
    ]
    allowed = settings.max_budget * num_tokens
    scale = min(1.0, allowed / sum(heads)) if sum(heads) else 1.0
    return _cut(copies, [int(head * scale) for head in heads], num_tokens, settings)


def repairs_to_choose(
    copies: Sequence[Copy], *, num_tokens: int, wanted: float, settings: RepairSettings
) -> Repairs:
    """
    The tail inside approximate `copies`, and an order for `wanted` tokens of what is in front of it: at most
    `settings.max_budget` of the prompt, and what there is.
    """
    pieces = _pieces(copies, num_tokens - settings.tail)
    most = min(sum(len(piece) for piece in pieces), int(settings.max_budget * num_tokens))
    count = min(round(wanted), most)
    order = RepairOrder(pieces, tuple(probes(pieces, num_tokens).tolist()), count) if count else None
    return Repairs(_cut(copies, [0] * len(copies), num_tokens, settings), order)


def _cut(
    copies: Sequence[Copy], heads: Sequence[int], num_tokens: int, settings: RepairSettings
) -> tuple[Span, ...]:
    """The heads, the tail, and what would be left of a copy but is too short."""
    tail = max(0, num_tokens - settings.tail)
    repairs: list[Span] = []
    for copy, head in zip(copies, heads, strict=True):
        target_start, target_end = copy.target_start, copy.target_start + copy.length
        start = min(target_end, target_start + head)
        end = max(start, min(target_end, tail))
        if end - start < _MIN_LEFTOVER:
            start = end = target_end
        if start > target_start:
            repairs.append(Span(target_start, start))
        if target_end > end:
            repairs.append(Span(end, target_end))
    return merge(repairs)


def _pieces(copies: Sequence[Copy], end: int) -> tuple[Span, ...]:
    """Stretches in front of `end` that come from one place of one donor each; too short ones left out."""
    pieces: list[Span] = []
    before: Copy | None = None
    for copy in copies:
        target = Span(copy.target_start, max(copy.target_start, min(copy.target.end, end)))
        if len(target) < _MIN_LEFTOVER:
            before = None
            continue
        if before is not None and continues(before, copy):
            target = Span(pieces.pop().start, target.end)
        pieces.append(target)
        before = copy
    return tuple(pieces)


def _head_length(copy: Copy, before: Copy | None, *, max_small_shift: int, settings: RepairSettings) -> int:
    """Tokens to recompute at the start of a copy: none where the donor's own text simply goes on."""
    if before is not None and continues(before, copy):
        return 0
    moved_far = abs(copy.target_start - copy.donor_start) > max_small_shift
    if moved_far or (before is not None and before.donor != copy.donor):
        return settings.relocated_head
    return settings.edit_window
