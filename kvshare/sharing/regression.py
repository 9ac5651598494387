"""
Learns what times are made of: non-negative least squares of the relative error, over few observations.

The error is relative to the measured time, so a short prefill counts as much as a long one, and one that was
delayed counts little. The last observations of each kind and size are kept, so that frequent ones do not push
out rare ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Row = tuple[str, tuple[float, ...], float]  # kind, features, seconds

_WINDOW = 8  # observations of one kind and size
# Weight of a coefficient's prior; that of an observation is 1. It decides only what no observation decides.
_PRIOR_WEIGHT = 3e-5
_LITTLE = 0.05  # share of the measured time; the prior of a group that should take less counts less
_AS_EXPECTED = 0.1  # relative error; an observation with a smaller one need not be learned at once


class Regression:
    """Coefficients >= 0 that explain the observed seconds as a sum over features. Not thread-safe."""

    def __init__(self, priors: Sequence[float], *, fixed: Collection[int] = (0,)) -> None:
        """
        `priors`: the coefficients until something is observed; all > 0, because they are also the units.
        `fixed`: features with a common factor between prior and truth; all other features have another one. A
        device that computes a thousand times as fast does not launch a thousand times as fast.
        """
        self._priors = np.asarray(priors, dtype=np.float64)
        is_fixed = np.isin(np.arange(len(self._priors)), list(fixed))
        self._groups = np.array([is_fixed, ~is_fixed], dtype=np.float64)
        self._windows: dict[tuple[str, int], deque[Row]] = {}
        self.coefficients = tuple(float(prior) for prior in self._priors)
        self._num_kept = 0  # observations since the coefficients were computed

    def add(self, kind: str, features: Sequence[float], seconds: float) -> bool:
        """
        Add an observation; return whether the coefficients were computed again.

        `kind`: a new observation displaces an old one of the same kind and about the same size. If enough of
        these are known and it took as long as expected, coefficients are not computed now: requests wait.
        """
        window = self._keep((kind, tuple(map(float, features)), seconds))
        self._num_kept += 1
        error_s = abs(float(np.dot(self.coefficients, features)) - seconds)
        is_expected = len(window) == _WINDOW and error_s <= _AS_EXPECTED * seconds
        if is_expected and self._num_kept < _WINDOW:
            return False
        self._solve()
        return True

    def rows(self) -> list[Row]:
        """Return the kept observations for `restore`, of each kind and size from old to new."""
        return [row for window in self._windows.values() for row in window]

    def check(self, rows: Iterable[Row]) -> None:
        """Raises ValueError for rows that `restore` cannot take."""
        expected = len(self._priors)
        for kind, features, seconds in rows:
            if len(features) != expected:
                raise ValueError(f"has {kind!r} with {len(features)} features, expected {expected}")
            if not any(features) or not seconds > 0:
                raise ValueError(f"has {kind!r} that took {seconds:g} s for nothing")

    def restore(self, rows: Iterable[Row]) -> None:
        """Replace all observations by these."""
        self._windows.clear()
        for row in rows:
            self._keep(row)
        self._solve()

    def kinds(self) -> frozenset[str]:
        return frozenset(kind for kind, _ in self._windows)

    def _keep(self, row: Row) -> deque[Row]:
        kind, features, _ = row
        # By the expected time: one that was measured in a bad moment must not open a window of its own.
        size = math.frexp(float(np.dot(self._priors, features)))[1]
        window = self._windows.setdefault((kind, size), deque(maxlen=_WINDOW))
        window.append(row)
        return window

    def _solve(self) -> None:
        """Scale the priors of each group by its factor, then fit each coefficient by least squares."""
        self._num_kept = 0
        rows = self.rows()
        features = np.array([features for _, features, _ in rows]).reshape(-1, len(self._priors))
        scaled = features * self._priors / np.array([[seconds] for _, _, seconds in rows]).reshape(-1, 1)
        # A machine that is faster than its priors is faster in what was not observed, too.
        factors = self._factors(scaled) if rows else np.ones(len(self._priors))
        scaled *= factors
        shares = _least_squares(scaled, np.full(len(self._priors), _PRIOR_WEIGHT))
        self.coefficients = tuple(float(value) for value in shares * factors * self._priors)

    def _factors(self, scaled: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the factor of each prior: one for all priors, times one for its group, if observed."""
        predicted = scaled.sum(axis=1)
        factor = predicted.sum() / (predicted @ predicted)
        of_groups = factor * scaled @ self._groups.T
        # A group that should take next to nothing may take any time: its prior must not pull.
        weights = _PRIOR_WEIGHT * np.minimum(1.0, np.square(of_groups).mean(axis=0) / _LITTLE**2)
        found: NDArray[np.float64] = factor * _least_squares(of_groups, weights) @ self._groups
        return found


def _least_squares(scaled: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """
    Return non-negative shares of the priors for which each row's sum is nearly 1. `weights`: of the priors.

    Negative shares are set to 0, one by one.
    """
    matrix = scaled.T @ scaled + np.diag(weights)
    target = scaled.sum(axis=0) + weights
    free = np.flatnonzero(np.diag(matrix))
    shares = np.where(np.diag(matrix) > 0, 0.0, 1.0)
    while free.size:
        solution = np.linalg.solve(matrix[np.ix_(free, free)], target[free])
        if solution.min() >= 0:
            shares[free] = solution
            break
        free = np.delete(free, solution.argmin())
    return shares
