"""What limits the plans of a model that becomes known, or changes, while the server runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvshare.embedded.model import EmbeddedModel
from kvshare.settings import load_settings
from kvshare.sharing.calibration import cautious, shipped
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.pipeline import Sharing
from tests.kvshare.sharing.tiny_sharing import FixedNominator, sharing_with

SETTINGS = load_settings()
KNOWN = next(iter(shipped()))


@pytest.fixture
def sharing(model: EmbeddedModel) -> Sharing:
    return sharing_with(FixedNominator(), model)


def test_plans_are_made_for_the_model_that_is_used_last(sharing: Sharing) -> None:
    """Its calibration, its abilities and the size of its KV; nothing of the model before stays."""
    before = sharing.limits
    sharing.use_model(KNOWN, bytes_per_token=7, can_move_keys=False, can_probe=True)
    assert sharing.limits == replace(
        before, calibration=shipped()[KNOWN], can_move_keys=False, can_probe=True
    )
    assert sharing.cost.rates.bytes_per_token == 7
    sharing.use_model("unheard of", bytes_per_token=9, can_move_keys=True, can_probe=False)
    assert sharing.limits == replace(before, calibration=cautious(), can_move_keys=True, can_probe=False)
    assert sharing.cost.rates.bytes_per_token == 9


def test_a_calibration_that_the_settings_name_is_used_for_every_model() -> None:
    """A model that has a calibration of its own does not replace it."""
    named = SETTINGS.sharing.model_copy(update={"calibration": "measured.json"})
    limits = PlannerLimits(sharing=named, repair=SETTINGS.repair)
    assert limits.of_model(KNOWN, can_move_keys=True, can_probe=True).calibration == cautious()


def test_limits_are_not_replaced_from_outside(sharing: Sharing) -> None:
    with pytest.raises(AttributeError):
        sharing.limits = replace(sharing.limits, can_share=False)  # type: ignore[misc]  # it has no setter
