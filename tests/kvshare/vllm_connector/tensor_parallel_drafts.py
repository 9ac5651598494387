"""
What test_tensor_parallel_drafts.py starts: vLLM with drafts on two ranks, and what came of it as JSON lines
on stdout. A process of its own, as in tensor_parallel.py.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from kvshare.vllm_protocol.messages import FinishedReport
from tests.kvshare.vllm_connector.in_process_vllm import Vllm, copies_of, random_text

SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))
ANSWER = 40  # tokens
OPTIONS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def tokens_a_step(event: FinishedReport) -> float:
    return event.num_answer_tokens / event.num_answer_steps


def main(model: str, speculation: dict[str, Any], mode: str) -> None:
    vllm = Vllm(Path(model), enforce_eager=mode == "eager", speculative_config=speculation, **OPTIONS)
    info = vllm.side.info()
    say("refusals", [*info.refusals, info.passing])
    for seed in (1, 2):
        tokens = random_text(600, seed)
        donor = vllm.store(tokens)
        answer, event = vllm.shared(tokens, copies_of(donor, *SCATTERED), max_tokens=ANSWER)
        say("parity", [answer.distance(vllm.plain(tokens, max_tokens=ANSWER)), event.decision])
        ticket = vllm.ticket(tokens, store=False)
        vllm.ask((tokens, ticket, vllm.fresh("full")), max_tokens=ANSWER)
        say("acceptance", [tokens_a_step(event), tokens_a_step(vllm.finished(ticket))])
    os._exit(0)  # vLLM has nothing left to shut down in order


def say(what: str, found: object) -> None:
    sys.stdout.write(json.dumps({what: found}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])
