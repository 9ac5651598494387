"""Plans under calibrations that say what a test needs."""

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
from tests.kvshare.sharing.prompts import prompt, replaced, stored

SETTINGS = load_settings()
RATES = Rates.linear(prefill_tokens_per_s=1000.0, load_bytes_per_s=2e12, bytes_per_token=1)
LIMIT = SETTINGS.sharing.max_deviation


def judged(nats: float, repaired: float = 0.0) -> Calibration:
    """Every plan is off by so much, and `repaired` decades less with each unit of that feature."""
    weights = (*[0.0] * (len(FEATURES) - 1), -repaired)
    return Calibration(np.log10(nats), weights, (0.0,) * 9, (9.0,) * 9, bias=1.0, spread=0.0)


def limits(
    windows: Calibration, attention: Calibration, *, can_probe: bool = True, rule: str = "auto"
) -> PlannerLimits:
    return PlannerLimits(
        sharing=SETTINGS.sharing,
        repair=SETTINGS.repair.model_copy(update={"rule": rule}),
        calibration=ModelCalibration("m", "f", {"windows": windows, "attention": attention}, longest=9000),
        can_probe=can_probe,
    )


TOKENS = prompt(2000)
EDITED = replaced(TOKENS, (400, 410), (1200, 1210))


def planned(tree: DeltaTree, given: PlannerLimits, tokens: TokenIds = EDITED, *nodes: Node) -> Plan | NoPlan:
    donors = nodes or (stored(tree, TOKENS),)
    return make_plan(tokens, donors, tree.segment, approximate=True, limits=given, rates=RATES)
