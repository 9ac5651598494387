"""
What is worth its time, by the measured rates: looking a prompt up, embedding it, carrying a plan out.

What the rates advise against is done now and then all the same, so that a wrong rate does not stay: see
`CostModel.tries`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from kvshare.reasons import Reason
from kvshare.sharing.cost import EMBEDDING, LOAD, LOOKUP, PASS, PREFILL, CostModel
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.rates import MinSaved, Queue, Rates

_FEW_CHANGES = 0.1  # share of a prompt that is computed with a donor that was found by its embedding
_ANY = MinSaved(-math.inf)


class Worth:
    """Asked by the steps of sharing for one request. Thread-safe."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._shortest: tuple[Rates, MinSaved, float] | None = None  # computed once for the same rates

    def lookup(self, num_tokens: int, limits: PlannerLimits) -> bool:
        """
        Whether a prompt is so long that a lookup may save more than it takes.

        Until a load was measured, it is taken to cost nothing: a wrong prior would refuse what corrects it.
        """
        rates, threshold = self._cost.rates, limits.threshold
        known = self._shortest
        if known is None or known[0] is not rates or known[1] is not threshold:
            hopeful = rates if self._cost.knows(LOAD) else replace(rates, loads={})
            shortest = hopeful.break_even(computed=0.0, threshold=threshold, with_lookup=True)
            known = self._shortest = (rates, threshold, math.inf if shortest is None else shortest)
        return num_tokens >= known[2]

    def lookup_now(self, num_tokens: int, limits: PlannerLimits) -> bool:
        """The same, or whether one is due to measure what it takes."""
        return self.lookup(num_tokens, limits) or self._cost.tries(LOOKUP)

    def embedding(self, num_tokens: int, limits: PlannerLimits) -> bool:
        """
        Whether an embedding takes only a small share of what the donor that it may find would save.

        Not before both are measured: embeddings are whenever a prompt is stored, so no request waits for one
        to be tried.
        """
        share, rates = limits.dense_max_share, self._cost.rates
        if share is None:
            return True
        if not (self._cost.knows(EMBEDDING) and self._cost.knows(PREFILL)):
            return False
        saved_s = rates.best_case(num_tokens, computed=_FEW_CHANGES).saved_s
        return rates.embedding.seconds(num_tokens) <= share * saved_s

    def plan(
        self,
        make: Callable[[PlannerLimits, Rates], Plan | NoPlan],
        limits: PlannerLimits,
        queue: Queue,
    ) -> Plan | NoPlan:
        """The plan that pays; or one to measure what it takes, as the rates that refuse it may be wrong."""
        rates = replace(self._cost.rates, queue=queue)
        plan = make(limits, rates)
        if not isinstance(plan, NoPlan) or plan.reason is not Reason.DOES_NOT_PAY:
            return plan
        # Where a plan has a pass, carrying it out measures the load, too.
        is_due = self._cost.tries(PASS if rates.num_extra_passes else LOAD)
        return make(replace(limits, threshold=_ANY), rates) if is_due else plan
