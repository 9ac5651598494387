"""Which arms of a plan are measured: those that the gate would share, and no plan that it refuses."""

from dataclasses import replace

import numpy as np
import pytest

from kvshare.sharing.calibration import of_default_model
from kvshare.sharing.prediction import FEATURES, Calibration, Shape
from kvshare.sharing.risk import RiskTable
from measure_composed import SETTINGS, wanted


@pytest.mark.parametrize(("typical", "shares"), [(0.5, (0.35, 0.5)), (2.0, (0.5,)), (9.0, ())])
def test_what_the_gate_refuses_is_not_measured(typical: float, shares: tuple[float, ...]) -> None:
    """A plan's typical deviation, over the highest that is certified: 3.5 times less with half repaired."""
    nothing = (0.0,) * len(FEATURES)
    limits = {SETTINGS.sharing.max_deviation: 0.004}
    shape = Shape(nothing[1:], stale=100.0, far=1.0, num_tokens=800)
    some, half = shape.repaired([0.35 * 800, 0.5 * 800])[:, -1]
    steps = -np.log10(3.5) / (half - some)
    own = Calibration(
        intercept=float(np.log10(typical * 0.004) - steps * some),
        weights=(*nothing[1:], float(steps)),
        low=nothing,
        high=(9.0,) * len(FEATURES),
        bias=1.0,
        spread=0.0,
        risks={"composed": RiskTable({SETTINGS.sharing.max_risk: limits})},
    )
    assert wanted(shape, replace(of_default_model(), composed={"attention": own})) == shares
