"""
Alignment: the edit script from one prompt to another, by token equality alone.

First the common prefix and suffix are split off. Then the middles are aligned by rapidfuzz, which takes
quadratic time. Middles that are too large for it are aligned along their common k-grams, and by rapidfuzz
between those. This is the only file that imports rapidfuzz.
"""

from bisect import bisect_left, bisect_right

from rapidfuzz.distance import Indel

from delta_tree.anchors import common_runs
from delta_tree.edits import EditScript, Match
from delta_tree.runs import common_prefix_length, common_suffix_length
from delta_tree.spans import TokenIds

# Above this many pairs of tokens k-grams are faster than rapidfuzz. For filled forms of 4,000 tokens they
# take 1 ms and rapidfuzz 3 ms; for 8,000 tokens 2 and 29 ms; for 16,000 tokens 5 and 114 ms. Both keep as
# many tokens in runs of 4 and more; in shorter runs rapidfuzz keeps one percent more.
_MAX_PAIRS = 2**24
_ANCHOR_TOKENS = 16  # length of the k-grams to align along; shorter ones are common phrases


def align(source: TokenIds, target: TokenIds, *, min_run: int) -> EditScript:
    """
    Return a short script from `source` to `target` that keeps tokens in their order and moves none.

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
    ends = Match(len(source) - suffix, len(target) - suffix, suffix)
    middle = _middle_matches(source[prefix : ends.source], target[prefix : ends.target], min_run, max_pairs)
    found = [Match(0, 0, prefix), *(match.shifted(prefix, prefix) for match in middle), ends]
    kept = [m for m in found if m.length >= min_run or (m.length and m.source == m.target == 0)]
    return _widened(kept, source, target)


_Chain = tuple[Match, "_Chain | None"]  # a run, and the chain before it


def heaviest_chain(runs: list[Match]) -> list[Match]:
    """
    Return the runs that together keep the most tokens and ascend in both prompts, in O(R log R).

    `runs` is sorted by the target and does not overlap in it.
    """
    # The best chains so far, sorted by their ends in the source; their weights ascend, too. A chain that ends
    # later than another and weighs no more is dropped: no later run can profit from it.
    ends: list[int] = []
    weights: list[int] = []
    chains: list[_Chain] = []
    for run in runs:
        place = bisect_right(ends, run.source)
        weight = run.length + (weights[place - 1] if place else 0)
        chain = (run, chains[place - 1] if place else None)
        place = bisect_left(ends, run.source_end)
        if place and weights[place - 1] >= weight:
            continue
        stop = bisect_right(weights, weight)
        if stop == place and place < len(ends) and ends[place] == run.source_end:
            continue
        ends[place:stop], weights[place:stop], chains[place:stop] = [run.source_end], [weight], [chain]
    backwards: list[Match] = []
    rest = chains[-1] if chains else None
    while rest is not None:
        run, rest = rest
        backwards.append(run)
    return backwards[::-1]


def _middle_matches(
    source: TokenIds, target: TokenIds, min_run: int, max_pairs: int, anchor_tokens: int = _ANCHOR_TOKENS
) -> list[Match]:
    """Return matches of at least `min_run` tokens, ascending in both prompts; some others are empty."""
    if min(len(source), len(target)) < min_run:
        return []
    if len(source) * len(target) <= max_pairs:
        blocks = Indel.opcodes(source.tolist(), target.tolist()).as_matching_blocks()
        return [Match(block.a, block.b, block.size) for block in blocks if block.size >= min_run]
    anchors = heaviest_chain(common_runs(source, target, min_run=max(min_run, anchor_tokens)))
    if min_run >= anchor_tokens:
        return anchors
    matches: list[Match] = []
    at_source = at_target = 0
    for anchor in (*anchors, Match(len(source), len(target), 0)):
        gap_source, gap_target = source[at_source : anchor.source], target[at_target : anchor.target]
        between = _middle_matches(gap_source, gap_target, min_run, max_pairs, anchor_tokens=min_run)
        matches += (match.shifted(at_source, at_target) for match in between)
        matches.append(anchor)
        at_source, at_target = anchor.source_end, anchor.target_end
    return matches


def _widened(matches: list[Match], source: TokenIds, target: TokenIds) -> list[Match]:
    """
    Extend each match by the equal tokens in the gaps next to it, and join those that then touch.

    rapidfuzz may match the edge of a run to equal tokens elsewhere, as a short match. Short matches were
    dropped, so the edge can be added to the run again.
    """
    wide: list[Match] = []
    ends = [*matches, Match(len(source), len(target), 0)][1:]
    at_source = at_target = 0
    for match, following in zip(matches, ends, strict=True):
        before = common_suffix_length(source[at_source : match.source], target[at_target : match.target])
        after = common_prefix_length(
            source[match.source_end : following.source], target[match.target_end : following.target]
        )
        start = match.source - before, match.target - before
        if wide and start == (at_source, at_target):
            last = wide.pop()
            start = last.source, last.target
        at_source, at_target = match.source_end + after, match.target_end + after
        wide.append(Match(*start, at_source - start[0]))
    return wide
