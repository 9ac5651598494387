"""What a gate shares of measured plans, how often it was wrong, and what an oracle would have shared."""

import numpy as np
import pytest

from kvshare.sharing.calibration import ModelCalibration
from kvshare.sharing.prediction import FEATURES, Calibration, Shape
from kvshare.sharing.risk import REGIMES, RiskTable
from kvshare_lab.calibration.judging import Arm, Judged, judged_plans, judgement
from kvshare_lab.fidelity.rows import Plan, Setting

LIMIT, RISK = 0.05, 0.02
NOTHING = (0.0,) * len(FEATURES)


def judged(*arms: Arm, suite: str = "rag", source: str = "a", regime: str = "moved") -> Judged:
    return Judged(suite, source, regime, arms)


def arm(share: float, kl: float, bound: float, expected: float = 0.01) -> Arm:
    return Arm(share, kl, expected, bound)


def test_the_smallest_repair_that_the_gate_lets_pass_is_shared() -> None:
    first, second, third = arm(0.1, 0.2, 0.1), arm(0.2, 0.04, 0.05), arm(0.5, 0.01, 0.02)
    assert judged(third, first, second).shared(LIMIT) == second
    assert judged(first).shared(LIMIT) is None


def test_what_was_shared_is_counted_and_bounded() -> None:
    """Two of ten answers above the limit; of ten more plans nothing passes, an oracle shares half."""
    passing = [
        judged(arm(0.1, 0.1 if number < 2 else 0.01, 0.05), source=f"{number}") for number in range(10)
    ]
    others = [judged(arm(0.1, 0.01 * (1 + 9 * (number % 2)), 0.1)) for number in range(10)]
    found = judgement([*passing, *others], limit=LIMIT, risk=RISK)["all"]
    assert (found["plans"], found["shared"], found["above"]) == (20, 10, 2)
    assert found["above_upper"] == pytest.approx(0.5069, abs=1e-4)  # Clopper and Pearson, one-sided 95 %
    assert found["oracle_shares"] == int(13 / 0.98)
    assert (found["found"], found["expected"]) == (pytest.approx(0.028), pytest.approx(0.01))
    value, low, high = found["found_to_expected"]
    assert value == pytest.approx(2.8)
    assert low < value < high


def test_each_regime_and_suite_is_judged_by_itself() -> None:
    plans = [
        judged(arm(0.1, 0.01, 0.05), suite=suite, source=f"{number}", regime=regime)
        for suite, regime, count in (("rag", "composed", 7), ("rag", "moved", 6), ("template", "in_place", 9))
        for number in range(count)
    ]
    found = judgement(plans, limit=LIMIT, risk=RISK)
    assert {regime: each["shared"] for regime, each in found["regimes"].items()} == {
        "in_place": 9,
        "moved": 6,
        "composed": 7,
    }
    assert {suite: each["shared"] for suite, each in found["suites"].items()} == {"rag": 13, "template": 9}


def test_arms_are_judged_by_the_rule_that_a_server_has() -> None:
    """Windows and chosen repairs; rules of others and charged budgets are no arms of a server."""
    by_rule = {
        rule: Calibration(
            intercept=float(np.log10(nats)),
            weights=NOTHING,
            low=NOTHING,
            high=NOTHING,
            bias=1.0,
            spread=0.0,
            risks={regime: RiskTable({RISK: {LIMIT: 0.003}}) for regime in REGIMES},
        )
        for rule, nats in (("windows", 0.002), ("attention", 0.004))
    }
    calibration = ModelCalibration("m", "f", by_rule, longest=1000)  # type: ignore[arg-type]  # names of rules
    measures = {
        Setting("default", "b", 0.0): {"b": 0.05, "kl": 0.01},
        Setting("kvshare", "b", 0.1): {"b": 0.1, "kl": 0.02},
        Setting("kvshare", "charged", 0.1): {"b": 0.02, "kl": 0.03},
        Setting("epic", "b", 0.1): {"b": 0.1, "kl": 0.04},
    }
    shape = Shape((0.0,) * (len(FEATURES) - 1), stale=50.0, far=0.0, num_tokens=500)
    (plan,) = judged_plans([(Plan("rag", "a", {}, measures), shape)], calibration, risk=RISK)
    assert plan.regime == "in_place"
    assert [(each.share, each.kl, each.bound <= LIMIT) for each in plan.arms] == [
        (0.05, 0.01, True),
        (0.1, 0.02, False),
    ]
