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
from delta_tree.runs import Pair, add_run, common_prefix_length, extended_left, runs_in
from delta_tree.spans import Span, true_spans

Positions = npt.NDArray[np.int64]

# With fewer k-grams to look up, `runs_in` alone is faster than the array operations.
_MIN_ANCHORED = 4096
_MAX_TABLE_BITS = 22
_SLOTS_PER_PLACE = 4  # k-grams that share a slot are not used as anchors: at most 1 in 6 is lost


def common_runs(source: Ids, target: Ids, *, min_run: int) -> list[Match]:
    """
    Equal stretches of at least `min_run` tokens, at any position in the two prompts.

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
    Runs of the source that fill the target positions `spans`, sorted by the target, not overlapping.

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
    asked = np.concatenate([np.arange(span.start, span.end - k + 1) for span in spans])
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
    homes = np.searchsorted([span.start for span in spans], starts, side="right") - 1
    lows, highs = np.array([(span.start, span.end) for span in spans])[homes].T
    grows_left = (starts > lows) & _equal_at(source, target, starts - 1, shifts)
    grows_right = (ends < highs) & _equal_at(source, target, ends, shifts)
    columns = (starts, ends, shifts, homes, grows_left, grows_right)
    runs: list[Match] = []
    for start, end, shift, home, left, right in zip(*(column.tolist() for column in columns), strict=True):
        run = Match(start + shift, start, end - start)
        within = spans[home]
        if right:  # the run's last k-grams may not be anchors
            ahead = target[run.target_end : within.end]
            more = common_prefix_length(source[run.source_end :], ahead)
            run = Match(run.source, run.target, run.length + more)
        if left:
            run = extended_left(run, source, target, floor=within.start)
        add_run(runs, run, k)
    return runs


def _anchors(pair: Pair, places: Places, asked: Positions) -> tuple[Positions, Positions]:
    """
    Return which of the ascending target positions `asked` begin an anchor, and its position in the source.

    A hash table holds the first and the last source position of each slot. Where the two differ, the k-gram
    occurs several times or shares its slot with another one, and is not an anchor.
    """
    bits = min((_SLOTS_PER_PLACE * len(places)).bit_length(), _MAX_TABLE_BITS)
    slots = low_slots(pair.source_hashes[places], bits)
    first, last = np.full((2, 1 << bits), -1, dtype=np.int32)
    last[slots] = places
    first[slots[::-1]] = places[::-1]
    wanted = pair.target_hashes[asked]
    slots = low_slots(wanted, bits)
    sources = last[slots].astype(np.int64)
    is_anchor = (sources >= 0) & (first[slots] == sources)
    is_anchor &= pair.source_hashes[sources] == wanted  # also reads index -1, which the line before excludes
    return asked[is_anchor], sources[is_anchor]


def _all_equal(
    source: Ids, target: Ids, starts: Positions, ends: Positions, shifts: Positions
) -> npt.NDArray[np.bool_]:
    """Return whether each stretch of the target equals the source's, token for token."""
    lengths = ends - starts
    firsts = np.cumsum(lengths) - lengths  # where each stretch starts in the concatenation of all
    positions = np.arange(int(lengths.sum())) + np.repeat(starts - firsts, lengths)
    same = source[positions + np.repeat(shifts, lengths)] == target[positions]
    is_equal: npt.NDArray[np.bool_] = np.logical_and.reduceat(same, firsts)
    return is_equal


def _equal_at(source: Ids, target: Ids, positions: Positions, shifts: Positions) -> npt.NDArray[np.bool_]:
    """Compare the token at each target position with the source's; False outside of either prompt."""
    others = positions + shifts
    inside = (positions >= 0) & (positions < len(target)) & (others >= 0) & (others < len(source))
    inside[inside] = source[others[inside]] == target[positions[inside]]
    return inside


def _left_between(spans: Sequence[Span], runs: Sequence[Match], k: int) -> list[Span]:
    """The parts of the spans, of at least `k` tokens, that no run covers. The spans do not touch."""
    is_left = np.zeros(spans[-1].end, dtype=np.bool_)
    for span in spans:
        is_left[span.start : span.end] = True
    for run in runs:
        is_left[run.target : run.target_end] = False
    return [part for part in true_spans(is_left, 0) if len(part) >= k]
