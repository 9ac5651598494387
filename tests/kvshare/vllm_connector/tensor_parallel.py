"""
What test_tensor_parallel.py starts: vLLM on two ranks, and what came of it as JSON lines on stdout.

A process of its own, as a rank that fails takes vLLM with it, and one that hangs must be ended from outside.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from delta_tree import SegmentId
from kvshare.vllm_protocol.messages import FinishedReport, WireCopy, WireOrder, WireSpan
from kvshare.vllm_protocol.salts import private_salt
from tests.kvshare.vllm_connector.in_process_vllm import Answer, Vllm, copies_of, random_text
from tests.kvshare.vllm_connector.starts import LITTLE_ROOM

SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))
SHIFT = 24
OPTIONS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "disable_hybrid_kv_cache_manager": True,
    "worker_cls": "tests.kvshare.vllm_connector.failing_worker.FailingWorker",
}


def chosen(
    vllm: Vllm, donor: FinishedReport, tokens: Sequence[int]
) -> tuple[list[int], list[WireCopy], WireOrder]:
    """A prompt that is moved, and repairs of which are chosen."""
    recipient = random_text(SHIFT, 9) + list(tokens)
    copies = copies_of(donor, (0, 100), (130, 300), (301, 560), shift=SHIFT)
    pieces = tuple(WireSpan(copy.target.start, copy.target.end) for copy in copies)
    probes = tuple(piece.start for piece in pieces)
    return recipient, copies, WireOrder(pieces, probes, 40, len(recipient) - 16)


def ask_chosen(vllm: Vllm, donor: FinishedReport, tokens: Sequence[int]) -> dict[str, Any]:
    recipient, copies, order = chosen(vllm, donor, tokens)
    ticket = vllm.ticket(recipient, copies, order=order)
    answer = vllm.ask((recipient, ticket, private_salt(ticket.ticket_id)), max_tokens=1, logprobs=20)[0]
    return {"repaired": vllm.finished(ticket).repaired, "logprobs": answer.logprobs[0]}


class Scenario:
    """One vLLM, and a line for each thing that is tried."""

    def __init__(self, model: str, mode: str, faults: Path) -> None:
        self.faults = faults
        self.vllm = Vllm(Path(model), max_bytes=LITTLE_ROOM, enforce_eager=mode == "eager", **OPTIONS)
        self._seeds = itertools.count(100)

    def run(self) -> None:
        vllm = self.vllm
        say("refusals", list(vllm.side.info().refusals))
        if not vllm.side.scheduler.shares:
            tokens = random_text(200, 1)
            say("unshared", len(vllm.plain(tokens).tokens))
            return
        self._parity()
        self._abort()
        for stage in ("verify", "write", "save"):
            self._fault(stage)
        self._evictions()
        say("held", [vllm.side.segments.ids(), *self._held()])
        self._pass()

    def _held(self) -> list[list[int]]:
        self.vllm.ask((random_text(50, 0), None, None))  # the next step carries the drops
        held: list[list[int]] = self.vllm.llm.collective_rpc("segments")
        return held

    def _planned(self) -> tuple[Answer, Answer, FinishedReport]:
        """An edited prompt, by plan and in full."""
        tokens = random_text(600, next(self._seeds))
        donor = self.vllm.store(tokens)
        answer, event = self.vllm.shared(tokens, copies_of(donor, *SCATTERED))
        return answer, self.vllm.plain(tokens), event

    def _parity(self) -> None:
        for _ in range(3):
            answer, truth, event = self._planned()
            say("parity", [answer.distance(truth), event.decision])
        tokens = random_text(600, 1)
        say("whole", self.vllm.llm.collective_rpc("whole_segment", args=(first_segment(self.vllm, tokens),)))
        say("chosen", ask_chosen(self.vllm, self.vllm.store(tokens), tokens))

    def _abort(self) -> None:
        from vllm import SamplingParams

        vllm, tokens = self.vllm, random_text(600, next(self._seeds))
        donor = vllm.store(tokens)
        for steps in (0, 1, 3):
            ticket = vllm.ticket(tokens, copies_of(donor, *SCATTERED))
            extra = {"kv_transfer_params": {"kvshare": ticket.to_json()}}
            params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, extra_args=extra)
            prompt = {"prompt_token_ids": tokens, "cache_salt": private_salt(ticket.ticket_id)}
            vllm.llm.llm_engine.add_request(ticket.ticket_id, prompt, params)
            for _ in range(steps):
                vllm.llm.llm_engine.step()
            vllm.llm.llm_engine.abort_request([ticket.ticket_id])
            vllm.settle()
            say("aborted", [steps, vllm.finished(ticket).decision])

    def _fault(self, stage: str) -> None:
        tokens = random_text(600, next(self._seeds))
        donor = self.vllm.store(tokens)
        self.faults.write_text(fault(1, stage))
        answer, event = self.vllm.shared(tokens, copies_of(donor, *SCATTERED))
        self.faults.write_text("")
        distance = answer.distance(self.vllm.plain(tokens))
        say(stage, [distance, event.decision, event.reason, len(event.stored)])

    def _evictions(self) -> None:
        for _ in range(6):
            answer, truth, _ = self._planned()
            say("evicting", answer.distance(truth))
        dropped = {i for e in self.vllm.events() if e.kind == "dropped" for i in e.segment_ids}
        say("dropped", len(dropped))

    def _pass(self) -> None:
        tokens = random_text(600, next(self._seeds))
        donor = self.vllm.store(tokens)
        self.faults.write_text(fault(1, "pass"))
        try:
            self.vllm.shared(tokens, copies_of(donor, *SCATTERED))
        except Exception as exc:  # noqa: BLE001  whatever vLLM makes of it
            say("pass", type(exc).__name__)
        os._exit(0)  # vLLM has nothing left to shut down in order


def first_segment(vllm: Vllm, tokens: Sequence[int]) -> SegmentId:
    return vllm.store(tokens).stored[0].segment_id


def fault(rank: int, stage: str) -> str:
    """What failing_worker.py reads. Not imported from it, as that arms the faults."""
    return f"{rank}:{stage}"


def say(what: str, found: object) -> None:
    sys.stdout.write(json.dumps({what: found}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    Scenario(sys.argv[1], sys.argv[2], Path(os.environ["KVSHARE_FAULTS"])).run()
