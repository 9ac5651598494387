"""
The least time of a plan that copies from exact originals only, found without composing one.

An agent's prompt is often an edited copy of an edited copy. Its plan inherits deviation, so a plan with the
original is made, too, and used if it takes hardly longer. Mostly it takes much longer, as the original is
more edits away: more is computed between its copies, and more is repaired. Composing it takes as long as the
first plan did, and only to be refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delta_tree import Target, TokenIds, common_prefix_length
from delta_tree.spans import true_ranges
from kvshare.settings import RepairSettings
from kvshare.sharing.approximation import DOSES
from kvshare.sharing.prediction import stale_tokens
from kvshare.sharing.rates import DISK, PrefillWork, Rates
from kvshare.sharing.repair import MIN_LEFTOVER


class _Repaired(NamedTuple):
    num_tokens: float
    num_pairs: float  # with the positions that they attend to


def least_s(target: Target, originals: Sequence[TokenIds], repair: RepairSettings, rates: Rates) -> float:
    """
    Return the seconds that any approximate plan takes at least that copies from these prompts only.

    0 where no limit is known: where loading may take longer than computing, or reads from disk be split.
    Shapes:  each of `originals` (S,), whose KV is exact
    """
    if rates.token_s < rates.reused_s + _load_s_per_token(rates) or (
        rates.computes_ahead and rates.queue.to_read
    ):
        return 0.0
    size = len(target.tokens)
    start = max(common_prefix_length(tokens, target.tokens) for tokens in originals)
    is_copied = target.may_have(originals)
    is_copied[:start] = False  # what comes after the exact prefix
    is_copied[max(0, size - repair.tail) :] = False  # is always computed
    computed = start + np.flatnonzero(~is_copied[start:])
    runs = true_ranges(is_copied)  # of the originals, or longer: copies lie within them
    seconds = []
    for repaired in (_by_place(runs, start, size, target.min_run, repair), _chosen(runs, size, repair)):
        num_tokens = len(computed) + int(repaired.num_tokens)
        work = PrefillWork(
            num_tokens=num_tokens,
            num_pairs=float(computed.sum()) + repaired.num_pairs,
            num_passes=rates.num_extra_passes,
            num_reused=size - num_tokens,
        )
        seconds.append(rates.least(size, work).shared_s)
    return min(seconds)


def _by_place(
    runs: NDArray[np.int64], start: int, size: int, min_run: int, repair: RepairSettings
) -> _Repaired:
    """
    Each run has a copy of `min_run` tokens at least, or is computed, and each copy has a window; if there are
    too many of them, they shrink evenly to whole numbers of tokens.
    """
    lengths = runs[:, 1] - runs[:, 0]
    smaller, larger = sorted((repair.edit_window, repair.relocated_head))
    windows = np.minimum(lengths, min(smaller, min_run))
    shrunk = repair.max_budget * size * smaller / max(1, larger) - lengths.sum() / min_run
    if shrunk < windows.sum():
        return _Repaired(max(0.0, shrunk), max(0.0, shrunk) * start)
    return _Repaired(float(windows.sum()), float(windows @ runs[:, 0]))


def _chosen(runs: NDArray[np.int64], size: int, repair: RepairSettings) -> _Repaired:
    """Return as many as the smallest dose says: parts of a run have more stale tokens than it as a whole."""
    lengths = runs[:, 1] - runs[:, 0]
    most = min(lengths.sum(), repair.max_budget * size)
    num_tokens = max(0.0, min(DOSES[0] * stale_tokens(lengths).sum(), most) - MIN_LEFTOVER)
    return _Repaired(num_tokens, num_tokens * size / 2)


def _load_s_per_token(rates: Rates) -> float:
    slowest = max((rate.byte_s for place, rate in rates.loads.items() if place != DISK), default=0.0)
    return slowest * rates.bytes_per_token
