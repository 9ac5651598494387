"""
Copies as arrays: where they stand in the prompt and in their donors, without the segments that have their KV.

A plan of a long transcript has more than a thousand copies. What depends on places alone is computed for all
of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from delta_tree import Copy, Span

Placed = NDArray[np.int64]
"""Copies, ascending in the prompt: (M, 4) donor, start in the prompt, start in the donor, length."""
Places = NDArray[np.int64]

_as_numbers = attrgetter("donor", "target_start", "donor_start", "length")


def placed(copies: Sequence[Copy]) -> Placed:
    """Return where these copies stand, (M, 4)."""
    return np.array([_as_numbers(copy) for copy in copies], np.int64).reshape(-1, 4)


def ends(copies: Placed) -> Places:
    """(M,) the end of each copy in the prompt."""
    found: Places = copies[:, 1] + copies[:, 3]
    return found


def continued(copies: Placed) -> NDArray[np.bool_]:
    """Return (M,): does a copy continue the one before it, in the prompt and in the same donor?"""
    is_continued = np.zeros(len(copies), np.bool_)
    before, after = copies[:-1], copies[1:]
    is_continued[1:] = (before[:, 0] == after[:, 0]) & (ends(before) == after[:, 1])
    is_continued[1:] &= before[:, 2] + before[:, 3] == after[:, 2]
    return is_continued


def joined(copies: Placed) -> Placed:
    """(S, 4) contiguous copies of one donor as one copy each."""
    if not len(copies):
        return copies
    firsts = np.flatnonzero(~continued(copies))
    found = copies[firsts]
    found[:, 3] = np.add.reduceat(copies[:, 3], firsts)
    return found


def inside(copies: Placed, span: Span) -> Placed:
    """(N, 4) the copies, clipped to a span of the prompt."""
    starts, stops = np.maximum(copies[:, 1], span.start), np.minimum(ends(copies), span.end)
    is_in = starts < stops
    parts = copies[is_in]
    parts[:, 2] += starts[is_in] - parts[:, 1]
    parts[:, 1], parts[:, 3] = starts[is_in], (stops - starts)[is_in]
    return parts


def merged(starts: Places, stops: Places) -> tuple[Span, ...]:
    """Return disjoint spans without empty ones; those that touch are joined. Shapes: (N,) ascending, both"""
    is_span = starts < stops
    starts, stops = starts[is_span], stops[is_span]
    if not len(starts):
        return ()
    is_apart = starts[1:] > stops[:-1]
    firsts = starts[np.concatenate(([True], is_apart))].tolist()
    lasts = stops[np.concatenate((is_apart, [True]))].tolist()
    return tuple(map(Span, firsts, lasts))
