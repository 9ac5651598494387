"""`kvshare bench fidelity`, from the command line to the report, on the model in the repository."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvshare.cli.main import app
from kvshare.errors import ConfigError

pytestmark = pytest.mark.model

_OPTIONS = ["bench", "fidelity", "--model", "demo", "--suite", "needle,resubmit", "--plans", "2", "--json"]


def _run(out: Path, *options: str) -> dict[str, object]:
    rules = ["--rules", "placeholders,full,edit-windows", "--budgets", "0.1", "--out", str(out)]
    result = CliRunner().invoke(app, [*_OPTIONS, *rules, *options])
    assert result.exit_code == 0, result.output
    document: dict[str, object] = json.loads(result.output)
    return document


def _rows(out: Path) -> list[dict[str, object]]:
    return [
        json.loads(line) for path in sorted(out.glob("*/*.jsonl")) for line in path.read_text().splitlines()
    ]


@dataclass(frozen=True)
class Run:
    """A whole one with a report: what it printed, and its folder."""

    document: dict[str, object]
    out: Path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("fidelity")
    return Run(_run(out, "--report"), out)


def test_a_run_measures_and_reports(whole: Run) -> None:
    assert (whole.document["measured"], whole.document["left"]) == (4, 0)
    measured = [row for row in _rows(whole.out) if "arms" in row]
    assert measured
    for row in measured:
        by_rule = {arm["rule"]: arm for arm in row["arms"]}  # type: ignore[attr-defined]  # JSON
        assert by_rule["full"]["kl"] <= 1e-6
        assert by_rule["placeholders"]["b"] == 0
        assert 0 < by_rule["edit-windows"]["b"] <= 0.1 + 1 / row["tokens"]  # type: ignore[operator]  # JSON
    assert (whole.out / "report-0" / "report.md").read_text().startswith("#")


@pytest.mark.long
def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    assert _run(tmp_path, "--minutes", "0")["left"] == 4
    assert _run(tmp_path, "--part", "0/2")["left"] == 0
    before = _rows(tmp_path)
    assert 0 < len(before) < 4
    assert _run(tmp_path)["measured"] == 4 - len(before)
    assert [row["number"] for row in _rows(tmp_path)].count(0) == 2  # once in each suite


def test_an_unknown_stage_is_named(tmp_path: Path) -> None:
    stages = "stages: [{name: one, half: 0, plans: {needle: 1}, rules: [full]}]"
    (tmp_path / "stages.yaml").write_text(stages)
    options = ["bench", "fidelity", "--out", str(tmp_path), "--stage", "two"]
    result = CliRunner().invoke(app, options)
    assert isinstance(result.exception, ConfigError)
    assert "there are one; got 'two'" in str(result.exception)


def test_no_prompt_text_is_written(whole: Run) -> None:
    rows = _rows(whole.out)
    assert rows
    assert all(len(word) < 40 for row in rows for word in json.dumps(row).split('"'))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--rules", "nonsense"], "nonsense"),
        (["--suite", "nonsense"], "nonsense"),
        (["--budgets", "ten"], "--budgets"),
        (["--part", "2/2"], "--part"),
    ],
)
def test_a_wrong_option_is_named(tmp_path: Path, options: list[str], named: str) -> None:
    result = CliRunner().invoke(app, [*_OPTIONS, "--out", str(tmp_path), *options])
    assert result.exit_code != 0
    assert isinstance(result.exception, ConfigError)
    assert named in str(result.exception)
