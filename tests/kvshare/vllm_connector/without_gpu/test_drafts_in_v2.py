"""
vLLM's model runner V2 itself with drafts, on the CPU wheel: rows of what drafts are verified at start,
answers are right, drafts are accepted as after a full prefill. Its kernels run in Triton's interpreter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kvshare.vllm_connector.said_by_programs import said_by
from tests.kvshare.vllm_connector.test_heads import write

if TYPE_CHECKING:
    from tests.kvshare.vllm_connector.in_process_vllm import Checkpoint

pytestmark = pytest.mark.long

LIMIT = 1e-4  # log-probability, float32
ENOUGH, LEAST = 1.8, 0.97  # tokens a step of a full prefill; of them, of a shared one
TIME_S = 900


@pytest.mark.parametrize("scheduling", ["ahead", "in turn"])
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mtp"])
def test_drafts_are_verified_and_accepted(
    method: str, scheduling: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """An EAGLE3 head is random, so that few of its drafts are accepted."""
    model, drafts = checkpoint("llama"), {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        drafts |= {"model": str(model), "max_model_len": 1024}
    else:
        write(method, model, tmp_path)
        model = tmp_path / "model"
    if method.startswith("eagle"):
        drafts["model"] = str(tmp_path / "head")
    said = said_by(
        "tests.kvshare.vllm_connector.without_gpu.drafts_in_v2",
        str(model),
        json.dumps(drafts),
        scheduling,
        timeout_s=TIME_S,
        environment={"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"},
    )
    ((runner, *bases),) = said["runner"]
    assert runner == "vllm.v1.worker.cpu.model_runner"
    assert "vllm.v1.worker.gpu.model_runner" in bases
    assert said["unshared"] == [[""]]
    assert said["can_move"] == [True]
    assert said["ahead"] == [scheduling == "ahead"]
    assert len(said["parity"]) == 4
    for distance, decision in said["parity"]:
        assert (distance <= LIMIT, decision) == (True, "approx")
    for shared, full in said["acceptance"]:
        assert full >= (1 if method == "eagle3" else ENOUGH)
        assert shared >= LEAST * full
    assert all("are off by" in fault for fault in said["faults"][0])
