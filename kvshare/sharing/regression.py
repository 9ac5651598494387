"""
Learns what times are made of: non-negative least squares of the relative error, over few observations.

The error is relative to what was measured, so a short prefill counts as much as a long one, and one that was
held up, by anything, counts little. Observations are kept by kind and size, the last ones of each: what is
served most does not push out what is served seldom.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Row = tuple[str, tuple[float, ...], float]  # kind, features, seconds

_WINDOW = 8  # observations of one kind and size
# Of a coefficient's prior, against 1 of an observation: it decides what no observation does.
_PRIOR_WEIGHT = 3e-5
_LITTLE = 0.05  # of what was measured
_AS_EXPECTED = 0.1  # of what was measured; with such an error there is nothing to learn at once


class Regression:
    """Coefficients >= 0 that explain the observed seconds as a sum over features. Not thread-safe."""

    def __init__(self, priors: Sequence[float], *, fixed: Collection[int] = (0,)) -> None:
        """
        `priors`: the coefficients until something is observed; all > 0, as they are also the units.
        `fixed`: the features whose priors are as wrong as each other, whatever is wrong with all others: a
        device that computes a thousand times as fast does not launch a thousand times as fast.
        """
        self._priors = np.asarray(priors, dtype=np.float64)
        is_fixed = np.isin(np.arange(len(self._priors)), list(fixed))
        self._groups = np.array([is_fixed, ~is_fixed], dtype=np.float64)
        self._windows: dict[tuple[str, int], deque[Row]] = {}
        self.coefficients = tuple(float(prior) for prior in self._priors)
        self._num_kept = 0  # observations since the coefficients were found

    def add(self, kind: str, features: Sequence[float], seconds: float) -> bool:
        """
        Returns whether the coefficients are new.

        `kind`: observations of one kind and of about the same time displace each other. Where such ones are
        known and this one took as long as expected, coefficients only follow now and then: requests wait.
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
        """These observations in place of those so far."""
        self._windows.clear()
        for row in rows:
            self._keep(row)
        self._solve()

    def kinds(self) -> frozenset[str]:
        return frozenset(kind for kind, _ in self._windows)

    def _keep(self, row: Row) -> deque[Row]:
        kind, features, _ = row
        # By what it should take: a time that was measured in a bad moment must not open a window of its own.
        size = math.frexp(float(np.dot(self._priors, features)))[1]
        window = self._windows.setdefault((kind, size), deque(maxlen=_WINDOW))
        window.append(row)
        return window

    def _solve(self) -> None:
        """Minimize the errors' squares over shares of the priors, from the factors of each group on."""
        self._num_kept = 0
        rows = self.rows()
        features = np.array([features for _, features, _ in rows]).reshape(-1, len(self._priors))
        scaled = features * self._priors / np.array([[seconds] for _, _, seconds in rows]).reshape(-1, 1)
        # What was not observed is faster or slower with the machine, too.
        factors = self._factors(scaled) if rows else np.ones(len(self._priors))
        scaled *= factors
        shares = _least_squares(scaled, np.full(len(self._priors), _PRIOR_WEIGHT))
        self.coefficients = tuple(float(value) for value in shares * factors * self._priors)

    def _factors(self, scaled: NDArray[np.float64]) -> NDArray[np.float64]:
        """First all priors by one factor, then each group by one of its own, as far as that is observed."""
        predicted = scaled.sum(axis=1)
        factor = predicted.sum() / (predicted @ predicted)
        of_groups = factor * scaled @ self._groups.T
        # A group that should take next to nothing may take any time: its prior must not pull.
        weights = _PRIOR_WEIGHT * np.minimum(1.0, np.square(of_groups).mean(axis=0) / _LITTLE**2)
        found: NDArray[np.float64] = factor * _least_squares(of_groups, weights) @ self._groups
        return found


def _least_squares(scaled: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """
    Shares of the priors, none negative, so that each row's sum is nearly 1. `weights`: of the priors.

    Negative ones are set to 0, one by one.
    """
    matrix = scaled.T @ scaled + np.diag(weights)
    target = scaled.sum(axis=0) + weights
    free = np.flatnonzero(np.diag(matrix))
    shares = np.where(np.diag(matrix) > 0, 0.0, 1.0)
    while free.size:
        found = np.linalg.solve(matrix[np.ix_(free, free)], target[free])
        if found.min() >= 0:
            shares[free] = found
            break
        free = np.delete(free, found.argmin())
    return shares
