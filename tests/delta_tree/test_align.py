"""Alignment of two prompts."""

import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_tree import (
    EditScript,
    Match,
    align,
    common_prefix_length,
    common_suffix_length,
    token_ids,
)
from delta_tree.align import heaviest_chain, in_order_matches
from tests.delta_tree.fake_prompts import ADVERSARIAL, edited_pairs


@given(edited_pairs(), st.integers(1, 8))
def test_keeps_are_equal_ordered_and_long_enough(pair: tuple[list[int], list[int]], min_run: int) -> None:
    """Keeps ascend, hold equal tokens, and are min_run long unless they are the common prefix."""
    source, target = map(token_ids, pair)
    at_source = at_target = 0
    for keep in align(source, target, min_run=min_run).keeps:
        assert keep.source >= at_source
        assert keep.target >= at_target
        at_source, at_target = keep.source + keep.length, keep.target + keep.length
        assert pair[0][keep.source : at_source] == pair[1][keep.target : at_target]
        assert keep.length >= min_run or keep.source == keep.target == 0


@given(edited_pairs(), st.integers(1, 8))
def test_large_middles_round_trip_too(pair: tuple[list[int], list[int]], min_run: int) -> None:
    """The method for prompts too long for rapidfuzz gives right scripts as well."""
    source, target = map(token_ids, pair)
    keeps = in_order_matches(source, target, min_run=min_run, max_pairs=0)
    assert EditScript.from_keeps(len(source), target, keeps).apply(source).tolist() == pair[1]
    assert all(k.length >= min_run or k.source == k.target == 0 for k in keeps)


@given(edited_pairs())
def test_prefix_and_suffix_lengths(pair: tuple[list[int], list[int]]) -> None:
    """Prefix and suffix lengths are what counting token by token gives."""
    a, b = pair

    def count(pairs: list[tuple[int, int]]) -> int:
        return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))

    ids = token_ids(a), token_ids(b)
    assert common_prefix_length(*ids) == count(list(zip(a, b, strict=False)))
    assert common_suffix_length(*ids) == count(list(zip(a[::-1], b[::-1], strict=False)))


def test_a_form_with_other_slots_keeps_all_but_the_slots() -> None:
    """Filling a form's slots anew replaces the slots and nothing else."""
    form = list(range(1000, 1200))
    filled = [*form[:50], 1, 2, *form[52:120], 3, *form[121:]]
    script = align(token_ids(form), token_ids(filled), min_run=16)
    assert script.keeps == (Match(0, 0, 50), Match(52, 52, 68), Match(121, 121, 79))


def test_short_keeps_are_part_of_the_replace_around_them() -> None:
    """A match shorter than min_run is not kept."""
    source = [*range(20), 500, 501, *range(100, 110), 502, *range(40, 60)]
    target = [*range(20), 600, *range(100, 110), 601, 602, *range(40, 60)]
    script = align(token_ids(source), token_ids(target), min_run=16)
    assert [edit.op.value for edit in script.edits] == ["keep", "replace", "keep"]


def test_a_short_common_prefix_is_kept() -> None:
    """The common prefix is exact reuse, worth having at any length."""
    script = align(token_ids([1, 2, 3]), token_ids([1, 2, 9]), min_run=16)
    assert script.keeps == (Match(0, 0, 2),)


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_equal_prompts_are_one_keep(name: str) -> None:
    """A prompt aligned with itself is kept as a whole."""
    ids = token_ids(ADVERSARIAL[name][0])
    keeps = align(ids, ids, min_run=16).keeps
    assert keeps == ((Match(0, 0, len(ids)),) if len(ids) else ())


def test_min_run_must_be_positive() -> None:
    """A run of no tokens is no run."""
    with pytest.raises(ValueError, match="min_run"):
        align(token_ids([1]), token_ids([1]), min_run=0)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=9),
    st.lists(st.integers(0, 3), min_size=9, max_size=9),
)
def test_heaviest_chain_is_the_heaviest(runs: list[tuple[int, int]], skips: list[int]) -> None:
    """Among all ascending choices of runs, the chain keeps the most tokens."""
    matches: list[Match] = []
    at = 0
    for (source, length), skip in zip(runs, skips, strict=False):
        matches.append(Match(source, at + skip, length))
        at += skip + length
    best = 0
    for mask in range(1 << len(matches)):
        chosen = [match for index, match in enumerate(matches) if mask >> index & 1]
        ordered = all(a.source + a.length <= b.source for a, b in pairwise(chosen))
        best = max(best, sum(m.length for m in chosen)) if ordered else best
    chain = heaviest_chain(matches)
    assert sum(match.length for match in chain) == best
    assert all(a.source + a.length <= b.source for a, b in pairwise(chain))


@pytest.mark.parametrize(
    "make",
    [
        lambda n: np.zeros(n, np.int32),
        lambda n: (np.arange(n) % 7).astype(np.int32),
        lambda n: np.random.default_rng(1).integers(0, 2, n).astype(np.int32),
        lambda n: np.random.default_rng(n).integers(0, 50_000, n).astype(np.int32),
    ],
    ids=["all equal", "periodic", "binary", "foreign"],
)
def test_long_hostile_prompts_do_not_blow_up(make: Callable[[int], np.ndarray]) -> None:
    """50,000 tokens of the worst kind take a fraction of what a quadratic method would."""
    source, target = token_ids(make(50_000)[::-1]), token_ids(make(49_999))
    begin = time.perf_counter()
    script = align(source, target, min_run=16)
    assert time.perf_counter() - begin < 30.0  # about 0.05 s; a quadratic method takes minutes
    assert np.array_equal(script.apply(source), target)


def test_between_anchors_of_long_prompts_short_runs_are_kept() -> None:
    """Prompts too long for rapidfuzz as a whole are aligned by it where they differ, to the token."""
    rng = np.random.default_rng(8)
    source = rng.integers(0, 30_000, 20_000, dtype=np.int32)
    target = np.array(source)
    target[::200] = -1 - target[::200]
    target = np.abs(target)
    target[5::200] = 40_000
    script = align(token_ids(source), token_ids(target), min_run=1)
    assert script.num_kept >= 20_000 - 200
    assert np.array_equal(script.apply(token_ids(source)), target)
