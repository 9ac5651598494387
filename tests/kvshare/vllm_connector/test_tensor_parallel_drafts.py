"""Two ranks that draft, on the CPU wheel: answers are right, drafts are accepted as after a full prefill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.kvshare.vllm_connector.test_heads import write

if TYPE_CHECKING:
    from tests.kvshare.vllm_connector.in_process_vllm import Checkpoint

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
LIMIT = 1e-4
ENOUGH, LEAST = 1.8, 0.97  # tokens a step of a full prefill; of them, of a shared one
TIME_S = 900


@pytest.mark.parametrize("method", ["draft_model", "eagle", "mtp"])
def test_answers_and_their_steps_are_those_of_full_prefills(
    method: str, checkpoint: Checkpoint, tmp_path: Path, mode: str
) -> None:
    model, drafts = checkpoint("llama"), {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        drafts |= {"model": str(model), "max_model_len": 1024}
    else:
        write(method, model, tmp_path)
        model = tmp_path / "model"
    if method == "eagle":
        drafts["model"] = str(tmp_path / "head")
    said = run(model, drafts, mode)
    assert said["refusals"] == [[""]]
    assert len(said["parity"]) == 2
    for distance, decision in said["parity"]:
        assert (distance <= LIMIT, decision) == (True, "approx")
    for shared, full in said["acceptance"]:
        assert full >= ENOUGH
        assert shared >= LEAST * full


def run(model: Path, drafts: dict[str, Any], mode: str) -> dict[str, list[Any]]:
    """Raises TimeoutExpired where it hangs."""
    name = "tests.kvshare.vllm_connector.tensor_parallel_drafts"
    done = subprocess.run(
        [sys.executable, "-m", name, str(model), json.dumps(drafts), mode],
        cwd=ROOT,
        env={
            **os.environ,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=TIME_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, list[Any]] = defaultdict(list)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            for what, found in json.loads(line).items():
                said[what].append(found)
    return said
