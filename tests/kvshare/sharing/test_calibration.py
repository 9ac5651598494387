"""Which calibration a model gets: its own, a named one, or the default model's with caution."""

import json
import logging
from dataclasses import replace
from pathlib import Path

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
from kvshare.sharing.prediction import Shape, shape_of


def shape(shift: int) -> Shape:
    """500 of 1,000 tokens from another place of a stored prompt."""
    copy = Copy(NodeId(1), SegmentId(1), 0, 500, 400, 400 + shift, 400 + shift)
    found = shape_of([copy], num_tokens=1000, exact_length=300, common={NodeId(1): 300})
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
        assert all(1e-9 < one < other < 10 for one, other in zip(near, far, strict=True))


def test_a_prompt_longer_than_any_measured_is_taken_to_be_worse() -> None:
    """Where text comes from elsewhere; an edit in place is none in a long prompt, either."""
    known = of_default_model()
    assert 1000 < known.longest < 2000
    for shift, factor in ((0, 1), (300, 2)):
        at_most, twice = (replace(shape(shift), num_tokens=times * known.longest) for times in (1, 2))
        ratio = known.expected(twice, "windows", 24) / known.expected(at_most, "windows", 24)
        assert ratio == pytest.approx(factor)


def test_an_unknown_model_is_taken_to_be_worse() -> None:
    unknown, known = calibration_of("nobody's"), of_default_model()
    assert unknown is cautious()
    ratio = unknown.expected(shape(0), "windows", 24) / known.expected(shape(0), "windows", 24)
    assert ratio == pytest.approx(unknown.caution)
    assert unknown.caution > 1


def test_a_named_file_is_used(tmp_path: Path) -> None:
    own = of_default_model().as_document() | {"model": "mine", "fingerprint": "f"}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(own))
    assert calibration_of("f", str(path)).model == "mine"
    assert ModelCalibration.from_document(own).as_document() == own


@pytest.mark.parametrize(
    ("key", "value"), [("bias", float("nan")), ("intercept", float("inf")), ("bias", 0), ("slope", 0)]
)
def test_numbers_that_would_open_the_gate_are_refused(key: str, value: float) -> None:
    document = json.loads(json.dumps(of_default_model().as_document()))
    document["rules"]["windows"][key] = value
    with pytest.raises(ValueError, match="finite numbers"):
        ModelCalibration.from_document(document)
    with pytest.raises(ValueError, match="longest"):
        ModelCalibration.from_document(of_default_model().as_document() | {"longest": 0})


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"model": "m", "fingerprint": "f", "rules": {"windows": {}}}', None]
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
    assert all("kvshare calibrate" in text for _, text in said[1:])
