"""The lab's statistics, against cases computed by hand and simulated ones whose answer is known."""

import math

import numpy as np
import pytest

from kvshare_lab.fidelity.statistics import (
    FLOOR,
    Estimate,
    Pairs,
    difference_p,
    holm,
    mean,
    mean_log_ratio,
    ratio,
    wilson,
)


def made_pairs(
    rng: np.random.Generator, num_sources: int, factor: float, *, per_source: int = 2, noise: float = 0.5
) -> Pairs:
    """KL with long tails that sources share; ours is `factor` times theirs, times some noise."""
    sources = np.repeat(np.arange(num_sources), per_source)
    theirs = 0.01 * np.exp(rng.normal(size=num_sources)[sources] + 0.5 * rng.normal(size=len(sources)))
    ours = factor * theirs * np.exp(noise * rng.normal(size=len(sources)) - noise**2 / 2)
    return Pairs([f"s{number}" for number in sources], ours, theirs)


def interval(found: Estimate) -> tuple[float, float]:
    """Of an estimate over several sources, which has one."""
    assert found.low is not None
    assert found.high is not None
    return found.low, found.high


def width(found: Estimate) -> float:
    low, high = interval(found)
    return high - low


def holds(found: Estimate, value: float) -> bool:
    low, high = interval(found)
    return low <= value <= high


def test_a_mean_of_two_sources_has_the_interval_of_their_four_draws() -> None:
    """Sources of 1 and of 3 are drawn as (1, 1), (1, 3), (3, 1), (3, 3): 2.5 % of it is 1, 97.5 % is 3."""
    found = mean(np.array([1.0, 1.0, 3.0, 3.0]), ["a", "a", "b", "b"])
    assert (found.value, found.low, found.high) == (2.0, 1.0, 3.0)


def test_plans_of_one_source_are_drawn_together() -> None:
    """Ten plans of each of twenty sources say no more than one of each; taken as 200 they would."""
    own = np.random.default_rng(1).normal(size=20)
    names = [f"s{number}" for number in range(20)]
    once, often = mean(own, names), mean(np.repeat(own, 10), list(np.repeat(names, 10)))
    apart = mean(np.repeat(own, 10), [str(number) for number in range(200)])
    assert width(often) == pytest.approx(width(once))
    assert width(often) > 2 * width(apart)


def test_a_single_source_has_no_interval_and_no_significance() -> None:
    """However many plans it has."""
    pairs = Pairs(["a"] * 5, np.full(5, 0.1), np.full(5, 0.4))
    assert ratio(pairs).value == pytest.approx(0.25)
    assert (ratio(pairs).low, ratio(pairs).high, mean(pairs.ours, pairs.sources).low) == (None,) * 3
    assert difference_p(pairs) == 1.0
    assert mean_log_ratio([pairs])[1] == 1.0


def test_intervals_of_means_cover_the_truth() -> None:
    """In about 95 % of experiments with 60 sources of three like plans; with percentiles a little less."""
    rng, covered = np.random.default_rng(2), 0
    sources = [f"s{number}" for number in range(60) for _ in range(3)]
    for _ in range(200):
        values = np.repeat(rng.exponential(size=60), 3) + 0.1 * rng.normal(size=180)
        found = mean(values, sources)
        covered += holds(found, 1.0)
    assert 0.90 <= covered / 200 <= 0.98


def test_intervals_over_few_sources_cover_the_truth() -> None:
    """Ten sources: without the expansion some nine in ten intervals hold the mean of a normal law."""
    rng = np.random.default_rng(5)
    found = [mean(rng.normal(size=10), [f"s{number}" for number in range(10)]) for _ in range(400)]
    held = np.mean([holds(one, 0) for one in found])
    assert 0.93 <= held <= 0.98


def test_a_ratio_is_of_means_and_drawn_in_pairs() -> None:
    """Where ours is exactly a third on each plan, the ratio varies with nothing."""
    pairs = made_pairs(np.random.default_rng(3), 40, 1 / 3, noise=0)
    assert [ratio(pairs).value, ratio(pairs).low, ratio(pairs).high] == pytest.approx([1 / 3] * 3)
    uneven = Pairs(["a", "b"], np.array([0.1, 0.5]), np.array([0.2, 1.8]))
    assert ratio(uneven).value == pytest.approx(0.6 / 2.0)


