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

from delta_tree.composition import Composition, Copy, DonorReason
from delta_tree.donors import Content, Donor
from delta_tree.edits import Match
from delta_tree.kgrams import Ids, quick_hashes
from delta_tree.left_open import LeftOpen, Mask
from delta_tree.node import Node
from delta_tree.spans import true_ranges
from delta_tree.target import Target

_MOSTLY = 2 / 3  # of the prompt: with less in common, runs are searched for
_ABOUT_EQUAL = 63 / 64


@dataclass(frozen=True, slots=True, eq=False)
class _Compared:
    """
    A candidate's tokens next to the prompt's.

    Shapes:  each of `same`: (T,) whether the prompt has the token that stands `shift` further on there
    """

    node: Node
    shifts: tuple[int, ...]
    same: tuple[Mask, ...]  # one for each shift
    num_same: int  # after the exact prefix; tokens that are the same at both shifts count twice

    @property
    def is_exact(self) -> bool:
        return self.node.exact_length == self.node.num_tokens


def nearly_one_donor(
    target: Target,
    candidates: Sequence[Node],
    content_of: Callable[[Node], Content],
    exact_lengths: Sequence[int],
    *,
    may_move: bool,
) -> Composition | None:
    """
    Return the composition of a prompt that one candidate covers but for what no candidate has; else None.

    `exact_lengths`: of the candidates, the leading tokens of the prompt for which each has exact KV.
    Of candidates with about as much of the prompt, one whose KV is all exact is preferred, then the first.
    """
    tokens, start = target.tokens, max(exact_lengths)
    donor_and_runs = _donor_and_runs(target, candidates, start, may_move=may_move)
    if donor_and_runs is None:
        return None
    place, runs = donor_and_runs
    donor = candidates[place]
    holder = donor if exact_lengths[place] == start else candidates[exact_lengths.index(start)]
    taken = [(holder, [Match(0, 0, start)] if start else []), (donor, runs)]
    copies: list[Copy] = []
    for node, node_runs in taken:
        content = content_of(node) if node_runs else None
        if content is None:
            continue
        if content.visible is not node.token_ids or content.reason is not DonorReason.BELOW_MIN_RUN:
            return None  # a segment is missing, or too many copies were made of its KV
        source = Donor(node, 0, tokens, content, may_move=may_move)
        copies += (copy for run in node_runs for copy in source.copies(run))
    return Composition(len(tokens), start, tuple(copies))


def _donor_and_runs(
    target: Target, candidates: Sequence[Node], start: int, *, may_move: bool
) -> tuple[int, list[Match]] | None:
    """Return which candidate to copy from after the exact prefix, if no other has more; and its runs."""
    if len(target.tokens) - start < target.min_run:
        return 0, []
    compared = [_compare(node, target.tokens, start, may_move) for node in candidates]
    place = _best(compared)
    best = compared[place]
    if start + best.num_same < _MOSTLY * len(target.tokens):
        return None
    runs = _runs(best, start, target.min_run)
    rest = LeftOpen(target, runs, start)
    # A k-gram that stands in closed text of the prompt is asked for once, as the prompt's own.
    if rest.may_gain(target.tokens, target.hashes, rest.closed_kgrams):
        return None
    unlike = _unlike(compared, rest.is_closed, target.min_run)
    return None if rest.may_gain(unlike, quick_hashes(unlike, target.min_run)) else (place, runs)


def _compare(node: Node, target: Ids, start: int, may_move: bool) -> _Compared:
    difference = len(node.token_ids) - len(target)
    shifts = (0, difference) if may_move and difference else (0,)
    same = tuple(_same(node.token_ids, target, shift) for shift in shifts)
    return _Compared(node, shifts, same, sum(int(np.count_nonzero(mask[start:])) for mask in same))


def _same(source: Ids, target: Ids, shift: int) -> Mask:
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
        for low, high in true_ranges(same, at_least=k).tolist()
    ]


def _unlike(compared: Sequence[_Compared], is_closed: Mask, k: int) -> Ids:
    """Return the tokens of all k-grams of the candidates outside closed text of the prompt, joined."""
    shifts = np.array([shift for each in compared for shift in each.shifts])
    owners = [number for number, each in enumerate(compared) for _ in each.shifts]
    # All rows as one, each with a false value at its end: a few calls in all, and not for each candidate.
    rows = np.zeros((len(shifts), len(is_closed) + 1), dtype=np.bool_)
    np.logical_and([mask for each in compared for mask in each.same], is_closed, out=rows[:, :-1])
    ranges = true_ranges(rows.ravel(), at_least=k)
    numbers = ranges[:, 0] // rows.shape[1]
    ranges += (shifts[numbers] - numbers * rows.shape[1])[:, None]
    alike: list[list[tuple[int, int]]] = [[] for _ in compared]
    for number, low, high in zip(numbers.tolist(), *ranges.T.tolist(), strict=True):
        alike[owners[number]].append((low, high - k + 1))
    parts: list[Ids] = [np.empty(0, dtype=np.int32)]
    for each, equal_spans in zip(compared, alike, strict=True):
        tokens, at = each.node.token_ids, 0
        end = max(len(tokens) - k + 1, 0)
        for low, high in (*sorted(equal_spans), (end, end)):
            if at < low:
                parts.append(tokens[at : low + k - 1])
            at = max(at, high)
    return np.concatenate(parts)
