"""Learns costs from a finished request: its times, from relay and connector, and its plan's work."""

from __future__ import annotations

from kvshare.fleet.routed_request import RequestProgress, Routed
from kvshare.sharing.cost import CostModel
from kvshare.sharing.plan import Plan
from kvshare.sharing.rates import BLOCKS, DISK, MEMORY, PrefillWork
from kvshare.vllm_protocol.messages import FinishedReport, Ticket, WireCopy


def observe(cost: CostModel, routed: Routed, progress: RequestProgress, finished: FinishedReport) -> None:
    """Update the rates. Where vLLM had tokens in its own prefix cache, what was computed is not known."""
    assert routed.ticket is not None, "only requests with a ticket are reported"
    load_s = _observe_load(cost, routed.ticket, finished)
    if finished.num_local:
        return
    # Of an answer that is not streamed only the connector knows when its first token came.
    prefill_s = finished.first_token_s if progress.prefill_s is None else progress.prefill_s
    plan, is_full = routed.plan, finished.decision == "full"
    if finished.reason is None:
        _observe_wait(cost, routed, progress, load_s or 0.0)
    if not progress.was_alone:  # it was computed together with other requests, or waited for them
        prefill_s = None
    if prefill_s is not None and is_full:
        cost.observe_prefill(routed.ticket.num_tokens, prefill_s)
    if not isinstance(plan, Plan) or is_full or finished.reason is not None:
        return  # it was not carried out as planned
    work = plan.work(num_extra_passes=cost.rates.num_extra_passes)
    if prefill_s is not None:
        loading_s = cost.rates.load_s(work.num_reused) if load_s is None else load_s
        cost.observe(work, max(prefill_s - loading_s, prefill_s / 10))
    # Else a pass also computes repairs, or there were several.
    if "pass" in finished.stage_seconds and plan.order is None and not plan.num_ahead:
        cost.observe(_pass(plan), finished.stage_seconds["pass"])


def _observe_wait(cost: CostModel, routed: Routed, progress: RequestProgress, load_s: float) -> None:
    """Observe the wait of a streamed answer that was carried out as planned, alone or not."""
    if progress.prefill_s is None or progress.queue_s is None or routed.ticket is None:
        return
    plan = routed.plan
    own_s = plan.estimate.compute_s if isinstance(plan, Plan) else cost.rates.full_s(routed.ticket.num_tokens)
    wait_s = progress.prefill_s - own_s - load_s
    cost.observe_wait(shared=isinstance(plan, Plan), queue_s=progress.queue_s, seconds=wait_s)


def _observe_load(cost: CostModel, ticket: Ticket, finished: FinishedReport) -> float | None:
    """
    Returns:  the seconds that loading took, from all places, if it was measured: without those that passed
    while placeholders were computed
    """
    stages, num_bytes = finished.stage_seconds, cost.rates.bytes_per_token
    if "write" not in stages:
        return None
    seconds = {
        MEMORY: stages["write"] + stages.get("verify", 0.0),
        BLOCKS: stages.get("blocks", 0.0),
        DISK: stages.get("disk", 0.0),
    }
    if finished.disk_bytes and seconds[DISK]:
        cost.know_disk()
        asked = finished.disk_bytes + finished.late_bytes  # at this pace they would have taken so much longer
        load_s = seconds[DISK] * asked / finished.disk_bytes
        cost.observe_load(asked, load_s, place=DISK, is_late=bool(finished.late_bytes))
    used = [ticket.copies[index] for index in finished.used if index < len(ticket.copies)]
    if used:
        num_loaded = sum(_num_loaded(copy, finished.num_local) for copy in used)
        in_blocks = min(num_loaded, finished.num_from_blocks)
        cost.observe_load((num_loaded - in_blocks) * num_bytes, seconds[MEMORY])
        if in_blocks:
            cost.observe_load(in_blocks * num_bytes, seconds[BLOCKS], place=BLOCKS)
    return max(0.0, sum(seconds.values()) - stages.get("hidden", 0.0) - stages.get("ahead", 0.0))


def _num_loaded(copy: WireCopy, num_local: int) -> int:
    """vLLM has the first tokens itself."""
    return max(0, copy.target.end - max(copy.target.start, num_local))


def _pass(plan: Plan) -> PrefillWork:
    """Return the partial pass by itself. vLLM computes the tail after the last copy in its own pass."""
    end = plan.copies[-1].target.end
    spans = [span for span in plan.placeholders if span.start < end]
    num_tokens = sum(map(len, spans))
    pairs = sum(span.end**2 - span.start**2 for span in spans) / 2
    return PrefillWork(num_tokens, pairs, num_steps=0, num_passes=1, num_reused=end - num_tokens)
