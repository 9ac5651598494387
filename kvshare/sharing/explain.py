"""A plan as a document: what `kvshare explain` and the admin route show. No token ids, no text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from delta_tree import DonorReason, NodeId, UnknownSegmentError, compose
from kvshare.reasons import Reason, cache_miss_reason
from kvshare.requests import Prompt, SharingMode
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.pipeline import Sharing
from kvshare.sharing.plan import NoPlan, Plan
from vector_index import Candidate

_NOT_LOOKED_UP = (Reason.OFF, Reason.SHORT_PROMPT, Reason.MODEL_UNSHARED)


def explain_lookup(sharing: Sharing, prompt: Prompt, lookup: Lookup, mode: SharingMode) -> dict[str, Any]:
    """
    Describe the result of `find_plan`, JSON-ready: the decision, all spans of the prompt, all candidates.

    Blocks, because it composes the candidates again.
    """
    plan, num_tokens = lookup.plan, prompt.num_tokens
    report = lookup.report(num_tokens)
    if isinstance(plan, Plan):
        estimate, charged_budget = plan.estimate, plan.charged_budget
    else:
        estimate = sharing.cost.rates.unshared(num_tokens)
        charged_budget = 1.0
    lookup_s = 0.0 if report.reason in _NOT_LOOKED_UP else estimate.lookup_s
    shared_s = lookup_s + (estimate.shared_s if isinstance(plan, Plan) else estimate.full_s)
    return {
        "decision": report.decision,
        "mode": mode,
        "reason": report.reason,
        "cache_miss_reason": cache_miss_reason(report.reason),
        "num_tokens": num_tokens,
        "exact": report.num_exact,
        "copied": report.num_copied,
        "recomputed": report.num_recomputed,
        "repaired": report.num_repaired,
        "to_choose": _to_choose(plan),
        "prediction": _prediction(plan, sharing.limits),
        "charged_budget": charged_budget,
        "spans": _spans(plan, num_tokens),
        "donors": _donors(plan, lookup.candidates, _outcomes(sharing, prompt, lookup, mode)),
        "estimate": {"full_s": estimate.full_s, "shared_s": shared_s, "saved_s": estimate.full_s - shared_s},
        "stage_ms": {stage: 1e3 * seconds for stage, seconds in lookup.stage_seconds.items()},
    }


def _outcomes(sharing: Sharing, prompt: Prompt, lookup: Lookup, mode: SharingMode) -> dict[int, str]:
    """Return how the composition used every candidate, before the gate; empty if one was evicted."""
    limits = sharing.limits
    nodes = sharing.own_nodes(lookup.namespace, lookup.candidates)
    try:
        composition = compose(
            prompt.token_ids,
            nodes,
            sharing.tree.segment,
            min_run=limits.sharing.min_run,
            max_donors=limits.sharing.max_donors,
            max_generation=limits.policy.max_generation,
            allow_approximate=mode is SharingMode.APPROX,
            may_move=limits.can_move_keys,
        )
    except UnknownSegmentError:  # or stored with better KV
        return {}
    return {int(node.node_id): reason for node, reason in zip(nodes, composition.reasons, strict=True)}


def _to_choose(plan: Plan | NoPlan) -> dict[str, int] | None:
    """Return what the engine will repair after a probe pass; None if all repairs are known."""
    if isinstance(plan, NoPlan) or plan.order is None:
        return None
    order = plan.order
    return {"tokens": order.num_tokens, "probes": len(order.probes), "stretches": len(order.stretches)}


def _prediction(plan: Plan | NoPlan, limits: PlannerLimits) -> dict[str, Any] | None:
    """Return the prediction for the approximate plan, used or refused; None if there is none."""
    if plan.prediction is None:
        return None
    calibration = limits.calibration
    return {**asdict(plan.prediction), "calibration": calibration.model, "caution": calibration.caution}


def _spans(plan: Plan | NoPlan, num_tokens: int) -> list[dict[str, Any]]:
    """Return the prompt from left to right: exact, copied, placeholder, repair."""
    if isinstance(plan, NoPlan):
        return [_span(0, num_tokens, "placeholder")]
    spans = [
        _span(
            copy.target.start,
            copy.target.end,
            "exact" if copy.target.end <= plan.exact_length else "copied",
            donor=int(copy.donor),
            shift=copy.shift,
        )
        for copy in plan.copies
    ]
    # What is computed while the rest is read is no repair, though a donor has it.
    repairs = [repair for repair in plan.repairs if repair.start >= plan.num_ahead]
    for placeholder in plan.placeholders:
        start = placeholder.start
        for repair in repairs:
            part = placeholder.intersection(repair)
            if not part:
                continue
            if part.start > start:
                spans.append(_span(start, part.start, "placeholder"))
            spans.append(_span(part.start, part.end, "repair"))
            start = part.end
        if start < placeholder.end:
            spans.append(_span(start, placeholder.end, "placeholder"))
    return _merged(sorted(spans, key=lambda span: int(span["start"])))


def _merged(spans: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join copies that follow each other: a donor's KV lies in many segments, which no reader asks for."""
    merged: list[dict[str, Any]] = []
    for span in spans:
        last = merged[-1] if merged else span
        if last is not span and last["end"] == span["start"] and _continues(last, span):
            last["end"] = span["end"]
        else:
            merged.append(span)
    return merged


def _continues(last: Mapping[str, Any], span: Mapping[str, Any]) -> bool:
    return all(last[field] == span[field] for field in ("kind", "donor", "shift"))


def _span(
    start: int, end: int, kind: str, *, donor: int | None = None, shift: int | None = None
) -> dict[str, Any]:
    return {"start": start, "end": end, "kind": kind, "donor": donor, "shift": shift}


def _donors(
    plan: Plan | NoPlan, candidates: Sequence[Candidate], outcomes: Mapping[int, str]
) -> list[dict[str, Any]]:
    """List all candidates. One that the composition used is `left_out` if the plan copies nothing from it."""
    used = plan.num_from if isinstance(plan, Plan) else Counter()
    donors = []
    for candidate in candidates:
        num_used, outcome = used[NodeId(candidate.prompt_id)], outcomes.get(candidate.prompt_id, "gone")
        donors.append(
            {
                "node": candidate.prompt_id,
                "sources": sorted(candidate.sources),
                "score": candidate.score,
                "similarity": candidate.similarity,
                "tokens_used": num_used,
                "outcome": "left_out" if outcome == DonorReason.USED and not num_used else outcome,
            }
        )
    return donors
