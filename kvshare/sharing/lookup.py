"""The result of one request's search: the plan, the KV that it copies, and where the time went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from delta_tree import NodeId, SegmentId
from kvshare.kv.tier import PendingReads
from kvshare.requests import Decision, SharingReport
from kvshare.sharing.plan import NoPlan, Plan
from vector_index import Candidate
from vector_index.nomination import Source

if TYPE_CHECKING:
    from kvshare.kv.sequence import SegmentKV  # imports torch


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """
    The result of `Sharing.find_plan`.

    `segments` holds the KV in memory until it is written to the request's slots; `reads` brings more of it
    while the beginning of the prompt is computed.
    `unreadable`: donors with missing KV. `unknown`: prompts that only the index has. `note_use` removes both.
    """

    plan: Plan | NoPlan
    segments: Mapping[SegmentId, SegmentKV] = field(default_factory=dict)
    candidates: tuple[Candidate, ...] = ()
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    namespace: str = ""
    num_tokens: int = 0  # of the prompt, if it was looked up
    seconds: float = 0.0  # all stages, and waiting between them
    num_failures: int = 0  # parts of the nominator that failed
    unreadable: tuple[NodeId, ...] = ()
    unknown: tuple[int, ...] = ()
    reads: PendingReads | None = None

    def cancel(self) -> None:
        """Read nothing more: no request uses this."""
        if self.reads is not None:
            self.reads.cancel()

    def report(self, num_tokens: int) -> SharingReport:
        """Count the tokens by where their KV comes from, for usage and metrics."""
        plan = self.plan
        if isinstance(plan, Plan):
            counts = plan.num_exact, plan.num_copied, plan.num_recomputed, plan.num_repaired
            # What is computed ahead of a read is no difference.
            first_difference = plan.exact_length if plan.num_ahead else plan.placeholders[0].start
            decision, donors = plan.decision, plan.donors
            saved_s = plan.estimate.saved_s
        else:
            counts, decision, donors, first_difference = (0, 0, num_tokens, 0), Decision.FULL, (), 0
            saved_s = 0.0
        return SharingReport(
            *counts, decision, plan.reason, donors, plan.prediction, first_difference, saved_s
        )

    def copies_by(self, source: Source, *, alone: bool = False) -> bool:
        """Return whether the plan copies a donor that `source` found; `alone`: and no other source did."""
        found_by = {
            each.prompt_id
            for each in self.candidates
            if source in each.sources and not (alone and len(each.sources) > 1)
        }
        return isinstance(self.plan, Plan) and not found_by.isdisjoint(self.plan.donors)

    def after_waiting(self, seconds: float | None) -> Lookup:
        """Return the same with the wait for similar prompts as one of its stages; None: it did not wait."""
        if seconds is None:
            return self
        return replace(self, stage_seconds={**self.stage_seconds, "wait": seconds})
