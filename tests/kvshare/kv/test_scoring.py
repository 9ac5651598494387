"""Scores of copied tokens: their factors by hand."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from delta_tree import Span
from kvshare.kv.scoring import Scoring
from kvshare.sharing.repair_choice import repairable


def scores(
    stretches: Sequence[Span],
    attended: NDArray[np.float64],
    places: Sequence[int],
    changed: NDArray[np.float64],
) -> NDArray[np.float32]:
    """(T,)"""
    weights = repairable(stretches, attended.shape[1])
    scoring = Scoring(stretches, places, weights, device=torch.device("cpu"))
    found = scoring.scores(torch.tensor(attended).float(), torch.tensor(changed).float())
    return np.asarray(found.numpy())


def test_twice_the_attention_counts_by_its_root() -> None:
    attended = np.ones((1, 200))
    attended[0, 1] = 4.0
    found = scores([Span(0, 2)], attended, [0], np.array([[1.0]]))
    assert found[1] / found[0] == pytest.approx(2 * (0.3 + 0.7 * np.exp(-1 / 32)), rel=1e-5)
    assert not found[2:].any()


def test_layers_add_up() -> None:
    """Attention 1 and 4 in two layers, changes 3 and 5: 1 x 3 + 2 x 5."""
    attended = np.array([[1.0], [4.0]])
    found = scores([Span(0, 1)], attended, [0], np.array([[3.0], [5.0]]))
    assert found.tolist() == pytest.approx([13.0], rel=1e-5)


def test_changes_are_interpolated_within_a_piece() -> None:
    """In the logarithm; a piece without a probe gets the geometric mean of all."""
    found = scores([Span(0, 5), Span(6, 8)], np.ones((1, 10)), [0, 4], np.array([[1.0, 0.01]]))
    falling = 0.3 + 0.7 * np.exp(-np.arange(5) / 32)
    assert found[:5] == pytest.approx(falling * [1.0, 10**-0.5, 0.1, 10**-1.5, 0.01], rel=1e-3)
    assert found[6:8] == pytest.approx(falling[:2] * 0.1, rel=1e-3)
    assert found[[5, 8, 9]].tolist() == [0.0, 0.0, 0.0]


def test_a_token_far_from_the_start_of_its_piece_is_less_mendable() -> None:
    found = scores([Span(2, 402)], np.ones((1, 410)), [2], np.array([[1.0]]))
    assert found[34] / found[2] == pytest.approx(0.3 + 0.7 / np.e)
    assert found[401] / found[2] == pytest.approx(0.3, abs=1e-4)


def test_without_any_probe_attention_and_place_decide() -> None:
    found = scores([Span(0, 3)], np.array([[1.0, 9.0, 1.0]]), [], np.empty((1, 0)))
    assert np.isfinite(found).all()
    assert found.argmax() == 1


@pytest.mark.parametrize("seed", range(20))
def test_scores_are_those_of_the_formula(seed: int) -> None:
    """Written with `np.interp`, in float64, for stretches with no probe, one, and some that begin late."""
    rng = np.random.default_rng(seed)
    bounds = np.sort(rng.choice(np.arange(1, 400), 8, replace=False))
    stretches = [Span(int(a), int(b)) for a, b in bounds.reshape(-1, 2)]
    inside = np.concatenate([np.arange(span.start, span.end) for span in stretches])
    places = np.sort(rng.choice(inside, min(len(inside), int(rng.integers(1, 9))), replace=False))
    attended, changed = rng.random((3, 420)) ** 4, rng.random((3, len(places)))
    expected = np.zeros(420)
    for span in stretches:
        own = (places >= span.start) & (places < span.end)
        at = np.arange(span.start, span.end)
        for layer in range(3):
            logs = np.log(changed[layer] + 1e-6)
            change = np.interp(at, places[own], logs[own]) if own.any() else np.full(len(at), logs.mean())
            expected[at] += np.sqrt(attended[layer, at]) * np.exp(change)
        expected[at] *= 0.3 + 0.7 * np.exp(-np.arange(len(at)) / 32)
    found = scores(stretches, attended, places.tolist(), changed)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-7)
