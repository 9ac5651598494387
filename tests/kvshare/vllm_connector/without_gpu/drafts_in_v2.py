"""
What test_drafts_in_v2.py starts: vLLM with its model runner V2 itself, on the CPU wheel, with drafts, and
what came of it as JSON lines on stdout. V2's kernels run in Triton's interpreter; the model runs as usual.

A process of its own, with TRITON_INTERPRET=1: Triton and vLLM look at the machine once, when imported.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kvshare.vllm_connector.without_gpu.interpreted_triton import prepare

SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))
ANSWER = 40  # tokens


def main(model: str, speculation: dict[str, Any], scheduling: str) -> None:
    """`scheduling`: "ahead" as on GPUs, where a step is scheduled before the one before it is known."""
    prepare()
    from tests.kvshare.vllm_connector.in_process_vllm import Vllm, copies_of, random_text

    options: dict[str, Any] = {"enforce_eager": True, "num_gpu_blocks_override": 64, "max_num_seqs": 8}
    options |= {"async_scheduling": scheduling == "ahead"}
    vllm = Vllm(Path(model), speculative_config=speculation, **options)
    info, runner = vllm.side.info(), vllm.core.model_executor.driver_worker.worker.model_runner
    say("runner", [each.__module__ for each in type(runner).__mro__])
    say("unshared", [*info.refusals, info.passing])
    say("can_move", info.can_move_keys)
    say("ahead", vllm.core.vllm_config.scheduler_config.async_scheduling)
    for seed in (1, 2):
        tokens = random_text(600, seed)
        donor = vllm.store(tokens)
        plain = vllm.plain(tokens, max_tokens=ANSWER)
        full = vllm.ticket(tokens, store=False)
        vllm.ask((tokens, full, vllm.fresh("full")), max_tokens=ANSWER)
        for _ in range(2):  # from vLLM's blocks, and from host memory
            answer, event = vllm.shared(tokens, copies_of(donor, *SCATTERED), max_tokens=ANSWER)
            say("parity", [answer.distance(plain), event.decision])
            say("acceptance", [tokens_a_step(event), tokens_a_step(vllm.finished(full))])
            vllm.forget_blocks()
    say("faults", [with_rows_at_other_positions(vllm), with_a_runner_that_writes_none(vllm)])
    os._exit(0)  # vLLM has nothing left to shut down in order


def tokens_a_step(event: Any) -> float:
    return float(event.num_answer_tokens / event.num_answer_steps)


def with_rows_at_other_positions(vllm: Any) -> str:
    """What the self-test finds if our pass computes rows of what drafts for the positions after theirs."""
    from tests.kvshare.vllm_connector.test_verified_drafts import at_other_positions, verified

    with pytest.MonkeyPatch.context() as patch:
        at_other_positions(patch)
        return verified(vllm).unverified


def with_a_runner_that_writes_none(vllm: Any) -> str:
    """What it finds if V2 writes no rows of what drafts."""
    from tests.kvshare.vllm_connector.test_verified_drafts import verified

    speculator = vllm.core.model_executor.driver_worker.worker.model_runner.speculator
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            speculator, "propose", lambda batch, *_, **__: speculator.draft_tokens[: batch.num_reqs]
        )
        return verified(vllm).unverified


def say(what: str, found: object) -> None:
    sys.stdout.write(json.dumps({what: found}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])
