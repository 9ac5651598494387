"""Real processes, killed while they store and evict."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_what_was_said_to_be_on_disk_outlives_a_kill() -> None:
    """Eight processes, one after the other: no wrong byte, and nothing that was on disk is lost."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kvshare.tiers.kill_rounds", "4"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == []
    assert found["num_promised"] > 20
