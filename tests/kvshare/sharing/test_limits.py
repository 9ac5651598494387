"""What limits the plans of a model that becomes known, or changes, while the server runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvshare.embedded.model import EmbeddedModel
from kvshare.settings import load_settings
from kvshare.sharing.calibration import OF_EIGHT_BITS, cautious, shipped
from kvshare.sharing.limits import ModelTraits, PlannerLimits
from kvshare.sharing.pipeline import Sharing
from kvshare.sharing.prediction import Shape
from tests.kvshare.sharing.tiny_sharing import FixedNominator, sharing_with

SETTINGS = load_settings()
KNOWN = next(iter(shipped()))


@pytest.fixture
def sharing(model: EmbeddedModel) -> Sharing:
    return sharing_with(FixedNominator(), model)


def test_plans_are_made_for_the_model_that_is_used_last(sharing: Sharing) -> None:
    """Its calibration, its abilities and the size of its KV; nothing of the model before stays."""
    before = sharing.limits
    sharing.use_model(ModelTraits(KNOWN, can_move_keys=False, can_probe=True), bytes_per_token=7)
    assert sharing.limits == replace(
        before, calibration=shipped()[KNOWN], can_move_keys=False, can_probe=True
    )
    assert sharing.cost.rates.bytes_per_token == 7
    sharing.use_model(ModelTraits("unheard of", can_move_keys=True, can_probe=False), bytes_per_token=9)
    assert sharing.limits == replace(before, calibration=cautious(), can_move_keys=True, can_probe=False)
    assert sharing.cost.rates.bytes_per_token == 9


def test_kv_of_eight_bits_is_expected_to_deviate_more(sharing: Sharing) -> None:
    """As long as a model has it; a model that is used again has the factor once."""
    model = ModelTraits(KNOWN, can_move_keys=True, can_probe=True)
    shape = Shape(values=(1.0,) * 8, stale=10.0, far=0.5, num_tokens=500)
    for _ in range(2):
        sharing.use_model(replace(model, has_eight_bits=True), bytes_per_token=4)
        of_eight_bits = sharing.limits.calibration
    sharing.use_model(model, bytes_per_token=7)
    plain = sharing.limits.calibration
    assert plain == shipped()[KNOWN]
    assert of_eight_bits.digest != plain.digest
    expected = OF_EIGHT_BITS * plain.expected(shape, "windows", 5.0)
    assert of_eight_bits.expected(shape, "windows", 5.0) == pytest.approx(expected)
    risk = {"risk": 0.02}
    assert of_eight_bits.bound(shape, "windows", 5.0, **risk) >= plain.bound(shape, "windows", 5.0, **risk)


def test_a_calibration_that_the_settings_name_is_used_for_every_model() -> None:
    """A model that has a calibration of its own does not replace it."""
    named = SETTINGS.sharing.model_copy(update={"calibration": "measured.json"})
    limits = PlannerLimits(sharing=named, repair=SETTINGS.repair)
    assert limits.of_model(ModelTraits(KNOWN, can_move_keys=True, can_probe=True)).calibration == cautious()


def test_limits_are_not_replaced_from_outside(sharing: Sharing) -> None:
    with pytest.raises(AttributeError):
        sharing.limits = replace(sharing.limits, can_share=False)  # type: ignore[misc]  # it has no setter
