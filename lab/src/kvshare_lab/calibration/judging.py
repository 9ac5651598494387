"""
Judges the promise of a calibration on measured plans that its fit has not seen.

Of each plan the arm is shared that repairs least of those that the gate lets pass: windows as the settings
have them, or chosen repairs. An oracle, which knows what each arm deviates by, shares every plan that has an
arm within the limit, and as many others as the risk allows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from kvshare.sharing.calibration import ModelCalibration
from kvshare.sharing.prediction import Shape
from kvshare.sharing.repair import RepairRule
from kvshare.sharing.risk import REGIMES
from kvshare_lab.calibration.risks import upper_share
from kvshare_lab.fidelity.rows import Plan
from kvshare_lab.fidelity.statistics import Floats, Pairs, ratio

_RULES: dict[str, RepairRule] = {
    "default": "windows",
    "kvshare": "attention",
}  # the lab's names: the server's
_FEWEST = 5  # plans of which something is said


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of repairing a plan. `share`: of the prompt's tokens that it repairs; KL in nats."""

    share: float
    kl: float
    expected: float
    bound: float


@dataclass(frozen=True, slots=True)
class Judged:
    """A plan with the arms that a server can choose from."""

    suite: str
    source: str
    regime: str
    arms: tuple[Arm, ...]

    def shared(self, limit: float) -> Arm | None:
        """What the gate shares; None if nothing keeps the limit."""
        passing = (arm for arm in self.arms if arm.bound <= limit)
        return min(passing, key=lambda arm: arm.share, default=None)

    def can_keep(self, limit: float) -> bool:
        return any(arm.kl <= limit for arm in self.arms)


def judged_plans(
    made: Iterable[tuple[Plan, Shape]], calibration: ModelCalibration, *, risk: float
) -> list[Judged]:
    """The plans that have such arms."""
    found = (
        Judged(plan.suite, plan.source, shape.regime, tuple(_arms(plan, shape, calibration, risk)))
        for plan, shape in made
    )
    return [each for each in found if each.arms]


def _arms(plan: Plan, shape: Shape, calibration: ModelCalibration, risk: float) -> Iterator[Arm]:
    for setting, arm in plan.arms.items():
        rule, kl = _RULES.get(setting.rule), arm.get("kl")
        if rule is not None and setting.by == "b" and kl is not None:
            repaired = arm["b"] * shape.num_tokens
            yield Arm(
                share=arm["b"],
                kl=kl,
                expected=calibration.expected(shape, rule, repaired),
                bound=calibration.bound(shape, rule, repaired, risk=risk),
            )


def judgement(plans: Sequence[Judged], *, limit: float, risk: float) -> dict[str, Any]:
    """What is shared and how far it was off: over all, by regime, and by suite."""
    suites = sorted({plan.suite for plan in plans})
    return {
        "limit": limit,
        "risk": risk,
        "all": _judgement(plans, limit, risk),
        "regimes": {
            regime: _judgement([plan for plan in plans if plan.regime == regime], limit, risk)
            for regime in REGIMES
        },
        "suites": {
            suite: _judgement([plan for plan in plans if plan.suite == suite], limit, risk)
            for suite in suites
        },
    }


def _judgement(plans: Sequence[Judged], limit: float, risk: float) -> dict[str, Any]:
    shared = [(plan, arm) for plan in plans if (arm := plan.shared(limit)) is not None]
    possible = min(len(plans), int(sum(plan.can_keep(limit) for plan in plans) / (1 - risk)))
    counts = {"plans": len(plans), "shared": len(shared), "oracle_shares": possible}
    if len(shared) < _FEWEST:
        return counts
    kl, expected = (np.array([getattr(arm, name) for _, arm in shared]) for name in ("kl", "expected"))
    above = int((kl > limit).sum())
    off = ratio(Pairs([plan.source for plan, _ in shared], kl, expected))
    return {
        **counts,
        "above": above,
        "above_upper": round(upper_share(above, len(shared)), 5),
        "repaired": round(float(np.mean([arm.share for _, arm in shared])), 4),
        "found": round(float(kl.mean()), 6),
        "expected": round(float(expected.mean()), 6),
        "found_to_expected": [
            None if each is None else round(each, 4) for each in (off.value, off.low, off.high)
        ],
        "rank_correlation": _rank_correlation(expected, kl),
    }


def _rank_correlation(expected: Floats, kl: Floats) -> float | None:
    """Spearman's; None where all are equal."""
    if min(np.ptp(expected), np.ptp(kl)) == 0:
        return None
    return round(float(spearmanr(expected, kl).statistic), 3)
