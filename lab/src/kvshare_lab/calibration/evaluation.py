"""Judges a fit on plans that it has not seen: of other source documents, and of suites that were left out."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import gmean

from kvshare_lab.calibration.arms import Measured
from kvshare_lab.calibration.fitting import fit, typical_of_unseen
from kvshare_lab.fidelity.statistics import FLOOR

_EXPECTED = (0.0, 0.001, 0.005, 0.01, 0.02, 0.05, 10.0)  # nats: bins of expected KL


def evaluated(arms: Measured) -> dict[str, Any]:
    """The explained share of the variance, expected and measured means, each suite as others predict it."""
    by_source = typical_of_unseen(arms.values, arms.kl, arms.folds)
    suites, groups = np.unique(arms.suites, return_inverse=True)
    # With a single suite there are no others.
    by_suite = typical_of_unseen(arms.values, arms.kl, groups if len(suites) > 1 else arms.folds)
    fitted = fit(arms.values, arms.kl, arms.folds)
    return {
        "arms": len(arms.kl),
        "explained": {
            "other_sources": _explained(arms.kl, by_source),
            "other_suites": _explained(arms.kl, by_suite),
        },
        "bias": fitted.bias,
        "slope": fitted.slope,
        "means": list(_found_and_expected(arms, fitted.mean_where(by_source))),
        "suites": {
            str(suite): {
                "arms": int(inside.sum()),
                "measured": float(gmean(arms.kl[inside] + FLOOR)),
                "predicted": float(gmean(by_suite[inside] + FLOOR)),
            }
            for number, suite in enumerate(suites)
            for inside in [groups == number]
        },
    }


def _found_and_expected(arms: Measured, expected: NDArray[np.float64]) -> Iterator[dict[str, float]]:
    """Mean KL of the arms that repair anything, found and expected, for each bin of expected KL."""
    served = arms.values[:, -1] > 0
    for low, high in pairwise(_EXPECTED):
        inside = served & (expected >= low) & (expected < high)
        if inside.any():
            means = {"found": float(arms.kl[inside].mean()), "expected": float(expected[inside].mean())}
            yield {"from": low, "to": high, "arms": int(inside.sum()), **means}


def _explained(kl: NDArray[np.float64], predicted: NDArray[np.float64]) -> float:
    """Share of the variance of log10 KL."""
    target = np.log10(kl + FLOOR)
    return float(1 - ((target - np.log10(predicted)) ** 2).mean() / target.var())
