"""
All equal stretches (runs) of two prompts: first by anchors, then position by position between them.

An anchor is a k-gram that occurs only once in the source, so its position there is unambiguous. Neighbouring
anchors with the same shift belong to one run, and a few array operations find these runs for a whole prompt.
Text without anchors, such as repeated text, is left to `runs_in`, which tries each position.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from delta_tree.edits import Match
from delta_tree.kgrams import Ids, Places, Sieve, low_slots, quick_hashes
from delta_tree.runs import Pair, add_run, runs_in
from delta_tree.spans import Span, consecutive, true_spans

Positions = npt.NDArray[np.int64]

# With fewer k-grams to look up, `runs_in` alone is faster than the array operations.
_MIN_ANCHORED = 4096
_MAX_TABLE_BITS = 22
_FIRST_STEP = 8  # tokens in the first comparison of `_num_equal`; each further one takes twice as many
_SLOTS_PER_PLACE = 4  # k-grams that share a slot are not used as anchors: at most 1 in 6 is lost


def common_runs(source: Ids, target: Ids, *, min_run: int) -> list[Match]:
    """
    Return equal stretches of at least `min_run` tokens, at any position in the two prompts.

    The runs are sorted by the target and do not overlap in it; several may come from the same source tokens.
    A run ends where the tokens differ, or where the next run in the target begins. The rest of the target
    holds no common stretch of `min_run` tokens.
    """
    if min_run < 1:
        raise ValueError(f"min_run must be at least 1, got {min_run}")
    pair = Pair(source, target, quick_hashes(source, min_run), quick_hashes(target, min_run), min_run)
    places = Sieve(pair.target_hashes).passing(pair.source_hashes)
    return tile(pair, [Span(0, len(target))], places)


def tile(pair: Pair, spans: Sequence[Span], places: Places) -> list[Match]:
    """
    Return runs of the source that fill the target positions `spans`, sorted by the target, not overlapping.

        `places` are the positions of the source's k-grams that may occur in the spans. The rest of the spans
        holds no common stretch of `k` tokens.
    """
    k = pair.k
    spans = [span for span in spans if len(span) >= k]
    if not len(places) or not spans:
        return []
    anchored = _anchored_runs(pair, spans, places) if sum(map(len, spans)) >= _MIN_ANCHORED else []
    if anchored:
        spans = _left_between(spans, anchored, k)
        if not spans:
            return anchored
        inside = [pair.target_hashes[span.start : span.end - k + 1] for span in spans]
        places = Sieve(np.concatenate(inside)).passing(pair.source_hashes, places)
    others = runs_in(pair, spans, places)
    return sorted([*anchored, *others], key=lambda run: run.target)


def _anchored_runs(pair: Pair, spans: Sequence[Span], places: Places) -> list[Match]:
    """Return the runs in the spans that contain an anchor, each at its full length."""
    source, target, k = pair.source, pair.target, pair.k
    bounds = np.array([(span.start, span.end) for span in spans])
    asked, _ = consecutive(bounds[:, 0], bounds[:, 1] - bounds[:, 0] - k + 1)
    targets, sources = _anchors(pair, places, asked)
    if not len(targets):
        return []
    shifts = sources - targets
    # Two anchors with the same shift and at most k apart overlap or touch: all tokens between them are equal.
    # Anchors of different spans are further apart.
    breaks = np.flatnonzero((np.diff(shifts) != 0) | (np.diff(targets) > k))
    heads = np.concatenate(([0], breaks + 1))
    starts, shifts = targets[heads], shifts[heads]
    ends = targets[np.concatenate((breaks, [len(targets) - 1]))] + k
    is_equal = _all_equal(source, target, starts, ends, shifts)
    starts, ends, shifts = starts[is_equal], ends[is_equal], shifts[is_equal]
    homes = bounds[:, 0].searchsorted(starts, side="right") - 1
    starts, ends, shifts = _extended(pair, starts, ends, shifts, bounds[homes])
    matches = list(map(Match, (starts + shifts).tolist(), starts.tolist(), (ends - starts).tolist()))
    if (ends[:-1] <= starts[1:]).all():
        return matches
    runs: list[Match] = []
    for run in matches:
        add_run(runs, run, k)
    return runs


def _extended(
    pair: Pair, starts: Positions, ends: Positions, shifts: Positions, bounds: Positions
) -> tuple[Positions, Positions, Positions]:
    """
    Extend equal stretches within their bounds (N, 2): their first and last k-grams may not be anchors.

    Two stretches with the same shift that meet become one. With different shifts, a stretch can reach at most
    `k` tokens into the next one, because an anchor occurs only once in the source. So this takes linear time.
    """
    source, target, k = pair.source, pair.target, pair.k
    lows, highs = bounds.T.copy()
    is_alike = (np.diff(shifts) == 0) & (bounds[1:, 0] == bounds[:-1, 0])
    room = np.where(is_alike, 0, k)
    highs[:-1] = np.minimum(highs[:-1], starts[1:] + room)
    lows[1:] = np.maximum(lows[1:], ends[:-1] - room)
    after = np.minimum(highs - ends, len(source) - ends - shifts)
    before = np.minimum(starts - lows, starts + shifts)
    ends = ends + _num_equal(source, target, ends, shifts, after)
    # Backwards: both prompts are read from their ends.
    turned = len(source) - len(target) - shifts
    starts = starts - _num_equal(source[::-1], target[::-1], len(target) - starts, turned, before)
    is_first, is_last = np.ones((2, len(starts)), dtype=np.bool_)
    is_first[1:] = is_last[:-1] = ~(is_alike & (ends[:-1] >= starts[1:]))
    return starts[is_first], ends[is_last], shifts[is_first]


def _num_equal(
    source: Ids, target: Ids, positions: Positions, shifts: Positions, room: Positions
) -> Positions:
    """Return how many of the tokens from each target position on equal the source's, at most `room` each."""
    counts = np.zeros(len(positions), dtype=np.int64)
    asked, step = np.flatnonzero(room > 0), _FIRST_STEP
    while len(asked):
        ahead = counts[asked, None] + np.arange(step)
        is_inside = ahead < room[asked, None]
        at = positions[asked, None] + np.where(is_inside, ahead, 0)
        is_equal = (source.take(at + shifts[asked, None]) == target.take(at)) & is_inside
        goes_on = is_equal.all(axis=1)
        counts[asked] += np.where(goes_on, step, is_equal.argmin(axis=1))
        asked, step = asked[goes_on], 2 * step
    return counts


