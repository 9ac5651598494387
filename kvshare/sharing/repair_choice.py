"""
Chooses which copied tokens are computed again, by their scores. The plan says how many.

`kvshare/kv/scoring.py` makes the scores of what a probe pass measures.

A probe pass computes the placeholders and some copied tokens: at most 64, and at most 3 % of the prompt. Only
the first three quarters of its layers are measured, so that a GPU's results are on the host before the pass
ends. A second pass computes the chosen repairs, at the same positions in all layers. The repairs add at most
about 32 runs to those of the plan. The second pass also recomputes the listeners and the placeholders that
the listeners attend to most, because the probe pass computed both over stale KV. After an edit, mostly the
tokens at the start of a stretch change, so the choice is a window. In moved text all tokens change a little,
and attention decides. docs/fidelity.md compares this rule with published rules.

All functions are pure: they take numpy arrays and return positions. T is the number of tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from delta_tree import Span
from kvshare.sharing.plan import MAX_LISTENERS, MAX_RENEWED, RepairOrder

Mask = NDArray[np.bool_]
Scores = NDArray[np.floating]

MAX_FURTHER_RUNS = 32
_MOST_PROBES, _PROBED_SHARE = 64, 0.03
# Offsets of probes from the start of a stretch. The start changes most.
_OFFSETS = (0, 2, 5, 10, 20, 40, 80, 160, 320, 640)
_REPAIRABLE, _REACH = 0.3, 32.0  # least value; tokens over which it falls
_BLOCKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)  # tokens chosen together
_LISTENING = 3 / 4  # of the layers


@dataclass(frozen=True, slots=True)
class RepairChoice:
    """The positions that the second pass computes. Both are ascending."""

    repairs: tuple[Span, ...]  # copied tokens
    renewed: tuple[Span, ...]  # placeholders that are computed a second time


def choose(
    order: RepairOrder,
    placeholders: Sequence[Span],
    scores: Scores,
    attended: Scores,
    *,
    first_approximate: int,
) -> RepairChoice:
    """
    Return what the second pass computes: `order.num_tokens` repairs, and some placeholders again.

    Tokens of stretches whose KV is missing are computed anyway. These tokens need no repair, so the number of
    repairs shrinks in proportion.
    Shapes:  scores (T,); attended (T,), the attention of the listeners, summed over the measured layers
    """
    num_tokens = len(scores)
    in_stretches, computed = (covered(spans, num_tokens) for spans in (order.stretches, placeholders))
    allowed = in_stretches & ~computed
    num_repairs = round(order.num_tokens * allowed.sum() / max(1, in_stretches.sum()))
    repairs = chosen(scores, allowed, computed, num_repairs)
    recomputed = renewed(attended, computed, repairs, first_approximate=first_approximate)
    return RepairChoice(tuple(spans_where(repairs)), tuple(spans_where(recomputed)))


def num_listening_layers(num_layers: int) -> int:
    """Return the number of layers, from the first on, in which a probe pass is measured."""
    return max(1, round(_LISTENING * num_layers))


def probes(stretches: Sequence[Span], num_tokens: int) -> NDArray[np.int64]:
    """
    Return the positions whose change is measured, (P,), ascending. They are dense at the start of each
    stretch, then sparse.

    `stretches`: each has contiguous copies of one donor; stretches are ascending.
    """
    room = min(_MOST_PROBES, int(_PROBED_SHARE * num_tokens))
    spans = [(stretch.start, stretch.end) for stretch in stretches]
    places = (start + offset for offset in _OFFSETS for start, end in spans if start + offset < end)
    return np.array(sorted(islice(places, room)), np.int64)


def listeners(computed: Mask) -> NDArray[np.int64]:
    """Return the positions of the listeners, (N,): the last placeholders."""
    return computed.nonzero()[0][-MAX_LISTENERS:]


def choose_by_place(
    order: RepairOrder, placeholders: Sequence[Span], *, num_tokens: int, first_approximate: int
) -> RepairChoice:
    """Choose the same number of repairs without measurements: the starts of the stretches."""
    scores, attended = repairable(order.stretches, num_tokens), np.ones(num_tokens)
    return choose(order, placeholders, scores, attended, first_approximate=first_approximate)


def repairable(stretches: Sequence[Span], num_tokens: int) -> NDArray[np.float32]:
    """Return weights (T,) that fall with the distance to the start of a stretch; 0 outside of stretches."""
    found = np.zeros(num_tokens, np.float32)
    for stretch in stretches:
        distances = np.arange(len(stretch))
        found[stretch.start : stretch.end] = _REPAIRABLE + (1 - _REPAIRABLE) * np.exp(-distances / _REACH)
    return found


def renewed(attended: Scores, computed: Mask, repairs: Mask, *, first_approximate: int) -> Mask:
    """
    Return the listeners, and the other computed tokens to which listeners attend most, as a mask (T,).

    Tokens before the first approximate copy are exact and never computed again. `attended`: (T,)
    """
    listening = np.zeros(len(computed), np.bool_)
    listening[listeners(computed)] = True
    stale = computed & ~listening
    stale[:first_approximate] = False
    count = min(MAX_RENEWED, int(stale.sum()))
    return listening | chosen(attended, stale, listening | repairs, count)


def chosen(scores: Scores, allowed: Mask, computed: Mask, count: int) -> Mask:
    """Return a mask (T,) of `count` allowed positions with high scores that add few runs to `computed`."""
    rows = np.zeros(len(allowed), np.bool_)
    for size in _BLOCKS:
        rows = blocks(scores, allowed, count, size)
        if num_runs(rows | computed) - num_runs(computed) <= MAX_FURTHER_RUNS:
            break
    return rows


def highest(scores: Scores, allowed: Mask, count: int) -> Mask:
    """Return a mask (T,) of the `count` allowed positions with the highest scores; of equals, the first."""
    rows = np.zeros(len(allowed), np.bool_)
    places = allowed.nonzero()[0]
    order = np.argsort(-scores[places], kind="stable")
    rows[places[order[:count]]] = True
    return rows


def blocks(scores: Scores, allowed: Mask, count: int, size: int) -> Mask:
    """Mark (T,) `count` allowed positions in the blocks with the highest means; the last block may be cut."""
    starts = np.arange(0, len(scores), size)
    sums = np.add.reduceat(np.where(allowed, scores, 0.0), starts)
    sizes = np.add.reduceat(allowed, starts, dtype=np.int32)
    places = sizes.nonzero()[0]
    means = sums[places] / sizes[places]
    if 0 < count < len(places):  # no more blocks can be taken, so the others need not be sorted
        least = np.partition(means, len(means) - count)[-count]
        places, means = places[means >= least], means[means >= least]
    in_turn = places[np.argsort(-means, kind="stable")]
    num_before = np.cumsum(sizes[in_turn]) - sizes[in_turn]
    taken = np.zeros(len(sizes), np.bool_)
    taken[in_turn[num_before < count]] = True
    rows = allowed & np.repeat(taken, size)[: len(scores)]
    if (num_over := int(rows.sum()) - count) > 0:  # the block taken last is cut
        last = int(in_turn[num_before < count][-1]) * size
        rows[last + np.flatnonzero(rows[last : last + size])[-num_over:]] = False
    return rows


def spans_where(mask: Mask) -> list[Span]:
    """Return the runs of True, ascending."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [Span(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def covered(spans: Sequence[Span], num_tokens: int) -> Mask:
    """Return the positions that the spans cover, as a mask (T,)."""
    mask = np.zeros(num_tokens, np.bool_)
    for span in spans:
        mask[span.start : span.end] = True
    return mask


def num_runs(rows: Mask) -> int:
    """Count the runs of True."""
    return int(rows[0]) + int((rows[1:] & ~rows[:-1]).sum())
