"""
Composes a prompt that is nearly a stored one by comparing tokens at two shifts, without searching for runs.

    donor    [ same ][ x ][ same       ][ y ][ same ]     shift 0 up to some place, then the difference of
    prompt   [ same ][ z ][ same       ][ y y y ][ same ]     the lengths: right for edits in place, and
                                                              for one that changes the length
It is used only where hardly anything else could be copied: no candidate has a k-gram of what is left open,
and those that reach into it would gain few tokens. Then no other composition covers more than 1/64 of
the rest in addition, and the search through all k-grams of all candidates is saved.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from delta_tree.composition import Composition, Copy, DonorReason
from delta_tree.donors import Content, Donor
from delta_tree.edits import Match
from delta_tree.kgrams import Hashes, Ids, Places, Sieve, quick_hashes
from delta_tree.node import Node
from delta_tree.runs import common_prefix_length
from delta_tree.target import Target

_MOSTLY = 1 / 2  # of the prompt: with less in common, runs are searched for
_ABOUT_EQUAL = 63 / 64
_MANY_HITS = 16  # k-grams that are compared token by token
_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class _Compared:
    """
    A candidate's tokens next to the prompt's.

    Shapes:  each of `same`: (T,) whether the prompt has the token that stands `shift` further on there
    """

    node: Node
    shifts: tuple[int, ...]
    same: tuple[_Mask, ...]  # one for each shift
    num_same: int  # after the exact prefix; tokens that are the same at both shifts count twice

    @property
    def is_exact(self) -> bool:
        return self.node.exact_length == self.node.num_tokens


def nearly_one_donor(
    target: Target,
    candidates: Sequence[Node],
    content_of: Callable[[Node], Content],
    *,
    may_move: bool,
) -> Composition | None:
    """
    Return the composition of a prompt that one candidate covers but for what no candidate has; else None.

    Of candidates with about as much of the prompt, one whose KV is all exact is preferred, then the first.
    """
    tokens = target.tokens
    exact_lengths = [common_prefix_length(node.token_ids[: node.exact_length], tokens) for node in candidates]
    start = max(exact_lengths)
    found = _donor_and_runs(target, candidates, start, may_move=may_move)
    if found is None:
        return None
    place, runs = found
    donor = candidates[place]
    holder = donor if exact_lengths[place] == start else candidates[exact_lengths.index(start)]
    taken = [(holder, Match(0, 0, start))] if start else []
    taken += ((donor, run) for run in runs)
    copies: list[Copy] = []
    for node, run in taken:
        content = content_of(node)
        if content.visible is not node.token_ids or content.reason is not DonorReason.BELOW_MIN_RUN:
            return None  # a segment is missing, or too many copies were made of its KV
        copies += Donor(node, 0, tokens, content, may_move=may_move).copies(run)
    return Composition(len(tokens), start, tuple(copies))


def _donor_and_runs(
    target: Target, candidates: Sequence[Node], start: int, *, may_move: bool
) -> tuple[int, list[Match]] | None:
    """Return which candidate to copy from after the exact prefix, if no other has more; and its runs."""
    tokens, k = target.tokens, target.min_run
    if len(tokens) - start < k:
        return 0, []
    compared = [_compare(node, tokens, start, may_move) for node in candidates]
    place = _best(compared)
    best = compared[place]
    if start + best.num_same < _MOSTLY * len(tokens):
        return None
    runs = _runs(best, start, k)
    return None if _may_cover_more(target, compared, runs, start) else (place, runs)


def _compare(node: Node, target: Ids, start: int, may_move: bool) -> _Compared:
    difference = len(node.token_ids) - len(target)
    shifts = (0, difference) if may_move and difference else (0,)
    same = tuple(_same(node.token_ids, target, shift) for shift in shifts)
    return _Compared(node, shifts, same, sum(int(np.count_nonzero(mask[start:])) for mask in same))


def _same(source: Ids, target: Ids, shift: int) -> _Mask:
    same = np.zeros(len(target), dtype=np.bool_)
    low, high = max(0, -shift), min(len(target), len(source) - shift)
    if low < high:
        np.equal(source[low + shift : high + shift], target[low:high], out=same[low:high])
    return same


def _best(compared: Sequence[_Compared]) -> int:
    """Return the place of the candidate that is nearest."""
    most = max(each.num_same for each in compared)
    near = (
        place for place, each in enumerate(compared) if each.is_exact and each.num_same >= _ABOUT_EQUAL * most
    )
    return next(near, next(place for place, each in enumerate(compared) if each.num_same == most))


def _runs(donor: _Compared, start: int, k: int) -> list[Match]:
    """Return the runs of at least `k` tokens: at the first shift up to the best place, then at the second."""
    first, last = donor.same[0][start:], donor.same[-1][start:]
    middle = len(first)
    if len(donor.shifts) > 1:
        before = np.concatenate(([0], np.cumsum(first)))
        after = np.concatenate(([0], np.cumsum(last)))
        middle = int((before - after).argmax())
    parts = [(donor.shifts[0], start, first[:middle]), (donor.shifts[-1], start + middle, last[middle:])]
    return [
        Match(low + at + shift, low + at, high - low)
        for shift, at, same in parts
        for low, high in _true_ranges(same, at_least=k)
    ]


def _may_cover_more(target: Target, compared: Sequence[_Compared], runs: Sequence[Match], start: int) -> bool:
    """Return whether other copies may cover what the runs leave open, but for a few tokens."""
    k, size = target.min_run, len(target.tokens)
    is_closed = np.zeros(size, dtype=np.bool_)
    is_closed[:start] = True
    for run in runs:
        is_closed[run.target : run.target_end] = True
    asked = np.zeros(size - k + 1, dtype=np.bool_)
    for low, high in _true_ranges(~is_closed):
        asked[max(start, low - k + 1) : high] = True
    if not asked.any():
        return False
    # A k-gram that stands in closed text of the prompt is asked for once, as the prompt's own.
    unlike = _unlike(compared, is_closed, k)
    own = _hits(target, asked, target.tokens, target.hashes, np.flatnonzero(~asked))
    others = None if own is None else _hits(target, asked, unlike, quick_hashes(unlike, k))
    if own is None or others is None:
        return True
    is_gained = np.zeros(size, dtype=np.bool_)
    for place in (*own, *others):
        is_open = ~is_closed[place : place + k]
        if is_open.all():
            return True
        is_gained[place : place + k] |= is_open
    return int(np.count_nonzero(is_gained)) > (1 - _ABOUT_EQUAL) * (size - start)


def _unlike(compared: Sequence[_Compared], is_closed: _Mask, k: int) -> Ids:
    """The tokens of all k-grams of the candidates that do not stand in closed text of the prompt, joined."""
    parts: list[Ids] = [np.empty(0, dtype=np.int32)]
    for each in compared:
        tokens = each.node.token_ids
        alike = sorted(
            (low + shift, high + shift - k + 1)
            for shift, same in zip(each.shifts, each.same, strict=True)
            for low, high in _true_ranges(same & is_closed, at_least=k)
        )
        at, end = 0, max(len(tokens) - k + 1, 0)
        for low, high in (*alike, (end, end)):
            if at < low:
                parts.append(tokens[at : low + k - 1])
            at = max(at, high)
    return np.concatenate(parts)


def _hits(
    target: Target, asked: _Mask, tokens: Ids, hashes: Hashes, places: Places | None = None
) -> list[int] | None:
    """Return where the prompt has those k-grams asked for that these tokens have; None if they are many."""
    k, positions = target.min_run, np.flatnonzero(asked)
    wanted = target.hashes[positions]
    passing = Sieve(wanted).passing(hashes, places)
    if not len(passing):
        return []
    known, found = np.sort(wanted), hashes[passing]
    at = np.minimum(known.searchsorted(found), len(known) - 1)
    equal = passing[known[at] == found]
    if len(equal) > _MANY_HITS:
        return None
    return [
        position
        for place in equal.tolist()
        for position in positions[wanted == hashes[place]].tolist()
        if np.array_equal(tokens[place : place + k], target.tokens[position : position + k])
    ]


def _true_ranges(mask: _Mask, *, at_least: int = 1) -> list[list[int]]:
    """The start and the end of each maximal row of so many true values, ascending."""
    edges = np.flatnonzero(mask[1:] != mask[:-1])
    edges += 1
    outer = [0] * bool(len(mask) and mask[0]), [len(mask)] * bool(len(mask) and mask[-1])
    ends = np.concatenate((outer[0], edges, outer[1])).astype(np.int64).reshape(-1, 2)
    found: list[list[int]] = ends[ends[:, 1] - ends[:, 0] >= at_least].tolist()
    return found
