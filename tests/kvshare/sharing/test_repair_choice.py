"""The repair rule: its factors by hand, and what makes it servable."""

import numpy as np

from delta_tree import Span
from kvshare.sharing.plan import MAX_LISTENERS, MAX_RENEWED
from kvshare.sharing.repair_choice import (
    MAX_FURTHER_RUNS,
    chosen,
    highest,
    listeners,
    num_runs,
    probes,
    renewed,
    spans_where,
)


def _nothing(length: int) -> np.ndarray:
    return np.zeros(length, np.bool_)


def test_probes_are_dense_at_the_start_of_each_piece() -> None:
    """Three percent of 200 tokens are six: two rounds over three pieces, the third of which is too short."""
    places = probes([Span(10, 60), Span(80, 150), Span(160, 162)], 200)
    assert places.tolist() == [10, 12, 15, 80, 82, 160]


def test_there_are_at_most_64_probes() -> None:
    assert len(probes([Span(start, start + 90) for start in range(0, 10_000, 100)], 10_000)) == 64


def test_a_prompt_too_short_for_a_probe_has_none() -> None:
    assert probes([Span(0, 20)], 30).tolist() == []


def test_the_last_computed_tokens_listen() -> None:
    computed = _nothing(100)
    computed[[3, 50]] = True
    assert listeners(computed).tolist() == [3, 50]
    computed[40:] = True
    assert listeners(computed).tolist() == list(range(100 - MAX_LISTENERS, 100))


def test_the_highest_scores_are_chosen_as_they_are_while_runs_are_few() -> None:
    places = np.array([3, 90, 40, 41])
    high = _nothing(200).astype(float)
    high[places] = [4.0, 3.0, 2.0, 1.0]
    assert chosen(high, ~_nothing(200), _nothing(200), 3).nonzero()[0].tolist() == [3, 40, 90]


def test_scattered_picks_become_blocks_until_there_are_few_runs() -> None:
    """Every other token is high: 100 single picks would be 100 runs."""
    rows = chosen(np.tile([1.0, 0.9], 200), ~_nothing(400), _nothing(400), 100)
    assert rows.sum() == 100
    assert num_runs(rows) <= MAX_FURTHER_RUNS


def test_what_touches_a_computed_token_is_no_further_run() -> None:
    """Forty computed tokens apart from each other, and the token behind each is the highest."""
    computed = np.isin(np.arange(400), np.arange(0, 400, 10))
    behind = np.isin(np.arange(400), np.arange(1, 400, 10))
    rows = chosen(behind.astype(float), ~computed, computed, 40)
    assert (rows == behind).all()


def test_only_what_is_allowed_is_chosen_and_of_equals_the_first() -> None:
    allowed = np.isin(np.arange(10), [2, 5, 7])
    assert highest(np.ones(10), allowed, 2).nonzero()[0].tolist() == [2, 5]
    assert highest(np.ones(10), allowed, 9).nonzero()[0].tolist() == [2, 5, 7]


def test_listeners_and_what_they_hear_most_are_computed_again() -> None:
    """Tokens 0 to 99 are computed; the last 32 listen, mostly to 10, 20 and 40, and 10 saw nothing stale."""
    computed = np.arange(200) < 100
    attended = np.zeros(200)
    attended[[10, 20, 40]] = [9.0, 5.0, 7.0]
    again = renewed(attended, computed, _nothing(200), first_approximate=15)
    assert again[68:100].all()
    assert again[[20, 40]].all()
    assert not again[:15].any()
    assert again.sum() == MAX_LISTENERS + 68 - 15  # fewer than 64 are left: all of them


def test_at_most_so_many_are_computed_again_in_few_runs() -> None:
    computed = np.arange(1000) < 900
    attended = np.random.default_rng(0).random(1000)
    again = renewed(attended, computed, _nothing(1000), first_approximate=0)
    assert again.sum() == MAX_LISTENERS + MAX_RENEWED
    assert num_runs(again) <= MAX_FURTHER_RUNS + 1


def test_spans_where_are_the_runs_of_true() -> None:
    assert spans_where(np.array([True, True, False, True])) == [Span(0, 2), Span(3, 4)]
