"""Which calibration a model gets: its own, a named one, or the default model's with caution."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from delta_tree import Copy, NodeId, SegmentId
from kvshare.chat_model import NAME as CHAT_MODEL
from kvshare.errors import ConfigError
from kvshare.sharing.calibration import (
    FOLDER,
    RULES,
    ModelCalibration,
    calibration_of,
    cautious,
    log_calibration,
    of_default_model,
    read_calibration,
    shipped,
)
from kvshare.sharing.placed import placed
from kvshare.sharing.prediction import FEATURES, Calibration, Shape, shape_of
from kvshare.sharing.repair import RepairRule
from kvshare.sharing.risk import ANY_DEVIATION, Regime, RiskTable

WITHOUT_RISKS = json.dumps(
    of_default_model().as_document()
    | {
        "rules": {
            rule: {key: value for key, value in each.as_document().items() if key != "risks"}
            for rule, each in of_default_model().rules.items()
        }
    }
)
"""A file of a version that predicted means only."""


def shape(shift: int) -> Shape:
    """500 of 1,000 tokens from another place of a stored prompt."""
    copy = Copy(NodeId(1), SegmentId(1), 0, 500, 400, 400 + shift, 400 + shift)
    found = shape_of(placed([copy]), num_tokens=1000, exact_length=300, common={NodeId(1): 300})
    assert found is not None
    return found


def test_the_chat_model_and_the_forms_model_ship_with_theirs() -> None:
    assert {calibration.model for calibration in shipped().values()} == {CHAT_MODEL, "kvshare-demo"}
    for fingerprint, calibration in shipped().items():
        assert calibration_of(fingerprint) is calibration
        assert calibration.caution == 1


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_a_shipped_calibration_is_plausible(path: Path) -> None:
    """More repair never makes a plan worse, nor does a longer way make it better; nothing is endless."""
    calibration = read_calibration(path)
    for rule in RULES:
        near, far = (
            [calibration.expected(shape(shift), rule, repaired) for repaired in (0, 20, 100, 300)]
            for shift in (0, 300)
        )
        assert near == sorted(near, reverse=True)
        assert far == sorted(far, reverse=True)
        assert all(1e-9 < one < 10 for one in (*near, *far))
        if "window" in calibration.measured["suites"]:  # text that moved was measured
            assert all(one < other for one, other in zip(near, far, strict=True))


@pytest.mark.parametrize(("shift", "growth"), [(0, 1), (300, 2)])
def test_a_prompt_longer_than_any_measured_is_taken_to_be_worse(shift: int, growth: float) -> None:
    """Twice as far off as the longest that were measured, and further with its length where text moved."""
    known = of_default_model()
    worst = replace(known.rules["windows"], at_length=1.5)
    known = replace(known, rules={"windows": worst, "attention": worst})
    assert 1000 < known.longest < 2000
    at_most, longer = (replace(shape(shift), num_tokens=times * known.longest) for times in (1, 2))
    ratio = known.expected(longer, "windows", 24) / known.expected(at_most, "windows", 24)
    assert ratio == pytest.approx(2 * 1.5 * growth)


@pytest.mark.parametrize(
    ("times", "typical", "bound"),
    [(1, 0.01, 0.02), (2, 0.0099 / 3, 2 * 0.02), (2, 0.0101 / 3, 2 * 0.1), (2, 0.02, 2 * ANY_DEVIATION)],
)
def test_a_bound_beyond_what_was_measured_is_twice_that_of_the_longest(
    times: int, typical: float, bound: float
) -> None:
    """The longest plans were three times as far off as expected, so a third is all that is certified."""
    table = RiskTable({0.02: {0.02: 0.01, 0.1: 0.02}})
    nothing = (0.0,) * 9
    judged = Calibration(
        intercept=float(np.log10(typical)),
        weights=nothing,
        low=nothing,
        high=nothing,
        bias=1.0,
        spread=0.0,
        risks={"in_place": table},
        at_length=3.0,
    )
    known = replace(of_default_model(), rules={"windows": judged, "attention": judged}, longest=1000)
    found = known.bound(replace(shape(0), num_tokens=1000 * times), "windows", 24, risk=0.02)
    assert found == pytest.approx(bound)


def test_an_unknown_model_is_taken_to_be_as_bad_as_the_worst_known() -> None:
    """Nine times as far off as the default model, as was measured for one of 8 B: what is shared is less."""
    unknown, known = calibration_of("nobody's"), of_default_model()
    assert unknown is cautious()
    assert unknown.caution == 9
    ratio = unknown.expected(shape(0), "windows", 24) / known.expected(shape(0), "windows", 24)
    assert ratio == pytest.approx(unknown.caution)
    for repaired in (10, 24, 100, 300):
        bounds = [each.bound(shape(0), "windows", repaired, risk=0.02) for each in (known, unknown)]
        assert bounds == sorted(bounds)


def test_where_the_mean_is_limited_it_is_the_bound() -> None:
    known = of_default_model()
    assert known.bound(shape(0), "windows", 24, risk=1) == known.expected(shape(0), "windows", 24)


def test_plans_of_several_donors_have_their_own_weights() -> None:
    """Where a calibration has them; plans of one donor are predicted as before."""
    known = of_default_model()
    worse = replace(known.rules["attention"], intercept=known.rules["attention"].intercept + 1)
    own = replace(known, composed={"attention": worse})
    alone = shape(300)
    donors = FEATURES.index("donors")
    several = replace(alone, values=(*alone.values[:donors], float(np.log(3)), *alone.values[donors + 1 :]))
    assert (alone.regime, several.regime) == ("moved", "composed")
    assert own.expected(alone, "attention", 50) == known.expected(alone, "attention", 50)
    assert own.expected(several, "attention", 50) > 2 * known.expected(several, "attention", 50)
    assert own.expected(several, "windows", 50) == known.expected(several, "windows", 50)
    document = json.loads(json.dumps(own.as_document()))
    assert ModelCalibration.from_document(document) == own
    assert own.digest != known.digest


def test_risks_hold_for_plans_that_repair_enough() -> None:
    """Half of 1,000 tokens are asked, so 499, which half of 999 are, pass; the mean is predicted for any."""
    nothing = (0.0,) * len(FEATURES)
    table = RiskTable({0.02: {0.05: 0.01}})
    each = Calibration(-3.0, nothing, nothing, nothing, 1.0, 0.0, risks={"in_place": table})
    half = replace(each, least_repaired=0.5)
    known = replace(of_default_model(), rules={"windows": each, "attention": half})
    bounds = known.bounds(shape(0), "attention", [400, 499, 500, 600], risk=0.02)
    assert bounds == [ANY_DEVIATION, ANY_DEVIATION, 0.05, 0.05]
    assert known.bound(replace(shape(0), num_tokens=999), "attention", 499, risk=0.02) == 0.05
    assert known.bound(shape(0), "windows", 24, risk=0.02) == 0.05
    assert known.bound(shape(0), "attention", 24, risk=1) == known.expected(shape(0), "attention", 24)
    assert known.least_repaired(shape(0), "attention", risk=0.02) == 500
    assert known.least_repaired(shape(0), "attention", risk=1) == 0
    assert ModelCalibration.from_document(json.loads(json.dumps(known.as_document()))) == known
    assert known.digest != replace(known, rules={"windows": each, "attention": each}).digest
    document = known.as_document()
    document["rules"]["attention"]["least_repaired"] = 1.5
    with pytest.raises(ValueError, match="least_repaired is 1"):
        ModelCalibration.from_document(document)


@pytest.mark.parametrize(
    ("regime", "rules", "limit", "share"),
    [
        ("in_place", ("windows", "attention"), 0.05, 0.0),
        ("composed", ("windows", "attention"), 0.05, 0.5),
        ("composed", ("windows",), 0.05, None),
        ("composed", ("windows", "attention"), 0.04, None),
    ],
)
def test_how_much_must_be_repaired_at_least(
    regime: Regime, rules: tuple[RepairRule, ...], limit: float, share: float | None
) -> None:
    known = of_default_model()
    table = RiskTable({0.02: {0.05: 0.01}})
    several = replace(known.rules["attention"], risks={"composed": table}, least_repaired=0.5)
    own = replace(known, composed={"attention": several})
    assert own.least_share(regime, 1000, rules, risk=0.02, limit=limit) == share
    assert own.least_share(regime, 1000, rules, risk=1, limit=limit) == 0
    # Longer than any measured prompt: the bound is doubled.
    assert own.least_share("composed", 2 * own.longest, rules, risk=0.02, limit=0.05) is None


def test_a_named_file_is_used(tmp_path: Path) -> None:
    own = of_default_model().as_document() | {"model": "mine", "fingerprint": "f"}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(own))
    assert calibration_of("f", str(path)).model == "mine"
    assert ModelCalibration.from_document(own).as_document() == own


@pytest.mark.parametrize(
    ("key", "value"),
    [("bias", float("nan")), ("intercept", float("inf")), ("bias", 0), ("slope", 0), ("at_length", 0.9)],
)
def test_numbers_that_would_open_the_gate_are_refused(key: str, value: float) -> None:
    document = json.loads(json.dumps(of_default_model().as_document()))
    document["rules"]["windows"][key] = value
    with pytest.raises(ValueError, match="finite numbers"):
        ModelCalibration.from_document(document)
    with pytest.raises(ValueError, match="longest"):
        ModelCalibration.from_document(of_default_model().as_document() | {"longest": 0})


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"model": "m", "fingerprint": "f", "rules": {"windows": {}}}', None, WITHOUT_RISKS],
)
def test_a_file_that_is_none_is_refused_by_name(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "broken.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"sharing\.calibration: .*broken\.json: expected a file written"):
        calibration_of("f", str(path))


def test_what_is_used_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """An operator learns whether the model's own figures are used, and what to do if not."""
    known = of_default_model()
    with caplog.at_level(logging.INFO):
        log_calibration(known, known.fingerprint)
        log_calibration(known, "another")
        log_calibration(cautious(), "another")
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in said] == ["INFO", "WARNING", "WARNING"]
    assert f"up to {known.longest} tokens" in said[0][1]
    assert all("kvshare calibrate" in text for _, text in said[1:])
