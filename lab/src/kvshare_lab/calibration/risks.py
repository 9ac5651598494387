"""
Certifies the tables of `kvshare.sharing.risk` on measured plans: how high the typical deviation of shared
plans may be, so that few of their answers deviate by more than a limit.

A server repairs a plan until its typical deviation is low enough. The measured arms of a plan, from little
to much repair, stand for that: the first arm below a threshold is the one that would be shared. Its typical
deviation is predicted by weights that were fitted without it.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta, binom

from kvshare.sharing.risk import CONFIDENCE, REGIMES, Regime, RiskTable
from kvshare_lab.calibration.arms import Measured

FEWEST_PLANS = 149  # certify a risk of 2 % if none of them exceeds a limit
RISKS = (0.01, 0.02, 0.05, 0.1, 0.2)
LIMITS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.025, 0.035, 0.05, 0.1, 0.2, 0.5)  # nats
_MOST_NEEDED = 5000  # plans; enough for every risk
_THRESHOLDS = 10.0 ** np.arange(-5, -0.3, 0.1)  # of typical deviation, nats

Floats = NDArray[np.float64]


class _Shared(NamedTuple):
    """What a threshold shares: the deviations of plans, and the highest of their typical ones."""

    kl: Floats
    highest: float


def certified(
    arms: Measured, typical: Floats, enough: NDArray[np.bool_] | None = None
) -> dict[Regime, RiskTable]:
    """
    The table of each regime. `typical`: (N,) predictions for each arm by weights that have not seen it.
    `enough`: (N,) which arms repair enough for a server to share them; None: all.
    """
    shareable = np.full(len(arms.kl), True) if enough is None else enough
    return {regime: _table(arms, typical, shareable & (arms.regimes == regime)) for regime in REGIMES}


def _table(arms: Measured, typical: Floats, inside: NDArray[np.bool_]) -> RiskTable:
    shared = [_shared(arms, typical, inside, threshold) for threshold in _THRESHOLDS]
    found = {
        risk: {limit: most for limit in LIMITS if (most := _highest(shared, limit, risk)) is not None}
        for risk in RISKS
    }
    return RiskTable({risk: limits for risk, limits in found.items() if limits})


def _shared(arms: Measured, typical: Floats, inside: NDArray[np.bool_], threshold: float) -> _Shared:
    """The plans that have an arm below the threshold, by the one that repairs least."""
    places = np.flatnonzero(inside & (arms.values[:, -1] > 0) & (typical <= threshold))
    places = places[np.argsort(arms.repaired[places], kind="stable")]
    _, first = np.unique(arms.plans[places], return_index=True)
    chosen = places[first]
    return _Shared(arms.kl[chosen], highest=float(typical[chosen].max(initial=0.0)))


def _highest(shared: Sequence[_Shared], limit: float, risk: float) -> float | None:
    """
    The highest typical deviation up to which all are certified, of plans that were measured.

    Tested from the first threshold on that shares enough plans to be certified if none of them exceeds the
    limit, up to the first that fails. Where there are plans enough to allow for one that exceeds it, a second
    sequence begins there, and both share the error. That does not depend on what plans deviated by.

    None: not even the first threshold keeps the promise.
    """
    most, both = max(len(kl) for kl, _ in shared), (1 + CONFIDENCE) / 2
    starts = [(0, CONFIDENCE)] if most < _enough(1, risk, both) else [(0, both), (1, both)]
    found = (
        _last_kept(shared, limit, risk, enough=_enough(allowed, risk, confidence), confidence=confidence)
        for allowed, confidence in starts
    )
    return max((each for each in found if each is not None), default=None)


def _last_kept(
    shared: Sequence[_Shared], limit: float, risk: float, *, enough: int, confidence: float
) -> float | None:
    last = None
    for kl, highest in shared:
        if len(kl) < enough:
            continue
        if upper_share(int((kl > limit).sum()), len(kl), confidence) > risk:
            break
        last = highest
    return last


@cache
def _enough(num_exceeding: int, risk: float, confidence: float) -> int:
    """The fewest plans that are certified if so many of them exceed the limit."""
    certain = binom.cdf(num_exceeding, np.arange(1, _MOST_NEEDED), risk) <= 1 - confidence
    return 1 + int(certain.argmax())


def upper_share(num_exceeding: int, num: int, confidence: float = CONFIDENCE) -> float:
    """The upper limit of a share of which `num_exceeding` of `num` were found (Clopper and Pearson)."""
    if num_exceeding >= num:
        return 1.0
    return float(beta.ppf(confidence, num_exceeding + 1, num - num_exceeding))


def at_length(arms: Measured, expected: Floats) -> float:
    """
    How many times as far as expected the longest plans are off: the worse of the two longest tenths, at least
    1. `expected`: (N,) mean KL by weights that have not seen the arm.
    """
    served = arms.values[:, -1] > 0
    edges = np.quantile(arms.lengths[served], (0.8, 0.9))
    bins = np.searchsorted(edges, arms.lengths, side="left")  # 2: the longest
    insides = [served & (bins == number) for number in (1, 2)]
    ratios = [arms.kl[inside].mean() / expected[inside].mean() for inside in insides if inside.any()]
    return float(max([1.0, *ratios]))


def promises(tables: Mapping[Regime, RiskTable]) -> Iterator[str]:
    """A line for each regime, for people: what is certified for a risk of 2 %."""
    for regime, table in tables.items():
        limits = table.typical.get(0.02, {})
        said = ", ".join(f"{limit:g} nats up to a typical {most:.2g}" for limit, most in limits.items())
        yield f"{regime}: {said or 'nothing, too few plans or too far off'}"
