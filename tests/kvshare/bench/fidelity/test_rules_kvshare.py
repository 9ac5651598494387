"""Our own rule: its three factors by hand, and what makes it servable."""

import numpy as np
import pytest

from delta_tree import Span
from kvshare.bench.fidelity.rules import RULES
from kvshare.bench.fidelity.rules.base import num_wanted, pieces
from kvshare.bench.fidelity.rules.kvshare import between, chosen, heard, mendable, probes
from kvshare.bench.fidelity.trial import num_runs
from tests.kvshare.bench.fidelity.scenes import SCENES, trial

scenes = pytest.mark.parametrize("scene", sorted(SCENES))


def test_probes_are_dense_at_the_start_of_each_piece() -> None:
    """Three percent of 200 tokens are six: two rounds over three pieces, the third of which is too short."""
    rows = probes([Span(10, 60), Span(80, 150), Span(160, 162)], 200)
    assert rows.nonzero()[0].tolist() == [10, 12, 15, 80, 82, 160]


def test_there_are_at_most_64_probes() -> None:
    rows = probes([Span(start, start + 90) for start in range(0, 10_000, 100)], 10_000)
    assert rows.sum() == 64


def test_what_is_heard_through_a_computed_row_counts_less() -> None:
    """
    Rows 2 and 3 are computed. In the upper layer the last row attends to row 2 with 0.5; in the lower one
    row 2 attends to slot 0 with 0.8. So slot 0 reaches the last row with 0.2 x 0.5 x 0.8, beside its own 0.1.
    """
    attention = np.zeros((2, 2, 4))
    attention[1, 1, 2] = 0.5
    attention[0, 0, 0] = 0.8
    attention[0, 1, 0] = 0.1
    found = heard(attention, np.array([2, 3]))
    assert found[1].tolist() == [0.0, 0.0, 0.5, 0.0]
    assert found[0, 0] == pytest.approx(0.1 + 0.2 * 0.5 * 0.8)


def test_changes_are_interpolated_within_a_piece() -> None:
    """In the logarithm; a piece without a probe gets the geometric mean of all."""
    found = between([Span(0, 5), Span(6, 8)], np.array([0, 4]), np.array([[1.0, 0.01]]), 10)
    assert found[0, :5] == pytest.approx([1.0, 10**-0.5, 0.1, 10**-1.5, 0.01], rel=1e-3)
    assert found[0, 6:8] == pytest.approx([0.1, 0.1], rel=1e-3)
    assert found[0, [5, 8, 9]].tolist() == [0.0, 0.0, 0.0]


def test_a_token_far_from_the_start_of_its_piece_is_less_mendable() -> None:
    found = mendable([Span(2, 402)], 410)
    assert found[2] == 1.0
    assert found[34] == pytest.approx(0.3 + 0.7 / np.e)
    assert found[401] == pytest.approx(0.3, abs=1e-4)
    assert found[:2].tolist() == [0.0, 0.0]


def test_scattered_picks_become_blocks_until_there_are_few_runs() -> None:
    """Every other token is high: 100 single picks would be 100 runs."""
    scores = np.tile([1.0, 0.9], 200)
    nothing = np.zeros(400, np.bool_)
    rows = chosen(scores, ~nothing, nothing, 100, starts=nothing)
    assert rows.sum() == 100
    assert num_runs(rows) <= 32


def test_starts_are_taken_unless_they_are_too_many() -> None:
    """Ten starts leave room for as many high scores; with forty there would be forty runs."""
    scores, nothing = np.arange(400.0), np.zeros(400, np.bool_)
    few, many = (np.isin(np.arange(400), np.arange(0, 10 * number, 10)) for number in (10, 40))
    taken = chosen(scores, ~nothing, nothing, 20, starts=few)
    assert taken.nonzero()[0].tolist() == [*range(0, 100, 10), *range(390, 400)]
    assert chosen(scores, ~nothing, nothing, 50, starts=many).nonzero()[0].tolist() == [*range(350, 400)]


@scenes
@pytest.mark.parametrize("budget", [0.05, 0.1, 0.2, 0.5])
def test_it_can_be_served(scene: str, budget: float) -> None:
    """One set of positions for all layers, few runs, few probes; the whole budget is spent."""
    made, rule = trial(scene), RULES["kvshare"]
    selection = rule.choose(made, budget)
    assert selection.rows.shape == (made.num_tokens,)
    assert selection.rows.sum() == num_wanted(made, budget)
    assert not (selection.rows & ~made.copied).any()
    assert made.run(selection, forced=False).runs <= 32
    probed = probes(pieces(made), made.num_tokens)
    assert probed.sum() <= min(64, 0.03 * made.num_tokens)
    assert selection.probe == (made.base | probed).sum() * made.num_layers
