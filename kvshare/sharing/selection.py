"""
KVShare's repair rule: which copied tokens are computed again. The plan says how many; this says which.

    score of a copied token = sum over layers of  sqrt(attended) x changed  x  mendable

    attended   attention that the last tokens computed anyway pay to it, mean over them and over heads; the
               root, because an answer's later tokens listen elsewhere than its first
    changed    how far its values move when it is computed: measured on a few probes, else interpolated
    mendable   falls with the distance to the start of its piece: a token inherits from stale neighbours

It takes one probe pass: what is computed anyway and at most min(64, 3 %) copied tokens. Behind it the repairs
are computed, in all layers the same positions and in at most 32 runs more than the plan has; and once more
the listeners and the placeholders that they attend to most, because the probe pass computed them over what is
repaired now. Behind an edit the changes are at the start of the piece, and windows come out; in moved text
everything changed a little, and attention decides. docs/fidelity.md compares it with the published rules.

Pure: numpy arrays in, positions out. T tokens of the prompt, L layers, P probes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from delta_tree import Span
from kvshare.sharing.plan import MAX_LISTENERS, MAX_RENEWED, RepairOrder

Mask = NDArray[np.bool_]
Scores = NDArray[np.floating]

MAX_FURTHER_RUNS = 32
_MOST_PROBES, _PROBED_SHARE = 64, 0.03
_OFFSETS = (0, 2, 5, 10, 20, 40, 80, 160, 320, 640)  # of probes in a piece: changes decay from its start
_MENDABLE, _REACH = 0.3, 32.0  # far from the start of a piece; tokens over which it falls
_BLOCKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)  # tokens chosen together, until runs are few
_LEAST = 1e-6


@dataclass(frozen=True, slots=True)
class Choice:
    """What is computed behind a probe pass. Both ascending."""

    repairs: tuple[Span, ...]  # of what is copied
    again: tuple[Span, ...]  # of what the probe pass computed


def choose(
    order: RepairOrder,
    placeholders: Sequence[Span],
    attended: Scores,
    changed: Scores,
    *,
    first_approximate: int,
) -> Choice:
    """
    What a plan's engine computes behind its probe pass: `order.num_tokens` repairs, and placeholders again.

    Pieces that had to be computed, because their KV was gone, need no repair: there are fewer in proportion.
    Shapes:  attended (L, T) of the listeners, mean over them and over heads; changed (L, P) of the probes
    """
    num_tokens = attended.shape[1]
    pieces, computed = (covered(spans, num_tokens) for spans in (order.pieces, placeholders))
    allowed = pieces & ~computed
    found = scores(order.pieces, attended, np.array(order.probes, np.int64), changed)
    num_repairs = round(order.num_tokens * allowed.sum() / max(1, pieces.sum()))
    repairs = chosen(found, allowed, computed, num_repairs)
    again = renewed(attended, computed, repairs, first_approximate=first_approximate)
    return Choice(tuple(stretches(repairs)), tuple(stretches(again)))


def probes(pieces: Sequence[Span], num_tokens: int) -> NDArray[np.int64]:
    """
    (P,) positions whose change is measured, ascending: dense at the start of each piece and sparse behind it.

    `pieces`: copied stretches, ascending, each from one place of one donor.
    """
    room = min(_MOST_PROBES, int(_PROBED_SHARE * num_tokens))
    places = [piece.start + offset for offset in _OFFSETS for piece in pieces if offset < len(piece)]
    return np.array(sorted(places[:room]), np.int64)


def listeners(computed: Mask) -> NDArray[np.int64]:
    """(N,) the last tokens that are computed anyway."""
    return computed.nonzero()[0][-MAX_LISTENERS:]


def choose_by_place(
    order: RepairOrder, placeholders: Sequence[Span], *, num_tokens: int, first_approximate: int
) -> Choice:
    """The same number where nothing can be measured: the starts of the pieces."""
    attended, changed = np.ones((1, num_tokens)), np.ones((1, len(order.probes)))
    return choose(order, placeholders, attended, changed, first_approximate=first_approximate)


def renewed(attended: Scores, computed: Mask, repairs: Mask, *, first_approximate: int) -> Mask:
    """
    (T,) the listeners, and of the other computed tokens those that they attend to most.

    What stands in front of the first approximate copy has seen nothing stale.
    """
    again = np.zeros(len(computed), np.bool_)
    again[listeners(computed)] = True
    stale = computed & ~again
    stale[:first_approximate] = False
    count = min(MAX_RENEWED, int(stale.sum()))
    return again | chosen(attended.sum(axis=0), stale, again | repairs, count)


def scores(
    pieces: Sequence[Span], attended: Scores, places: NDArray[np.int64], changed: Scores
) -> NDArray[np.float64]:
    """
    (T,) of the pieces' tokens; 0 elsewhere.

    Shapes:  attended (L, T); places (P,) of the probes, ascending; changed (L, P), norms
    """
    found = np.zeros(attended.shape[1])
    everywhere = np.log(changed + _LEAST).mean(axis=1) if len(places) else np.zeros(len(attended))
    for piece in pieces:
        inside = slice(piece.start, piece.end)
        change = _between(piece, places, changed, everywhere)
        found[inside] = (np.sqrt(attended[:, inside]) * change).sum(axis=0) * _mendable(len(piece))
    return found


def chosen(scores: Scores, allowed: Mask, computed: Mask, count: int) -> Mask:
    """(T,) `count` allowed positions with high scores, in few runs beside what is computed anyway."""
    rows = np.zeros(len(allowed), np.bool_)
    for size in _BLOCKS:
        rows = blocks(scores, allowed, count, size)
        if num_runs(rows | computed) - num_runs(computed) <= MAX_FURTHER_RUNS:
            break
    return rows


def highest(scores: Scores, allowed: Mask, count: int) -> Mask:
    """(T,) the `count` allowed positions with the highest scores; of equals the first."""
    rows = np.zeros(len(allowed), np.bool_)
    places = allowed.nonzero()[0]
    order = np.argsort(-scores[places], kind="stable")
    rows[places[order[:count]]] = True
    return rows


def blocks(scores: Scores, allowed: Mask, count: int, size: int) -> Mask:
    """(T,) `count` allowed positions in blocks of neighbours with the highest means; the last one is cut."""
    edges = np.arange(0, len(scores), size)
    sums = np.add.reduceat(np.where(allowed, scores, 0.0), edges)
    means = sums / np.maximum(1, np.add.reduceat(allowed.astype(float), edges))
    return highest(np.repeat(means, size)[: len(scores)], allowed, count)


def stretches(mask: Mask) -> list[Span]:
    """The runs of True, ascending."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [Span(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def covered(spans: Sequence[Span], num_tokens: int) -> Mask:
    """(T,) the positions that the spans cover."""
    mask = np.zeros(num_tokens, np.bool_)
    for span in spans:
        mask[span.start : span.end] = True
    return mask


def num_runs(rows: Mask) -> int:
    """Stretches of neighbours."""
    return int(rows[0]) + int((rows[1:] & ~rows[:-1]).sum())


def _between(
    piece: Span, places: NDArray[np.int64], changed: Scores, everywhere: NDArray[np.float64]
) -> NDArray[np.float64]:
    """(L, len(piece)) changes, interpolated in the logarithm; of a piece without a probe the mean of all."""
    own = (places >= piece.start) & (places < piece.end)
    if not own.any():
        return np.repeat(np.exp(everywhere)[:, None], len(piece), axis=1)
    inside, logarithms = np.arange(piece.start, piece.end), np.log(changed[:, own] + _LEAST)
    return np.exp([np.interp(inside, places[own], row) for row in logarithms])


def _mendable(length: int) -> NDArray[np.float64]:
    """(length,) 1 at the start of a piece, falling."""
    found: NDArray[np.float64] = _MENDABLE + (1 - _MENDABLE) * np.exp(-np.arange(length) / _REACH)
    return found
