"""
All equal stretches of two prompts, however long they are: anchors first, then what is left between them.

An anchor is a k-gram that stands only once in the source: it says where its stretch of the target comes from.
Neighbours that say the same are one run, found for a whole prompt by a few array operations. What has no
anchor, repeated text above all, is left to `runs_in`, which looks at each place.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from delta_tree.edits import Match
from delta_tree.kgrams import Ids, Places, Sieve, low_slots, quick_hashes
from delta_tree.runs import Occurrences, Pair, common_prefix_length, extended_left, runs_in, settle
from delta_tree.spans import Span

Positions = npt.NDArray[np.int64]

# With fewer k-grams to look up, looking at each run is quicker than the array operations.
_MIN_ANCHORED = 4096
_MAX_TABLE_BITS = 22
_SLOTS_PER_PLACE = 4  # a k-gram in one slot with another is no anchor: 1 in 6 or fewer


def common_runs(source: Ids, target: Ids, *, min_run: int) -> list[Match]:
    """
    Equal stretches of at least `min_run` tokens, relocated ones included.

    The runs do not overlap in the target and are sorted by it; the same source tokens may serve
    several. A run ends where the tokens differ, or where its neighbour in the target begins.
    What is left of the target between the runs holds no common stretch of `min_run` tokens.
    """
    if min_run < 1:
        raise ValueError(f"min_run must be at least 1, got {min_run}")
    pair = Pair(source, target, quick_hashes(source, min_run), quick_hashes(target, min_run), min_run)
    places = Sieve(pair.target_hashes).passing(pair.source_hashes)
    return tile(pair, [Span(0, len(target))], places)


def tile(pair: Pair, spans: Sequence[Span], places: Places) -> list[Match]:
    """
    Runs of the source that fill the target positions `spans`, sorted by the target, not overlapping.

    `places` are the source's k-grams that may stand in the spans. What is left of the spans holds no common
    stretch of `k` tokens.
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
    others = runs_in(pair, spans, Occurrences.of(pair.source_hashes, places))
    return sorted([*anchored, *others], key=lambda run: run.target)


def _anchored_runs(pair: Pair, spans: Sequence[Span], places: Places) -> list[Match]:
    """The runs of the spans that hold an anchor, each from end to end."""
    source, target, k = pair.source, pair.target, pair.k
    asked = np.concatenate([np.arange(span.start, span.end - k + 1) for span in spans])
    targets, sources = _anchors(pair, places, asked)
    if not len(targets):
        return []
    shifts = sources - targets
    # Two anchors no more than k apart that moved alike touch: all tokens between them are equal. Those of
    # two spans are further apart.
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
        if left or right:
            run = _grown(run, source, target, spans[home], left=left, right=right)
        _add(runs, run, k)
    return runs


def _anchors(pair: Pair, places: Places, asked: Positions) -> tuple[Positions, Positions]:
    """
    Those of the target's k-grams `asked`, ascending, that are anchors, and each one's place in the source.

    By a table of slots with the first and the last place of each: where they differ, the k-gram stands
    several times, or shares its slot with another one, and is no anchor.
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
    is_anchor &= pair.source_hashes[sources] == wanted  # of -1 too, which is no anchor by the line before
    return asked[is_anchor], sources[is_anchor]


def _all_equal(
    source: Ids, target: Ids, starts: Positions, ends: Positions, shifts: Positions
) -> npt.NDArray[np.bool_]:
    """For each stretch of the target whether it equals the source's, token for token."""
    lengths = ends - starts
    firsts = np.cumsum(lengths) - lengths  # of each stretch, when they are laid end to end
    positions = np.arange(int(lengths.sum())) + np.repeat(starts - firsts, lengths)
    same = source[positions + np.repeat(shifts, lengths)] == target[positions]
    is_equal: npt.NDArray[np.bool_] = np.logical_and.reduceat(same, firsts)
    return is_equal


def _equal_at(source: Ids, target: Ids, positions: Positions, shifts: Positions) -> npt.NDArray[np.bool_]:
    """Whether one token of the target equals the source's; outside of either it does not."""
    others = positions + shifts
    inside = (positions >= 0) & (positions < len(target)) & (others >= 0) & (others < len(source))
    inside[inside] = source[others[inside]] == target[positions[inside]]
    return inside


def _grown(run: Match, source: Ids, target: Ids, within: Span, *, left: bool, right: bool) -> Match:
    """The run with all equal tokens beside it. Its outermost k-grams may have been no anchors."""
    if right:
        ahead = target[run.target + run.length : within.end]
        more = common_prefix_length(source[run.source + run.length :], ahead)
        run = Match(run.source, run.target, run.length + more)
    return extended_left(run, source, target, floor=within.start) if left else run


def _add(runs: list[Match], run: Match, k: int) -> None:
    """Add a run behind the others; where it overlaps the last one, the shorter of the two is cut."""
    while runs and run.target < runs[-1].target + runs[-1].length:
        last = runs[-1]
        if run.target + run.length <= last.target + last.length:
            return
        if run.target <= last.target:
            runs.pop()  # all of it is in this one
            continue
        last, run = settle(last, run, k)
        if last.length:
            runs[-1] = last
            break
        runs.pop()
    if run.length >= k:
        runs.append(run)


def _left_between(spans: Sequence[Span], runs: Sequence[Match], k: int) -> list[Span]:
    """The parts of the spans, of at least `k` tokens, that no run covers. Both are sorted."""
    starts = [run.target for run in runs]
    left: list[Span] = []
    for span in spans:
        at = span.start
        for run in runs[bisect_left(starts, span.start) :]:
            if run.target >= span.end:
                break
            if run.target - at >= k:
                left.append(Span(at, run.target))
            at = run.target + run.length
        if span.end - at >= k:
            left.append(Span(at, span.end))
    return left
