"""A fit finds the weights that made the measured plans, and their mean."""

from dataclasses import replace

import numpy as np
import pytest

from kvshare.sharing.prediction import FEATURES, Calibration
from kvshare_lab.calibration.fitting import fit


def drawn(count: int = 400) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features at random, KL that falls with the third and rises with the first, groups without a meaning."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(count, len(FEATURES)))
    kl = 10 ** (-3 + 0.5 * values[:, 0] - 0.8 * values[:, 2] + 0.1 * rng.normal(size=count))
    return values, kl, np.arange(count) % 5


def test_a_fit_finds_the_weights() -> None:
    values, kl, groups = drawn()
    found = fit(values, kl, groups)
    assert found.weights[0] == pytest.approx(0.5, abs=0.03)
    assert found.weights[2] == pytest.approx(-0.8, abs=0.03)
    assert found.spread == pytest.approx(0.1, abs=0.05)
    assert np.corrcoef(np.log10(found.typical(values)), np.log10(kl))[0, 1] > 0.98


def test_the_expected_mean_is_the_measured_one() -> None:
    """Of plans that repair anything, which are those that are served."""
    values, kl, groups = drawn()
    kl[values[:, -1] <= 0] *= 1 + 0.2 * np.random.default_rng(1).random((values[:, -1] <= 0).sum())
    found, served = fit(values, kl, groups), values[:, -1] > 0
    assert found.expected(values[served]).mean() == pytest.approx(kl[served].mean(), rel=0.03)
    assert found.slope == pytest.approx(1, abs=0.15)


def test_a_mean_is_expected_where_few_plans_make_it_and_where_they_do_not() -> None:
    """Little is off typically, sometimes much; or much is off, always alike: one factor does not fit both."""
    rng = np.random.default_rng(2)
    values = rng.uniform(size=(20_000, len(FEATURES)))
    spread = 0.9 - 0.7 * values[:, 0]
    kl = 10 ** (-4 + 3 * values[:, 0] + spread * rng.normal(size=len(values)))
    found = fit(values, kl, np.arange(len(values)) % 5)
    low, high = (found.expected(values[part]).mean() / kl[part].mean() for part in _ends(values[:, 0]))
    assert 0.7 < low < 1.4
    assert 0.7 < high < 1.4
    one = replace(found, bias=float(kl.mean() / found.typical(values).mean()), slope=1.0)
    assert one.expected(values[_ends(values[:, 0])[0]]).mean() < 0.5 * kl[_ends(values[:, 0])[0]].mean()
    assert found.slope < 0.9


def _ends(column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return column < 0.2, column > 0.8


def test_bias_and_slope_are_those_of_groups_that_were_not_seen() -> None:
    """Groups have a level of their own, by chance: of what it has seen a fit is too sure."""
    rng = np.random.default_rng(3)
    groups = np.repeat(np.arange(10), 20)
    values = rng.normal(size=(10, len(FEATURES)))[groups] + 0.01 * rng.normal(size=(200, len(FEATURES)))
    values[:, -1] = np.abs(values[:, -1])
    kl = 10 ** (-3 + rng.normal(size=10)[groups])  # chance alone
    assert fit(values, kl, groups).slope < 0.3 < 0.8 < fit(values, kl, np.arange(200) % 10).slope


def test_features_that_tell_nothing_make_a_calibration_that_servers_read() -> None:
    """A user's model behind hours of measuring: the mean of all, and no file that is refused."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        values, kl = rng.normal(size=(120, len(FEATURES))), 10 ** rng.normal(-3, 1, size=120)
        found = fit(values, kl, np.arange(120) % 5)
        assert Calibration.from_document(found.as_document()) == found
        served = values[:, -1] > 0
        assert found.expected(values[served]).mean() == pytest.approx(kl[served].mean(), rel=0.5)
