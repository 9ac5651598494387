"""
Means, ratios and differences of rules on the same plans, with intervals and tests.

Plans of one source document are alike, so whole sources are drawn again, with all of their plans (cluster
bootstrap). The draws are the same in every call: equal rows give equal intervals. A bootstrap over few
sources varies too little, so intervals and tests are expanded by a factor from Student's t (Hesterberg, "What
Teachers Should Know About the Bootstrap", 2015).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest, t

_RESAMPLES: Final = 2_000  # of an interval
_TEST_RESAMPLES: Final = 10_000  # of a test: Holm's correction over 100 tests needs p far below .05 / 100
_CONFIDENCE: Final = 0.95
_NORMAL: Final = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)
FLOOR: Final = 1e-6  # nats: two equal computations differ by as much
_SEED: Final = 0

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95 % interval; of fewer than two sources there is none."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Two rules' values on the same plans: `ours` and `theirs` (P,), and the source of each plan."""

    sources: Sequence[str]
    ours: Floats
    theirs: Floats

    def __len__(self) -> int:
        return len(self.sources)


def mean(values: Floats, sources: Sequence[str]) -> Estimate:
    """The mean over plans of values (P,)."""
    drawn, num_sources = _drawn_means(values, sources, _RESAMPLES)
    return _estimate(float(np.mean(values)), drawn, num_sources)


def ratio(pairs: Pairs) -> Estimate:
    """Our mean divided by theirs; means below `FLOOR` count as `FLOOR`."""
    sums = _source_sums(pairs.sources, _columns(pairs))
    drawn = _draws(len(sums), _RESAMPLES) @ sums
    return _estimate(float(np.exp(_log_ratio(sums.sum(axis=0)))), np.exp(_log_ratio(drawn)), len(sums))


def difference_p(pairs: Pairs) -> float:
    """
    Two-sided p of the mean difference: how often draws are as far from it as it is from 0. 1 for one source.

    Draws are centred on a true difference of 0. On KL's long tails this holds its level, while counting draws
    beyond 0 finds too many differences and a studentised form almost none.
    """
    differences = pairs.ours - pairs.theirs
    drawn, num_sources = _drawn_means(differences, pairs.sources, _TEST_RESAMPLES)
    return _centred_p(float(np.mean(differences)), drawn, num_sources)


def mean_log_ratio(suites: Sequence[Pairs]) -> tuple[Estimate, float]:
    """
    The log of each suite's ratio of means, averaged over suites with equal weight, and its two-sided p.

    A source of several suites is drawn in all of them at once. A draw without any source of a suite averages
    the others. Means below `FLOOR` count as `FLOOR`.
    """
    names = sorted({source for pairs in suites for source in pairs.sources})
    sums = [_source_sums(pairs.sources, _columns(pairs), names) for pairs in suites]
    value = float(np.mean([_log_ratio(one.sum(axis=0)) for one in sums]))
    draws = _draws(len(names), _RESAMPLES)
    drawn = np.stack([_log_ratio(draws @ one) for one in sums])
    averaged = np.nanmean(drawn[:, ~np.isnan(drawn).all(axis=0)], axis=0)
    return _estimate(value, averaged, len(names)), _centred_p(value, averaged, len(names))


def holm(p_values: Sequence[float]) -> list[float]:
    """p adjusted for the number of tests by Holm's step-down, in the order given."""
    order = np.argsort(p_values, kind="stable")
    multiplied = np.array(p_values)[order] * np.arange(len(p_values), 0, -1)
    adjusted = np.minimum(1.0, np.maximum.accumulate(multiplied))
    return [float(p) for p in adjusted[np.argsort(order)]]


def wilson(number: int, total: int) -> Estimate:
    """A share of plans with Wilson's interval, which is right near 0 and 1; plans count as independent."""
    found = binomtest(number, total).proportion_ci(_CONFIDENCE, method="wilson")
    return Estimate(number / total, float(found.low), float(found.high))


def _columns(pairs: Pairs) -> Floats:
    return np.stack([pairs.ours, pairs.theirs, np.ones_like(pairs.ours)], axis=1)


def _source_sums(sources: Sequence[str], columns: Floats, names: Sequence[str] | None = None) -> Floats:
    """Columns (P, K) summed over each source's plans -> (C, K)."""
    places = {name: place for place, name in enumerate(names or sorted(set(sources)))}
    sums = np.zeros((len(places), columns.shape[1]))
    np.add.at(sums, [places[source] for source in sources], columns)
    return sums


def _drawn_means(values: Floats, sources: Sequence[str], num_resamples: int) -> tuple[Floats, int]:
    """Means of values (P,) in each draw (R,), and the number of sources."""
    sums = _source_sums(sources, np.stack([values, np.ones_like(values)], axis=1))
    drawn = _draws(len(sums), num_resamples) @ sums
    return drawn[:, 0] / drawn[:, 1], len(sums)


@lru_cache(maxsize=4)
def _draws(num_sources: int, num_resamples: int) -> Floats:
    """(R, C) how often each source is drawn."""
    rng = np.random.default_rng(_SEED)
    shares = np.full(num_sources, 1 / num_sources)
    return rng.multinomial(num_sources, shares, size=num_resamples).astype(np.float64)


def _log_ratio(sums: Floats) -> Floats:
    """Sums of ours, theirs and plans (..., 3) -> (...); nan where there is no plan."""
    with np.errstate(invalid="ignore"):
        ours, theirs = (np.maximum(sums[..., column] / sums[..., 2], FLOOR) for column in (0, 1))
    found: Floats = np.log(ours / theirs)
    return found


def _estimate(value: float, drawn: Floats, num_sources: int) -> Estimate:
    if num_sources < 2:
        return Estimate(value, None, None)
    above = NormalDist().cdf(_expansion(num_sources) * _NORMAL)
    low, high = np.quantile(drawn, [1 - above, above])
    return Estimate(value, float(low), float(high))


def _expansion(num_sources: int) -> float:
    """The factor by which a bootstrap's interval over this many sources is too narrow."""
    student = t.ppf((1 + _CONFIDENCE) / 2, num_sources - 1) / _NORMAL
    return float(student * (num_sources / (num_sources - 1)) ** 0.5)


def _centred_p(value: float, drawn: Floats, num_sources: int) -> float:
    """Counts the value itself as a draw, so that p is never 0. 1 for a difference of 0 and for one source."""
    if num_sources < 2:
        return 1.0
    as_far = _expansion(num_sources) * np.abs(drawn - value) >= abs(value)
    return float((1 + as_far.sum()) / (1 + len(drawn)))
