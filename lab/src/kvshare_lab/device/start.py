"""
What the product measures when it starts, with a simulated replica in place of the idle one.

The prompts, the plans and what is learned are `kvshare.fleet.start_measurement`'s; it sends by HTTP and waits
in real time, which this module has none of.
"""

from __future__ import annotations

import numpy as np

from delta_tree import TokenIds
from kvshare.fleet.start_measurement import lengths_for, plan_of_copies, with_edits
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.vllm_protocol.messages import FinishedReport
from kvshare_lab.device.sharing_server import SharingServer
from kvshare_lab.vllm.prompts import unrelated_prompt

_PAUSE_S = 0.5
_LONG_S = 1.0  # after a prefill that took so long no longer one is sent


def measure_at_start(server: SharingServer, rng: np.random.Generator) -> None:
    """A full prefill and a near-duplicate of each length, which the server learns from."""
    for length in lengths_for(server.info()):
        tokens = unrelated_prompt(rng, length)
        whole, prefill_s = _answered(server, tokens, NoPlan())
        if whole.stored:
            plan = plan_of_copies(length, whole.stored)
            near, _ = _answered(server, with_edits(tokens, unrelated_prompt(rng, length)), plan)
            server.drop(near)
        server.drop(whole)
        if prefill_s > _LONG_S:
            return


def _answered(server: SharingServer, tokens: TokenIds, plan: Plan | NoPlan) -> tuple[FinishedReport, float]:
    """The connector's report, and the seconds to the first token."""
    answer = server.send_own(tokens, plan, at=server.clock.now() + _PAUSE_S)
    server.run()
    server.read_events()
    return server.reports[answer.request_id], answer.ttft_s
