"""
vLLM's Triton kernels for GPUs, run by Triton's interpreter, under our `PagedCache` and `PartialForward`: the
backend, its metadata builder, its attention kernels (2D, and 3D for single tokens) and its writing kernel are
vLLM's, on caches that vLLM laid out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]
TIME_S = 120
LIMIT = {"float32": 2e-5, "bfloat16": 0.06}  # of the typical value
WRONG = 1.0


@dataclass(frozen=True)
class Trial:
    """What the interpreter is asked for."""

    memory: str = "LBNHC"
    head_size: int = 64
    dtype: str = "float32"
    block_size: int = 16
    single: bool = False
    fault: str = "nothing"

    def __str__(self) -> str:
        words = [self.memory, f"{self.head_size}", self.dtype, f"block {self.block_size}"]
        return ", ".join(words + ["single tokens"] * self.single + [self.fault] * (self.fault != "nothing"))

    def to_json(self) -> dict[str, Any]:
        names = ("memory", "head_size", "dtype", "block_size")
        case = {name: getattr(self, name) for name in names}
        return {"case": case, "single": self.single, "fault": self.fault}


RIGHT = [
    *(Trial(memory, head_size) for memory in ("LBNHC", "LBHNC") for head_size in (64, 128)),
    *(Trial(head_size=head_size, dtype="bfloat16") for head_size in (64, 128)),
    Trial("BLHNC"),
    Trial(block_size=32),
    *(Trial(dtype=dtype, single=True) for dtype in LIMIT),
]
FAULTY = [Trial(fault=fault) for fault in ("blocks exchanged", "one slot too many", "slot off by one")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Trial, dict[str, Any]]:
    """All that is tried, with one start."""
    trials = [*RIGHT, *FAULTY]
    asked = json.dumps([trial.to_json() for trial in trials])
    folder = tmp_path_factory.mktemp("models")
    done = subprocess.run(
        [sys.executable, "-m", "tests.kvshare.vllm_connector.without_gpu.interpreted_triton", folder, asked],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=TIME_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(trials, lines, strict=True))


@pytest.mark.parametrize("trial", RIGHT, ids=str)
def test_scattered_runs_get_what_dense_attention_gives(
    trial: Trial, outcomes: dict[Trial, dict[str, Any]]
) -> None:
    """Blocks are read as they were written, and nothing is written anywhere else."""
    found = outcomes[trial]
    assert (found["problem"], found["layout"]) == (None, "content")
    assert found["read_back"] == found["elsewhere"] == 0
    assert max(found["attention"], found["kv"]) <= LIMIT[trial.dtype]


@pytest.mark.parametrize("trial", FAULTY, ids=str)
def test_what_is_wrong_is_seen(trial: Trial, outcomes: dict[Trial, dict[str, Any]]) -> None:
    """By what attention gives and by what the slots hold: the limits above are far below a fault's effect."""
    found = outcomes[trial]
    assert found["read_back"] == 0
    assert min(found["attention"], found["kv"]) >= WRONG
