"""
Gets the KV of plans from their tier. Part of it may be on disk: a read may take only as long as that pays.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from delta_tree import Node
from kvshare.kv.tier import Fetched, PendingReads, ReadsMeanwhile, Tier
from kvshare.sharing.cost import CostModel
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.rates import DISK, MinSaved
from kvshare.sharing.splitting import OF_STEPS
from kvshare.telemetry import Component, FallbackReason, Telemetry

_LATE = 3.0  # times the planned time, then a read is late
_LEAST_BYTES = 1 << 20  # that a disk reads before any of it counts, see `tiers/pace.py`
_HARMLESS = 0.02  # share of a full prefill that any read may take


class Fetching:
    """Fetches KV, and learns the rate of the disk from its reads."""

    def __init__(self, tier: Tier, cost: CostModel, telemetry: Telemetry) -> None:
        self._tier, self._cost, self._telemetry = tier, cost, telemetry

    def near(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the nodes of which no segment is on disk only."""
        on_disk = self._tier.on_disk
        return [node for node in nodes if not any(entry in on_disk for entry in node.pieces.segment_ids)]

    def fastest(
        self, planned: Callable[[Sequence[Node]], Plan | NoPlan], nodes: Sequence[Node]
    ) -> Plan | NoPlan:
        """
        Plan with all donors. If KV is read from disk, or no plan pays, also plan with the donors in memory
        alone; return the faster plan.
        """
        self._cost.try_disk_again()
        plan = planned(nodes)
        if isinstance(plan, Plan) and not plan.num_in(self._tier.on_disk):
            return plan
        near = self.near(nodes)
        if not near or len(near) == len(nodes):
            return plan
        other = planned(near)
        if isinstance(plan, NoPlan) or isinstance(other, NoPlan):
            return other if isinstance(plan, NoPlan) else plan
        return min(plan, other, key=lambda each: each.estimate.shared_s)

    def fetch(self, plan: Plan, threshold: MinSaved, stages: dict[str, float]) -> Fetched:
        """
        Return the KV of a plan. The wait for the disk is about as long as planned, at most what the plan
        saves. If the disk's pace says that it will be late, the wait is only a small share of the prefill.
        That much is always allowed, so that a disk that was slow once is measured again.

        If the plan computes a beginning, and the tier can read meanwhile, nothing is waited for: the result
        has `reads`. `stages`: the time is added to its "fetch"
        """
        num_on_disk, within_s = self._num_on_disk(plan), self.patience_s(plan, threshold)
        doubt_s = _HARMLESS * plan.estimate.full_s if threshold.min_saved_s >= 0 else math.inf
        # The end first: it takes longest to compute.
        wanted = dict.fromkeys(copy.segment_id for copy in reversed(plan.copies))
        began = time.perf_counter()
        if plan.num_ahead and isinstance(self._tier, ReadsMeanwhile):
            fetched = self._tier.begin(wanted, within_s=within_s, doubt_s=doubt_s)
        else:
            fetched = self._tier.fetch(wanted, within_s=within_s, doubt_s=doubt_s)
        stages["fetch"] += time.perf_counter() - began
        reads = fetched.reads
        if reads is not None and not (fetched.late or fetched.missing):
            return replace(fetched, reads=_NotedReads(reads, partial(self._note, num_on_disk)))
        if reads is not None:
            reads.cancel()
        self._note(num_on_disk, fetched)
        return replace(fetched, reads=None)

    def _note(self, num_on_disk: int, fetched: Fetched) -> None:
        """Learn from the reads of a plan, of which so many tokens were on disk before."""
        num_bytes, read_s = fetched.read_bytes, fetched.read_s
        if fetched.late:
            self._telemetry.fallback(Component.TIER, FallbackReason.TIMEOUT)
        if fetched.is_slow:  # what all of it would have taken at this pace; where none is known, at least
            num_bytes = num_on_disk * self._cost.rates.bytes_per_token
            known = fetched.read_bytes or (_LEAST_BYTES if fetched.has_pace else num_bytes)
            read_s *= max(1.0, num_bytes / max(1, known))
        if num_bytes:
            self._cost.observe_load(num_bytes, read_s, place=DISK, is_late=fetched.is_slow)

    def patience_s(self, plan: Plan, threshold: MinSaved) -> float:
        """
        Return how long to wait for a read from disk; where none is planned, as long as the plan saves. A plan
        that computes ahead waits while it computes, or as long as it was planned to, and little longer.
        """
        num_on_disk, full_s, saved_s = self._num_on_disk(plan), plan.estimate.full_s, plan.estimate.saved_s
        planned_s = self._cost.rates.load_s(num_on_disk, place=DISK) if num_on_disk else math.inf
        within_s = max(_HARMLESS * full_s, min(_LATE * planned_s, saved_s))
        if plan.num_ahead:
            ahead_s = OF_STEPS * self._cost.rates.ahead_s(plan.num_ahead)
            within_s = max(ahead_s, planned_s if num_on_disk else 0.0) + _HARMLESS * full_s
        return within_s if threshold.min_saved_s >= 0 else max(within_s, saved_s - threshold.min_saved_s)

    def _num_on_disk(self, plan: Plan) -> int:
        return plan.num_in(self._tier.on_disk)


class _NotedReads:
    """A `PendingReads` whose result is noted."""

    def __init__(self, reads: PendingReads, note: Callable[[Fetched], object]) -> None:
        self._reads, self._note = reads, note

    def wait(self, at_most_s: float) -> bool:
        return self._reads.wait(at_most_s)

    def end(self) -> Fetched:
        fetched = self._reads.end()
        self._note(fetched)
        return fetched

    def cancel(self) -> None:
        self._reads.cancel()