def _anchors(pair: Pair, places: Places, asked: Positions) -> tuple[Positions, Positions]:
    """
    Return which of the ascending target positions `asked` begin an anchor, and its position in the source.

    A hash table holds the last source position of each slot. If there are others, the k-gram occurs several
    times or shares its slot with another one, and is not an anchor.
    """
    # `array.take(indices)` needs a third of the time of `array[indices]`.
    bits = min((_SLOTS_PER_PLACE * len(places)).bit_length(), _MAX_TABLE_BITS)
    slots = low_slots(pair.source_hashes.take(places), bits)
    last = np.full(1 << bits, -1, dtype=np.int32)
    last[slots] = places
    is_shared = np.zeros(1 << bits, dtype=np.bool_)
    is_shared[slots.compress(last.take(slots) != places)] = True
    wanted = pair.target_hashes.take(asked)
    slots = low_slots(wanted, bits)
    sources = last.take(slots)
    is_anchor = (sources >= 0) & ~is_shared.take(slots)
    # Reads index -1 for slots without a source; the line above has excluded them already.
    is_anchor &= pair.source_hashes.take(sources) == wanted
    return asked.compress(is_anchor), sources.compress(is_anchor).astype(np.int64)


def _all_equal(
    source: Ids, target: Ids, starts: Positions, ends: Positions, shifts: Positions
) -> npt.NDArray[np.bool_]:
    """Return whether each stretch of the target equals the source's, token for token."""
    lengths = ends - starts
    firsts = np.cumsum(lengths) - lengths  # where each stretch starts in the concatenation of all
    positions, of = consecutive(starts, lengths)
    same = source.take(positions + shifts.take(of)) == target.take(positions)
    is_equal: npt.NDArray[np.bool_] = np.logical_and.reduceat(same, firsts)
    return is_equal


def _left_between(spans: Sequence[Span], runs: Sequence[Match], k: int) -> list[Span]:
    """Return the parts of the spans, of at least `k` tokens, that no run covers. The spans do not touch."""
    is_left = np.zeros(spans[-1].end, dtype=np.bool_)
    for span in spans:
        is_left[span.start : span.end] = True
    for run in runs:
        is_left[run.target : run.target_end] = False
    return true_spans(is_left, 0, at_least=k)
