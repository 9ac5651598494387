"""
Our own rule: compute again what the answer listens to, where it changed, as far as computing sets it right.

    score of a copied token = sqrt(heard) x changed x mendable

    heard      attention that reaches the prompt's last row, straight or through rows computed anyway; the
               root, because the answer's later tokens listen elsewhere than its first
    changed    how far the token's values move when it is computed: measured on a few probes, between them
               interpolated
    mendable   falls with the distance to the start of its piece: a token inherits from stale neighbours

A third of the budget goes to the starts of the pieces, evenly: what no attention tells is most often there.
The rest goes to the highest scores. One probe pass: the rows that are computed anyway and at most
min(64, 3 %) copied ones. One set of positions for all layers, in at most 32 runs beyond the plan's own.
Behind an edit the changes are at the start of the piece, and windows come out; in moved text everything
changed a little, and attention decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import Span
from kvshare.bench.fidelity.layered import Mask
from kvshare.bench.fidelity.rules.base import Rule, Scores, blocks, heads, num_wanted, pieces, takes_all
from kvshare.bench.fidelity.trial import Selection, Trial, num_runs
from kvshare.kv.sequence import SequenceKV

_MOST_PROBES, _PROBED_SHARE = 64, 0.03
_OFFSETS = (0, 2, 5, 10, 20, 40, 80, 160, 320, 640)  # of probes in a piece: changes decay from its start
_PASSED_ON = 0.2  # of what a row hears is in what later layers hear from it
_HEARD = 0.5  # exponent
_STARTS = 1 / 3  # of the budget
_MENDABLE, _REACH = 0.3, 32.0  # far from the start of a piece; tokens over which it falls
_MOST_RUNS = 32
_BLOCKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)  # tokens computed together, until runs are few
_LEAST = 1e-6


def probes(stretches: Sequence[Span], num_tokens: int) -> Mask:
    """(T,) at most `min(64, 3 %)` positions, dense at the start of each piece and sparse behind it."""
    rows = np.zeros(num_tokens, np.bool_)
    left = min(_MOST_PROBES, int(_PROBED_SHARE * num_tokens))
    for offset in _OFFSETS:
        for piece in stretches:
            if left > 0 and offset < len(piece):
                rows[piece.start + offset] = True
                left -= 1
    return rows


def heard(attention: Scores, slots: NDArray[np.int64]) -> Scores:
    """
    (L, T) how much of each slot reaches the last row, by layer.

    Shapes:  attention (L, N, T) of the computed rows, mean over heads; slots (N,) where they stand
    """
    reaches = np.zeros(len(slots))
    reaches[-1] = 1.0
    found = np.zeros((attention.shape[0], attention.shape[2]))
    for layer in reversed(range(len(attention))):
        found[layer] = reaches @ attention[layer]
        reaches = reaches + _PASSED_ON * found[layer][slots]
    return found


def between(stretches: Sequence[Span], places: NDArray[np.int64], changes: Scores, num_tokens: int) -> Scores:
    """
    (L, T) changes at the probes, interpolated in the logarithm within each piece; elsewhere their mean.

    Shapes:  places (P,) of the probes, ascending; changes (L, P)
    """
    logarithms = np.log(changes + _LEAST)
    found = np.zeros((len(changes), num_tokens))
    for piece in stretches:
        own = (places >= piece.start) & (places < piece.end)
        inside = np.arange(piece.start, piece.end)
        for layer, row in enumerate(logarithms):
            values = np.interp(inside, places[own], row[own]) if own.any() else row.mean()
            found[layer, piece.start : piece.end] = np.exp(values)
    return found


def mendable(stretches: Sequence[Span], num_tokens: int) -> Scores:
    """(T,) 1 at the start of a piece, falling."""
    found = np.zeros(num_tokens)
    for piece in stretches:
        found[piece.start : piece.end] = _MENDABLE + (1 - _MENDABLE) * np.exp(-np.arange(len(piece)) / _REACH)
    return found


def chosen(scores: Scores, allowed: Mask, computed: Mask, count: int, *, starts: Mask) -> Mask:
    """(T,) `starts` and the allowed positions with the highest scores, in few runs beyond `computed`."""
    if _further_runs(starts, computed) > _MOST_RUNS:
        starts = np.zeros(len(allowed), np.bool_)
    left = count - int(starts.sum())
    rows = np.zeros(len(allowed), np.bool_)
    for size in _BLOCKS:
        rows = starts | blocks(scores, allowed & ~starts, left, size)
        if _further_runs(rows, computed) <= _MOST_RUNS:
            break
    return rows


def _further_runs(rows: Mask, computed: Mask) -> int:
    return num_runs(rows | computed) - num_runs(computed)


def _probe_pass(trial: Trial, rows: Mask) -> tuple[Scores, Scores, SequenceKV]:
    """
    (L, N, T) attention of these rows, (L, P) how far the values of their copied ones moved, and the KV with
    the base computed and the copies as they were.
    """
    seen, kv = trial.watch(rows)
    places = torch.from_numpy((rows & trial.copied).nonzero()[0])
    change = (kv.v[:, places] - trial.laid.v[:, places]).flatten(2).norm(dim=2)
    for fresh, old in ((kv.k, trial.laid.k), (kv.v, trial.laid.v)):
        fresh[:, places] = old[:, places]
    return seen, change.cpu().numpy(), kv


@lru_cache(
    maxsize=1
)  # the budgets of both rules on one plan share its probe pass; nobody writes to the result
def score(trial: Trial) -> tuple[Scores, SequenceKV]:
    """(T,) of the copied positions, and the KV behind the probe pass."""
    stretches = pieces(trial)
    probed = probes(stretches, trial.num_tokens)
    rows = trial.base | probed
    attention, changes, kv = _probe_pass(trial, rows)
    changed = between(stretches, probed.nonzero()[0], changes, trial.num_tokens)
    total: Scores = (heard(attention, rows.nonzero()[0]) ** _HEARD * changed).sum(axis=0)
    return total * mendable(stretches, trial.num_tokens), kv


def _probe_cost(trial: Trial) -> float:
    """The probe pass: what is computed anyway, and the probes, in all layers."""
    probed = probes(pieces(trial), trial.num_tokens)
    return float((trial.base | probed).sum() * trial.num_layers)


def _positions(trial: Trial, scores: Scores, budget: float) -> Mask:
    """(T,) the starts of all pieces and the highest scores; together they spend the budget."""
    count = num_wanted(trial, budget)
    starts = heads(pieces(trial), trial.num_tokens, int(_STARTS * count))
    return chosen(scores, trial.copied, trial.base, count, starts=starts)


def _kvshare(trial: Trial, budget: float) -> Selection:
    scores, _ = score(trial)
    return Selection(_positions(trial, scores, budget), probe=_probe_cost(trial))


def _once_cost(trial: Trial) -> float:
    """The probes and the prompt's last rows, which are computed a second time."""
    probed = probes(pieces(trial), trial.num_tokens)
    return float((probed | _last(trial)).sum() * trial.num_layers)


def _last(trial: Trial) -> Mask:
    """(T,) the rows that the answer starts from."""
    return trial.base & (np.arange(trial.num_tokens) >= trial.num_tokens - trial.settings.repair.tail)


def _once(trial: Trial, budget: float) -> Selection:
    """Placeholders are computed once, in the probe pass; behind the repairs only the last rows again."""
    scores, kv = score(trial)
    rows = _positions(trial, scores, budget)
    kept = None if takes_all(trial, budget) else trial.base & ~_last(trial)
    return Selection(rows, probe=_once_cost(trial), kv=kv, kept=kept)


RULES = (
    Rule("kvshare", "KVShare's rule", "", _kvshare, _probe_cost, published=False),
    Rule("kvshare-once", "KVShare's rule, placeholders once", "", _once, _once_cost, published=False),
)
