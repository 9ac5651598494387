"""Plans under calibrations that say what a test needs. The mean is limited unless a risk is given."""

from dataclasses import replace

import numpy as np

from delta_tree import (
    DeltaTree,
    Node,
    TokenIds,
)
from kvshare.settings import load_settings
from kvshare.sharing.calibration import ModelCalibration
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.planner import make_plan
from kvshare.sharing.prediction import FEATURES, Calibration
from kvshare.sharing.rates import Rates
from kvshare.sharing.risk import REGIMES, Regime, RiskTable
from tests.kvshare.sharing.prompts import prompt, replaced, stored

SETTINGS = load_settings()
RATES = Rates.linear(prefill_tokens_per_s=1000.0, load_bytes_per_s=2e12, bytes_per_token=1)
LIMIT = SETTINGS.sharing.max_deviation


def judged(nats: float, repaired: float = 0.0) -> Calibration:
    """Every plan is off by so much, and `repaired` decades less with each unit of that feature."""
    weights = (*[0.0] * (len(FEATURES) - 1), -repaired)
    return Calibration(np.log10(nats), weights, (0.0,) * 9, (9.0,) * 9, bias=1.0, spread=0.0)


def certified(
    calibration: Calibration, *, most: float, limit: float = LIMIT, regimes: tuple[Regime, ...] = REGIMES
) -> Calibration:
    """At a risk of 2 %, plans of these regimes up to a typical deviation of `most` keep `limit`."""
    tables = {regime: RiskTable({0.02: {limit: most}} if regime in regimes else {}) for regime in REGIMES}
    return replace(calibration, risks=tables)


def limits(
    windows: Calibration,
    attention: Calibration,
    *,
    can_probe: bool = True,
    rule: str = "auto",
    max_risk: float = 1.0,
) -> PlannerLimits:
    return PlannerLimits(
        sharing=SETTINGS.sharing.model_copy(update={"max_risk": max_risk}),
        repair=SETTINGS.repair.model_copy(update={"rule": rule}),
        calibration=ModelCalibration("m", "f", {"windows": windows, "attention": attention}, longest=9000),
        can_probe=can_probe,
    )


TOKENS = prompt(2000)
EDITED = replaced(TOKENS, (400, 410), (1200, 1210))


def planned(tree: DeltaTree, given: PlannerLimits, tokens: TokenIds = EDITED, *nodes: Node) -> Plan | NoPlan:
    donors = nodes or (stored(tree, TOKENS),)
    return make_plan(tokens, donors, tree.segment, approximate=True, limits=given, rates=RATES)
