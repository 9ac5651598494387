"""Runs found by anchors are what looking at each place finds: equal, apart, and nothing left between them."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_tree import EditScript, align, anchors, common_runs, token_ids
from delta_tree.align import in_order_matches
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
