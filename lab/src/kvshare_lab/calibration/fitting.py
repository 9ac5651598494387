"""
Fits the parameters of `kvshare.sharing.prediction` to measured plans of one model.

The weights predict the typical KL of a plan from its shape; bias and slope turn it into the mean. Among plans
with a small typical KL a few have a large one, so one factor would not fit both ends.
"""

from dataclasses import replace
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from kvshare.sharing.prediction import Calibration, Vector
from kvshare_lab.fidelity.statistics import FLOOR

_LEAST_SLOPE = 0.05
_STEPS = 30  # some six are enough
_RIDGE = 3.0


def fit(values: Vector, kl: NDArray[np.float64], groups: NDArray[np.int64]) -> Calibration:
    """
    Fit weights to log10 of measured KL, then bias and slope to its mean.

    The weights come from ridge regression on standardised features. `bias` and `slope` are fitted on
    predictions for left-out groups, as weights fit their own data too well, and only on plans with repairs,
    as others are not served.

    Shapes:  values (N, F), kl (N,), groups (N,): ids of plans that belong together, such as those of one
             document
    """
    unseen = typical_of_unseen(values, kl, groups)
    served = values[:, -1] > 0
    bias, slope = _fit_mean(unseen[served], kl[served])
    return replace(_fit_typical(values, kl), bias=bias, slope=slope)


def typical_of_unseen(
    values: Vector, kl: NDArray[np.float64], groups: NDArray[np.int64]
) -> NDArray[np.float64]:
    """(N,) the typical KL of each plan, by weights fitted without its group; shapes as in `fit`."""
    found = np.zeros(len(groups))
    for group in np.unique(groups):
        inside = groups == group
        found[inside] = _fit_typical(values[~inside], kl[~inside]).typical(values[inside])
    return found


def _fit_typical(values: Vector, kl: NDArray[np.float64]) -> Calibration:
    """
    A calibration without bias and slope. Repairs count for nothing where they seem to make plans worse, as in
    a model whose answers hardly deviate: that is noise.
    """
    low, high = np.percentile(values, (2, 98), axis=0)
    inside, size = np.clip(values, low, high), values.shape[1]
    repaired = inside[:, -1:]
    # Features, and these with repairs.
    inside, target = np.concatenate((inside, inside * repaired), axis=1), np.log10(kl + FLOOR)
    intercept, weights = _ridge(inside, target)
    by_repair = weights[size - 1] + (inside[:, :size] @ weights[size:]) + weights[-1] * repaired[:, 0]
    if by_repair.mean() >= 0:
        intercept, weights = _ridge(inside * (np.arange(2 * size) < size - 1), target)
    return Calibration(
        intercept=intercept,
        weights=tuple(weights[:size].tolist()),
        with_repairs=tuple(weights[size:].tolist()),
        low=tuple(low.tolist()),
        high=tuple(high.tolist()),
        bias=1.0,
        spread=float((target - intercept - inside @ weights).std()),
    )


def _ridge(values: Vector, target: NDArray[np.float64]) -> tuple[float, Vector]:
    """Intercept and weights (F,) of ridge regression on standardised features (N, F)."""
    mean, scale = values.mean(axis=0), values.std(axis=0) + 1e-9
    design, centre = (values - mean) / scale, target.mean()
    solved = np.linalg.solve(
        design.T @ design + _RIDGE * np.eye(design.shape[1]), design.T @ (target - centre)
    )
    weights = solved / scale
    return float(centre - weights @ mean), weights


def _fit_mean(typical: NDArray[np.float64], kl: NDArray[np.float64]) -> tuple[float, float]:
    """
    Bias and slope of the mean: a generalised linear model with a log link and variance in proportion to the
    mean (quasi-Poisson; McCullagh and Nelder, 1989, chapter 9), by iteratively reweighted least squares.

    Least squares of KL would fit the largest values only; of its logarithm, it would not fit the mean.
    """
    design = np.stack((np.ones(len(typical)), np.log(typical)), axis=1)
    found = np.array([np.log(kl.mean() / typical.mean()), 1.0])
    for _ in range(_STEPS):
        linear = design @ found
        mean = np.exp(linear)
        weighed = design.T * mean
        found = np.linalg.solve(weighed @ design, weighed @ (linear + kl / mean - 1))
    bias, slope = float(np.exp(found[0])), float(found[1])
    if isfinite(bias) and _LEAST_SLOPE < slope <= 1:
        return bias, slope
    # In proportion at most. Or the weights do not predict anything: nearly the mean of all plans.
    slope = 1.0 if isfinite(bias) and slope > 1 else _LEAST_SLOPE
    return float(kl.mean() / (typical**slope).mean()), slope
