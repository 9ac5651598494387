"""Runs found by anchors are what looking at each place finds: equal, apart, and nothing left between them."""

from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_tree import EditScript, Match, Span, align, anchors, common_prefix_length, common_runs, token_ids
from delta_tree.align import in_order_matches
from delta_tree.kgrams import Sieve, quick_hashes
from delta_tree.runs import Pair, add_run, extended_left
from tests.delta_tree.fake_prompts import ADVERSARIAL, edited_pairs
from tests.delta_tree.test_runs import check_runs


@pytest.fixture(autouse=True, scope="module")
def anchors_at_any_length() -> Iterator[None]:
    """Short prompts take the way of the long ones, so that each token can be checked."""
    patch = pytest.MonkeyPatch()
    patch.setattr(anchors, "_MIN_ANCHORED", 0)
    yield
    patch.undo()


@given(edited_pairs(), st.integers(1, 8))
def test_runs_keep_their_promises(pair: tuple[list[int], list[int]], min_run: int) -> None:
    """Runs hold equal tokens, ascend without overlap, and no common stretch lies between them."""
    check_runs(*pair, min_run)


@given(edited_pairs(), st.integers(1, 8))
def test_scripts_round_trip(pair: tuple[list[int], list[int]], min_run: int) -> None:
    """`edits(a, b)` applied to a gives b."""
    source, target = map(token_ids, pair)
    keeps = in_order_matches(source, target, min_run=min_run, max_pairs=0)
    script = EditScript.from_keeps(len(source), target, keeps)
    assert script.apply(source).tolist() == pair[1]
    assert align(source, target, min_run=min_run).apply(source).tolist() == pair[1]


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("min_run", [1, 3, 16])
def test_adversarial_pairs(name: str, min_run: int) -> None:
    """Degenerate and repetitive prompts keep the promises, too."""
    check_runs(*ADVERSARIAL[name], min_run)


def test_equal_hashes_of_other_tokens_are_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every k-gram has the same hash as every other one, the tokens still decide."""
    monkeypatch.setattr(
        anchors, "quick_hashes", lambda ids, k: np.arange(max(len(ids) - k + 1, 0), dtype=np.uint32)
    )
    source, target = list(range(60)), [*range(30), 999, *range(31, 60)]
    for run in common_runs(token_ids(source), token_ids(target), min_run=8):
        assert source[run.source : run.source + run.length] == target[run.target : run.target + run.length]


def extended_one_by_one(
    pair: Pair, starts: np.ndarray, ends: np.ndarray, shifts: np.ndarray, bounds: np.ndarray
) -> list[Match]:
    """What `_extended` does for all stretches at once, and the cuts where two overlap."""
    runs: list[Match] = []
    for start, end, shift, (low, high) in zip(
        starts.tolist(), ends.tolist(), shifts.tolist(), bounds.tolist(), strict=True
    ):
        more = common_prefix_length(pair.source[end + shift :], pair.target[end:high])
        run = Match(start + shift, start, end + more - start)
        add_run(runs, extended_left(run, pair.source, pair.target, floor=low), pair.k)
    return runs


def check_extended(source: list[int], target: list[int], min_run: int, cut: int) -> None:
    """The runs of both, in the two parts of the target before and after `cut`."""
    source_ids, target_ids = token_ids(source), token_ids(target)
    pair = Pair(
        source_ids, target_ids, quick_hashes(source_ids, min_run), quick_hashes(target_ids, min_run), min_run
    )
    parts = (Span(0, cut), Span(min(cut + 1, len(target)), len(target)))
    spans = [part for part in parts if len(part) >= min_run]
    places = Sieve(pair.target_hashes).passing(pair.source_hashes)
    if not spans or not len(places):
        return
    with patch.object(anchors, "_extended", wraps=anchors._extended) as extended:
        found = anchors._anchored_runs(pair, spans, places)
    assert found == (extended_one_by_one(*extended.call_args.args) if extended.called else [])


@given(edited_pairs(), st.integers(1, 8), st.floats(0, 1))
def test_all_runs_at_once_are_those_of_one_after_the_other(
    pair: tuple[list[int], list[int]], min_run: int, cut: float
) -> None:
    """Extended to both sides, joined where they meet, and cut where they overlap."""
    check_extended(*pair, min_run, int(cut * max(0, len(pair[1]) - 1)))


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("min_run", [1, 3, 16])
def test_all_runs_at_once_of_adversarial_pairs(name: str, min_run: int) -> None:
    """Whose tokens are nearly all alike."""
    source, target = ADVERSARIAL[name]
    check_extended(source, target, min_run, max(0, len(target) - 1) // 2)
