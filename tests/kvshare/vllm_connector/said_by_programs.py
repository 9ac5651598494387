"""Runs a test's program in a process of its own, and reads what it says: lines of JSON objects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def said_by(
    module: str, *arguments: str, timeout_s: float, environment: Mapping[str, str]
) -> dict[str, list[Any]]:
    """
    The values of each key, in the order of the lines. The program runs vLLM on one thread.

    Raises:  AssertionError where it fails; TimeoutExpired where it hangs
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, list[Any]] = defaultdict(list)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            for what, found in json.loads(line).items():
                said[what].append(found)
    return said
