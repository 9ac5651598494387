"""
Learns what times are made of: non-negative least squares of the relative error, over few observations.

The error is relative to what was measured, so a short prefill counts as much as a long one, and one that was
held up, by anything, counts little. Observations are kept by kind and size, the last ones of each: what is
served most does not push out what is served seldom.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

Row = tuple[str, tuple[float, ...], float]  # kind, features, seconds

_WINDOW = 8  # observations of one kind and size
# Of a coefficient's prior, against 1 of an observation: it decides what no observation does.
_PRIOR_WEIGHT = 3e-5
_AS_EXPECTED = 0.1  # of what was measured; with such an error there is nothing to learn at once


class Regression:
    """Coefficients >= 0 that explain the observed seconds as a sum over features. Not thread-safe."""

    def __init__(self, priors: Sequence[float]) -> None:
        """`priors`: the coefficients until something is observed; all > 0, as they are also the units."""
        self._priors = np.asarray(priors, dtype=np.float64)
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
        """What `restore` takes: the observations that are kept, of each kind and size from old to new."""
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
        """Minimize the errors' squares over shares of the priors; negative ones are set to 0, one by one."""
        self._num_kept = 0
        rows = self.rows()
        features = np.array([features for _, features, _ in rows]).reshape(-1, len(self._priors))
        scaled = features * self._priors / np.array([[seconds] for _, _, seconds in rows]).reshape(-1, 1)
        # First all priors by one factor: what was not observed is faster or slower with the machine, too.
        predicted = scaled.sum(axis=1)
        factor = predicted.sum() / (predicted @ predicted) if rows else 1.0
        scaled *= factor
        matrix = scaled.T @ scaled + _PRIOR_WEIGHT * np.eye(len(self._priors))
        target = scaled.sum(axis=0) + _PRIOR_WEIGHT
        free = np.arange(len(self._priors))
        shares = np.zeros(len(self._priors))
        while free.size:
            found = np.linalg.solve(matrix[np.ix_(free, free)], target[free])
            if found.min() >= 0:
                shares[free] = found
                break
            free = np.delete(free, found.argmin())
        self.coefficients = tuple(float(value) for value in shares * factor * self._priors)
