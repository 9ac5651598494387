"""
The structural repair set: positions whose tokens match but whose context changed, chosen by place alone.

After an edit, a contiguous window behind it carries most of what the edited value left in the text
(measured in arXiv:2609.17983); a copy that comes from elsewhere needs its head, where attention sinks sit
(EPIC, arXiv:2410.15332); the tail of the prompt is always fresh, because the answer starts from it.
"""

from __future__ import annotations

from collections.abc import Sequence

from delta_tree import Copy, Span, merge
from kvshare.settings import RepairSettings

# What is left of a copy after its repairs; below this a further run costs more than computing the tokens.
_MIN_LEFTOVER = 8


def structural_repairs(
    copies: Sequence[Copy], *, num_tokens: int, max_small_shift: int, settings: RepairSettings
) -> tuple[Span, ...]:
    """
    Spans inside approximate `copies` that are computed again.

    Units:   token positions of the recipient, half-open; copies ascending by target
    Source:  see above; windows shrink evenly when they exceed `settings.max_budget` of the prompt
    """
    heads = [
        _head_length(copy, before, max_small_shift=max_small_shift, settings=settings)
        for before, copy in zip([None, *copies], copies, strict=False)
    ]
    allowed = settings.max_budget * num_tokens
    scale = min(1.0, allowed / sum(heads)) if sum(heads) else 1.0
    tail = Span(max(0, num_tokens - settings.tail), num_tokens)
    repairs: list[Span] = []
    for copy, head in zip(copies, heads, strict=True):
        target_start, target_end = copy.target_start, copy.target_start + copy.length
        start = min(target_end, target_start + int(head * scale))
        end = max(start, min(target_end, tail.start))
        if end - start < _MIN_LEFTOVER:
            start = end = target_end
        if start > target_start:
            repairs.append(Span(target_start, start))
        if target_end > end:
            repairs.append(Span(end, target_end))
    return merge(repairs)


def _head_length(copy: Copy, before: Copy | None, *, max_small_shift: int, settings: RepairSettings) -> int:
    """Tokens to recompute at the start of a copy: none where the donor's own text simply goes on."""
    same_donor = before is not None and before.donor == copy.donor
    if (
        before is not None
        and same_donor
        and before.target_start + before.length == copy.target_start
        and before.donor_start + before.length == copy.donor_start
    ):
        return 0
    moved_far = abs(copy.target_start - copy.donor_start) > max_small_shift
    if moved_far or (before is not None and not same_donor):
        return settings.relocated_head
    return settings.edit_window
