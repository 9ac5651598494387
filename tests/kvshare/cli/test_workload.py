"""`kvshare workload`: writes the file, says so, and ends with the right code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

from kvshare.cli.traffic_options import WorkloadName
from kvshare.replay.workloads import WORKLOADS
from tests.kvshare.cli.conftest import Cli


def test_every_workload_has_its_command() -> None:
    """The names on the command line are those of the package."""
    assert get_args(WorkloadName) == tuple(WORKLOADS)


def test_a_workload_is_written(cli: Cli, tmp_path: Path) -> None:
    """To a file, with a note for people."""
    done = cli("workload", "rag", "--out", "rag.jsonl", "--requests", "5", "--seed", "3")
    assert (done.code, done.stdout) == (0, "")
    assert "5 requests -> rag.jsonl" in done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rag.jsonl").read_text("utf-8").splitlines()]
    assert [row["id"] for row in rows] == [f"rag-{number}" for number in range(5)]


def test_stdout_is_data(cli: Cli) -> None:
    """`--out -` pipes the rows."""
    done = cli("-q", "workload", "header", "--out", "-", "-n", "2")
    assert len([json.loads(line) for line in done.stdout.splitlines()]) == 2


def test_what_cannot_be_made_is_one_line(cli: Cli, tmp_path: Path) -> None:
    """No traceback: sources that do not fit, and a file that cannot be written."""
    (tmp_path / "log").write_text('{"prompt": "short"}\n', encoding="utf-8")
    wrong = cli("workload", "window", "--out", "x", "--source", "log")
    assert wrong.code == 1
    assert "nothing is usable for 'window'" in wrong.stderr
    assert cli("workload", "rag", "--out", "none/x").code == 2
