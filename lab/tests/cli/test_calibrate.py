"""What `kvshare calibrate` prints; what it measures is tested in lab/tests/calibration."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvshare.sharing.calibration import of_default_model
from kvshare_lab.calibration import run as measuring
from kvshare_lab.cli.calibrate import app


def test_it_prints_for_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures, and what to do with the file."""

    def measured(**given: Any) -> dict[str, Any]:
        rules = {"windows": {"arms": 120}}
        return {"out": str(given["out"]), "rules": rules, "calibration": of_default_model().as_document()}

    monkeypatch.setattr(measuring, "run", measured)
    answer = CliRunner().invoke(app, ["--out", str(tmp_path / "own.json")])
    assert answer.exit_code == 0, answer.output
    assert "120" in answer.output
    assert "certified at a risk of 2 %" in answer.output
    assert "own.json" in answer.output
