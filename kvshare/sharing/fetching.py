"""
Gets the KV of plans from their tier. Part of it may be on disk: a read may take only as long as that pays.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from delta_tree import Node
from kvshare.kv.tier import Fetched, Tier
from kvshare.sharing.cost import CostModel
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.rates import DISK, MinSaved
from kvshare.telemetry import Component, FallbackReason, Telemetry

_LATE = 3.0  # a read is late after this many times its planned time
_HARMLESS = 0.03  # any read may take this share of a full prefill


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
        Get the KV of a plan. A read from disk that takes longer than `patience_s` is late.

        `stages`: the time is added to its "fetch"
        """
        rates, num_on_disk = self._cost.rates, self._num_on_disk(plan)
        planned_s = rates.load_s(num_on_disk, place=DISK)
        within_s = self.patience_s(plan, threshold)
        began = time.perf_counter()
        fetched = self._tier.fetch({copy.segment_id for copy in plan.copies}, within_s=within_s)
        stages["fetch"] += time.perf_counter() - began
        if fetched.read_bytes:
            self._cost.observe_load(fetched.read_bytes, fetched.read_s, place=DISK)
        if fetched.late:
            self._telemetry.fallback(Component.TIER, FallbackReason.TIMEOUT)
            if (
                fetched.is_slow and not fetched.read_bytes and within_s > planned_s
            ):  # the read takes at least `within_s`, so the rate of the disk is at most this
                self._cost.observe_load(num_on_disk * rates.bytes_per_token, within_s, place=DISK)
        return fetched

    def patience_s(self, plan: Plan, threshold: MinSaved) -> float:
        """
        Return how long to wait for a read from disk: `_LATE` times the planned time, while that saves time.

        If no read is planned: as long as the plan saves. A small share of the prefill is always allowed, so
        that a disk that was slow once is measured again. A read may lose the time that `threshold` allows.
        """
        num_on_disk, full_s, saved_s = self._num_on_disk(plan), plan.estimate.full_s, plan.estimate.saved_s
        planned_s = self._cost.rates.load_s(num_on_disk, place=DISK) if num_on_disk else math.inf
        within_s = max(_HARMLESS * full_s, min(_LATE * planned_s, saved_s))
        return within_s if threshold.min_saved_s >= 0 else max(within_s, saved_s - threshold.min_saved_s)

    def _num_on_disk(self, plan: Plan) -> int:
        return plan.num_in(self._tier.on_disk)
