"""Drafts the node to store from a replica's report, once the report fits the request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from delta_tree import Node, NodeDraft, NodeId, Span, token_ids
from kvshare.errors import KVShareError
from kvshare.fleet.routed_request import RoutedRequest
from kvshare.sharing.node_draft import StoredSpan, draft_node, find_parent
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.vllm_protocol.messages import FinishedReport, Prefilled


class BadReportError(KVShareError):
    """The report of a connector does not fit the ticket."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"the replica's report does not fit the request: {problem}. Install the same kvshare there and "
            "here; `kvshare doctor` compares the versions"
        )


def draft_of(
    request: RoutedRequest, report: Prefilled | FinishedReport, *, node_of: Callable[[NodeId], Node | None]
) -> NodeDraft | None:
    """
    Return the node for what a replica retained of a request, from the executed plan and the new segments.

    Returns: None if nothing was retained
    Raises:  BadReportError if copies and segments do not cover the retained positions exactly once
    """
    if not report.stored:
        return None
    routed, prompt = request.routed, request.incoming.prompt
    assert prompt is not None, "it had a ticket"
    assert routed.ticket is not None, "found by its ticket"
    plan = _executed(routed.plan, report.used, [entry.span for entry in report.repaired])
    output_ids = report.output_ids if isinstance(report, FinishedReport) else ()
    stored = [
        StoredSpan(entry.segment_id, Span(entry.start, entry.start + entry.length), entry.num_bytes)
        for entry in report.stored
    ]
    copied = [copy.target for copy in plan.copies] if isinstance(plan, Plan) else []
    num_retained = _covered(copied + [entry.span for entry in stored])
    tokens = [*prompt.token_ids.tolist(), *output_ids]
    if num_retained > len(tokens) or (output_ids and num_retained != len(tokens)):
        most = f"{prompt.num_tokens} of the prompt and {len(output_ids)} of the answer"
        raise BadReportError(f"it retained {num_retained} tokens, expected {most}")
    namespace, parent = routed.ticket.namespace, find_parent(plan, node_of)
    return draft_node(token_ids(tokens[:num_retained]), plan, stored, namespace=namespace, parent=parent)


def _executed(plan: Plan | NoPlan, used: Sequence[int], repaired: Sequence[Span]) -> Plan | NoPlan:
    """The plan with the copies that were used and the repairs; everything else was computed."""
    if not used:
        return NoPlan()
    if isinstance(plan, NoPlan) or len(set(used)) != len(used) or max(used) >= len(plan.copies):
        raise BadReportError("it used copies that are not in the plan")
    executed = replace(plan, copies=tuple(plan.copies[index] for index in sorted(used)))
    return executed if plan.order is None else executed.with_repairs(repaired)


def _covered(spans: Sequence[Span]) -> int:
    """Count the positions from 0 that the spans cover. Raises BadReportError for gaps and overlaps."""
    end = 0
    for span in sorted(spans, key=lambda entry: entry.start):
        if span.start != end or not len(span):
            raise BadReportError(f"expected KV from position {end} on, got [{span.start}, {span.end})")
        end = span.end
    return end