def test_ratios_below_the_instruments_floor_are_one() -> None:
    """Two rules with a KL of rounding errors are alike, and nothing is divided by 0."""
    pairs = Pairs(["a", "b"], np.array([0.0, 1e-12]), np.array([1e-9, -1e-9]))
    assert (ratio(pairs).value, ratio(pairs).low, ratio(pairs).high) == (1.0, 1.0, 1.0)
    assert mean_log_ratio([pairs])[0].value == 0.0
    some = Pairs(["a", "b"], np.array([0.0, 0.0]), np.array([1e-3, 1e-3]))
    assert ratio(some).value == pytest.approx(FLOOR / 1e-3)


def test_a_clear_difference_is_found_in_both_directions() -> None:
    """Also after a correction for a hundred tests."""
    pairs = made_pairs(np.random.default_rng(4), 100, 0.5)
    assert 100 * difference_p(pairs) < 0.05
    assert difference_p(Pairs(pairs.sources, pairs.theirs, pairs.ours)) == difference_p(pairs)
    assert interval(ratio(pairs))[1] < 0.6


def test_no_difference_is_found_as_often_as_chance_allows() -> None:
    """About one in twenty at 5 %, with long tails and plans that come in sources."""
    rng = np.random.default_rng(5)
    found = [difference_p(made_pairs(rng, 60, 1.0, per_source=3)) for _ in range(200)]
    assert 0.01 <= np.mean(np.array(found) < 0.05) <= 0.10


def test_equal_rules_have_a_p_of_one() -> None:
    """The difference is 0 in every draw."""
    pairs = made_pairs(np.random.default_rng(6), 30, 1.0, noise=0)
    assert difference_p(pairs) == 1.0


def test_suites_weigh_the_same_in_the_mean_log_ratio() -> None:
    """A large suite with a quarter and a small one with four times cancel out."""
    rng = np.random.default_rng(7)
    small, large = made_pairs(rng, 10, 4.0, noise=0), made_pairs(rng, 200, 0.25, noise=0)
    found, p = mean_log_ratio([small, large])
    assert found.value == pytest.approx(0.0, abs=1e-9)
    assert p > 0.05
    found, p = mean_log_ratio([large, made_pairs(rng, 20, 0.5)])
    assert found.value == pytest.approx(math.log(0.25) / 2 + math.log(0.5) / 2, abs=0.1)
    assert interval(found)[1] < 0
    assert p < 0.002


def test_a_source_of_two_suites_is_drawn_in_both_at_once() -> None:
    """Two suites of the same sources and values say as much as one: their interval is as wide."""
    pairs = made_pairs(np.random.default_rng(8), 50, 0.7)
    once, twice = mean_log_ratio([pairs])[0], mean_log_ratio([pairs, pairs])[0]
    other = Pairs([f"other {name}" for name in pairs.sources], pairs.ours, pairs.theirs)
    apart = mean_log_ratio([pairs, other])[0]
    assert width(twice) == pytest.approx(width(once))
    assert width(apart) < 0.85 * width(once)


@pytest.mark.parametrize(
    ("given", "adjusted"),
    [
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.5, 0.6], [1.0, 1.0]),
        ([0.02], [0.02]),
        ([], []),
    ],
)
def test_holms_textbook_example(given: list[float], adjusted: list[float]) -> None:
    """4 x .005, 3 x .01, 2 x .03, and .04 no less than the one before it; never above 1."""
    assert holm(given) == pytest.approx(adjusted)


@pytest.mark.parametrize(
    ("number", "total", "low", "high"),
    [
        (0, 10, 0.0, 0.2775328),
        (3, 40, 0.0258360, 0.1986423),
        (7, 7, 0.6456696, 1.0),
        (150, 400, 0.3289571, 0.4234209),
    ],
)
def test_wilsons_interval_is_scipys(number: int, total: int, low: float, high: float) -> None:
    """scipy 1.17's binomtest(...).proportion_ci(method="wilson"); of none and of all plans too."""
    found = wilson(number, total)
    assert (found.value, found.low, found.high) == pytest.approx((number / total, low, high), abs=1e-7)
