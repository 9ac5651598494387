"""Two ranks that draft, on the CPU wheel: answers are right, drafts are accepted as after a full prefill."""

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
    program = "tests.kvshare.vllm_connector.tensor_parallel_drafts"
    said = said_by(program, str(model), json.dumps(drafts), mode, timeout_s=TIME_S, environment={})
    assert said["refusals"] == [[""]]
    assert len(said["parity"]) == 2
    for distance, decision in said["parity"]:
        assert (distance <= LIMIT, decision) == (True, "approx")
    for shared, full in said["acceptance"]:
        assert full >= ENOUGH
        assert shared >= LEAST * full
