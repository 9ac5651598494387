"""What a request has used, in OpenAI's `usage` with KVShare's account of where the prompt's KV came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvshare.engines.base import SharingReport

_BY_BOLDNESS = ("approx", "exact", "full")


def combine(reports: Sequence[SharingReport]) -> SharingReport:
    """One account of several prompts: counts added, the boldest decision, the first reason. No donors."""
    decisions = {report.decision for report in reports}
    return SharingReport(
        num_exact=sum(report.num_exact for report in reports),
        num_copied=sum(report.num_copied for report in reports),
        num_recomputed=sum(report.num_recomputed for report in reports),
        num_repaired=sum(report.num_repaired for report in reports),
        decision=next((decision for decision in _BY_BOLDNESS if decision in decisions), "full"),
        reason=next((report.reason for report in reports if report.reason is not None), None),
    )


def usage_object(report: SharingReport, *, num_completion_tokens: int) -> dict[str, Any]:
    """`cached_tokens` is always a number: 0 where nothing was shared. Donors are never named."""
    return {
        "prompt_tokens": report.num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": report.num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": report.num_cached},
        "kvshare": {
            "exact": report.num_exact,
            "copied": report.num_copied,
            "recomputed": report.num_recomputed,
            "repaired": report.num_repaired,
            "decision": report.decision,
            "reason": report.reason,
        },
    }
