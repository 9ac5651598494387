"""Embedded engines, killed while they store: what was on disk is there, and is right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("num_kills", [2, pytest.param(30, marks=pytest.mark.long)])
def test_what_was_on_disk_outlives_a_kill(num_kills: int) -> None:
    """Each engine serves what those before it had on disk as a full prefill would; none of it is lost."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kvshare.embedded.killed_engine", str(num_kills)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["lost"], found["wrong"], found["num_kills"]) == ([], [], num_kills)
    assert found["num_promised"] >= num_kills
