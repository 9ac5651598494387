"""Turns a plan into the ticket that carries it to a replica's connector."""

from __future__ import annotations

from dataclasses import replace

from delta_tree import TokenIds
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.vllm_protocol.messages import Ticket, WireCopy, WireOrder, WireSpan, digest_of

_NUM_LAST_TOKENS = 16  # of a prompt: vLLM computes them itself


def ticket_for(
    plan: Plan | NoPlan,
    prompt: TokenIds,
    *,
    ticket_id: str,
    namespace: str,
    store: bool,
    disk_s: float = 0.0,
) -> Ticket:
    """
    Return the plan for the connector. Without a plan the prompt may still be retained. `disk_s`: how long
    reads from disk are waited for; 0: as long as the connector allows.
    """
    ticket = Ticket(ticket_id, namespace, digest_of(prompt), len(prompt), store=store)
    if isinstance(plan, NoPlan):
        return ticket
    copies = (
        WireCopy(copy.segment_id, copy.offset, copy.length, copy.target_start, copy.source_position)
        for copy in plan.copies
    )
    return replace(
        ticket, exact_length=plan.exact_length, copies=tuple(copies), order=wire_order(plan), disk_s=disk_s
    )


def wire_order(plan: Plan) -> WireOrder | None:
    """Return the plan's repair order for the connector, which fills slots up to `end`. vLLM does the rest."""
    if plan.order is None:
        return None
    return WireOrder(
        stretches=tuple(WireSpan(stretch.start, stretch.end) for stretch in plan.order.stretches),
        probes=plan.order.probes,
        num_tokens=plan.order.num_tokens,
        end=max(plan.num_tokens - _NUM_LAST_TOKENS, plan.copies[-1].target.end),
    )
