"""What a finished request teaches about costs: its times, from relay and connector, and its plan's work."""

from __future__ import annotations

from kvshare.fleet.routed_request import RequestProgress, Routed
from kvshare.sharing.cost import CostModel
from kvshare.sharing.plan import Plan
from kvshare.sharing.rates import PrefillWork
from kvshare.vllm_protocol.messages import FinishedReport, Ticket, WireCopy


def observe(cost: CostModel, routed: Routed, progress: RequestProgress, finished: FinishedReport) -> None:
    """Update the rates. Where vLLM had tokens in its own prefix cache, what was computed is not known."""
    assert routed.ticket is not None, "only requests with a ticket are reported"
    load_s = _observe_load(cost, routed.ticket, finished)
    if finished.num_local:
        return
    # Of an answer that is not streamed only the connector knows when its first token came.
    prefill_s = finished.first_token_s if progress.prefill_s is None else progress.prefill_s
    if not progress.was_alone:  # it was computed together with other requests, or waited for them
        prefill_s = None
    plan, is_full = routed.plan, finished.decision == "full"
    if prefill_s is not None and is_full:
        cost.observe_prefill(routed.ticket.num_tokens, prefill_s)
    if not isinstance(plan, Plan) or is_full or finished.reason is not None:
        return  # it was not carried out as planned
    work = plan.work(num_extra_passes=cost.rates.num_extra_passes)
    if prefill_s is not None:
        loading_s = cost.rates.load_s(work.num_reused) if load_s is None else load_s
        cost.observe(work, max(prefill_s - loading_s, prefill_s / 10))
    if "pass" in finished.stage_seconds and plan.order is None:  # else a pass also computes repairs
        cost.observe(_pass(plan), finished.stage_seconds["pass"])


def _observe_load(cost: CostModel, ticket: Ticket, finished: FinishedReport) -> float | None:
    """Returns: the seconds that loading took, if it was measured"""
    stages = finished.stage_seconds
    if "write" not in stages:
        return None
    seconds = stages["write"] + stages.get("verify", 0.0)
    used = [ticket.copies[index] for index in finished.used if index < len(ticket.copies)]
    num_loaded = sum(_num_loaded(copy, finished.num_local) for copy in used)
    cost.observe_load(num_loaded * cost.rates.bytes_per_token, seconds)
    return seconds


def _num_loaded(copy: WireCopy, num_local: int) -> int:
    """vLLM has the first tokens itself."""
    return max(0, copy.target.end - max(copy.target.start, num_local))


def _pass(plan: Plan) -> PrefillWork:
    """The partial pass by itself. vLLM computes the tail behind the last copy in its own pass."""
    end = plan.copies[-1].target.end
    spans = [span for span in plan.placeholders if span.start < end]
    num_tokens = sum(map(len, spans))
    pairs = sum(span.end**2 - span.start**2 for span in spans) / 2
    return PrefillWork(num_tokens, pairs, num_steps=0, num_passes=1, num_reused=end - num_tokens)
