"""
Alignment: the edit script from one prompt to another, by token equality alone.

First the common prefix and suffix are split off. Then the middles are aligned by rapidfuzz, which takes
quadratic time. Middles that are too large for it are aligned along their common k-grams, and by rapidfuzz
between those. This is the only file that imports rapidfuzz.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from rapidfuzz.distance import Indel

from delta_tree.anchors import common_runs
from delta_tree.edits import EditScript, Match
from delta_tree.runs import common_prefix_length
from delta_tree.spans import TokenIds

# Above this many pairs of tokens k-grams are faster than rapidfuzz. For filled forms of 4,000 tokens they
# take 1 ms and rapidfuzz 3 ms; for 8,000 tokens 2 and 29 ms; for 16,000 tokens 5 and 114 ms. Both keep as
# many tokens in runs of 4 and more; in shorter runs rapidfuzz keeps one percent more.
_MAX_PAIRS = 2**24
_ANCHOR_TOKENS = 16  # length of the k-grams to align along; shorter ones are common phrases


def align(source: TokenIds, target: TokenIds, *, min_run: int) -> EditScript:
    """
    A short script from `source` to `target` that keeps tokens in their order and moves none.

    A keep shorter than `min_run` becomes part of the replace around it. The common prefix is kept at any
    length, because it is exact reuse.
    Shapes:  (S,) and (T,) int32
    """
    return EditScript.from_keeps(len(source), target, in_order_matches(source, target, min_run=min_run))


def in_order_matches(
    source: TokenIds, target: TokenIds, *, min_run: int, max_pairs: int = _MAX_PAIRS
) -> list[Match]:
    """
    The keeps of `align`: ascending in both prompts, adjacent ones joined.

    Middles with more than `max_pairs` pairs of tokens are aligned along their common k-grams of `min_run`
    tokens. If `min_run` is below 16, the k-grams have 16 tokens, and the stretches between two of them are
    aligned like middles.
    """
    if min_run < 1:
        raise ValueError(f"min_run must be at least 1, got {min_run}")
    prefix = common_prefix_length(source, target)
    suffix = common_suffix_length(source[prefix:], target[prefix:])
    middle_source = source[prefix : len(source) - suffix]
    middle_target = target[prefix : len(target) - suffix]
    middle = [
        Match(match.source + prefix, match.target + prefix, match.length)
        for match in _middle_matches(middle_source, middle_target, min_run, max_pairs)
    ]
    ends = Match(len(source) - suffix, len(target) - suffix, suffix)
    found = [Match(0, 0, prefix), *middle, ends]
    kept = [m for m in found if m.length >= min_run or (m.length and m.source == m.target == 0)]
    return _widened(kept, source, target)


def common_suffix_length(a: TokenIds, b: TokenIds) -> int:
    """Number of trailing tokens the two share."""
    return common_prefix_length(a[::-1], b[::-1])


def heaviest_chain(runs: list[Match]) -> list[Match]:
    """The runs that together keep the most tokens and ascend in both prompts, in O(R log R)."""
    # The best chains so far, sorted by their ends in the source; their weights ascend, too. A chain that ends
    # later than another and weighs no more is dropped: no later run can profit from it.
    ends: list[int] = []
    weights: list[int] = []
    last_of: list[int] = []
    previous: list[int] = []
    for index, run in enumerate(runs):
        place = bisect_right(ends, run.source)
        weight = run.length + (weights[place - 1] if place else 0)
        previous.append(last_of[place - 1] if place else -1)
        end = run.source + run.length
        place = bisect_left(ends, end)
        if place and weights[place - 1] >= weight:
            continue
        stop = place
        while stop < len(ends) and weights[stop] <= weight:
            stop += 1
        if stop == place and place < len(ends) and ends[place] == end:
            continue
        ends[place:stop], weights[place:stop] = [end], [weight]
        last_of[place:stop] = [index]
    chain: list[Match] = []
    index = last_of[-1] if last_of else -1
    while index >= 0:
        chain.append(runs[index])
        index = previous[index]
    return chain[::-1]


def _middle_matches(source: TokenIds, target: TokenIds, min_run: int, max_pairs: int) -> list[Match]:
    if min_run >= _ANCHOR_TOKENS or len(source) * len(target) <= max_pairs:
        return _matches(source, target, min_run, max_pairs)
    found: list[Match] = []
    at_source = at_target = 0
    anchors = heaviest_chain(common_runs(source, target, min_run=_ANCHOR_TOKENS))
    for anchor in (*anchors, Match(len(source), len(target), 0)):
        gap_source, gap_target = source[at_source : anchor.source], target[at_target : anchor.target]
        found += [
            Match(match.source + at_source, match.target + at_target, match.length)
            for match in _matches(gap_source, gap_target, min_run, max_pairs)
        ]
        found.append(anchor)
        at_source, at_target = anchor.source + anchor.length, anchor.target + anchor.length
    return found


def _matches(source: TokenIds, target: TokenIds, min_run: int, max_pairs: int) -> list[Match]:
    if min(len(source), len(target)) < min_run:
        return []
    if len(source) * len(target) > max_pairs:
        return heaviest_chain(common_runs(source, target, min_run=min_run))
    blocks = Indel.opcodes(source.tolist(), target.tolist()).as_matching_blocks()
    return [Match(block.a, block.b, block.size) for block in blocks if block.size >= min_run]


def _join(matches: Iterable[Match]) -> list[Match]:
    """Join matches that follow one another without a gap in either prompt."""
    joined: list[Match] = []
    for match in matches:
        if not match.length:
            continue
        last = joined[-1] if joined else Match(0, 0, 0)
        if joined and (last.source + last.length, last.target + last.length) == (match.source, match.target):
            joined[-1] = Match(last.source, last.target, last.length + match.length)
        else:
            joined.append(match)
    return joined


def _widened(matches: list[Match], source: TokenIds, target: TokenIds) -> list[Match]:
    """
    Extend each match by the equal tokens in the gaps beside it.

    rapidfuzz may split the edge of a run off as a short match far from it. That short match was dropped, so
    the edge can be added to the run again.
    """
    wide: list[Match] = []
    ends = [*matches, Match(len(source), len(target), 0)][1:]
    at_source = at_target = 0
    for match, following in zip(matches, ends, strict=True):
        s, t, length = match.source, match.target, match.length
        while s > at_source and t > at_target and source[s - 1] == target[t - 1]:
            s, t, length = s - 1, t - 1, length + 1
        stop_source, stop_target = s + length, t + length
        while (
            stop_source < following.source
            and stop_target < following.target
            and source[stop_source] == target[stop_target]
        ):
            stop_source, stop_target, length = stop_source + 1, stop_target + 1, length + 1
        wide.append(Match(s, t, length))
        at_source, at_target = stop_source, stop_target
    return _join(wide)
