"""
What is worth its time, by the measured rates: looking a prompt up, embedding it, carrying a plan out.

What the rates advise against is done now and then all the same, so that a wrong rate does not stay: see
`CostModel.tries`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from kvshare.reasons import Reason
from kvshare.sharing.cost import EMBEDDING, LOAD, LOOKUP, PASS, PREFILL, CostModel
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.rates import MinSaved, PrefillWork, Queue, Rates
from vector_index import Nomination

_FEW_CHANGES = 0.1  # share of a prompt that is computed with a good donor
_UNSURE = 0.1  # share of a prompt by which the estimate of what donors have of it may be too low
_ANY = MinSaved(-math.inf)


class _Shortest(NamedTuple):
    """Tokens of the shortest prompts that pay a lookup, by these rates: for a prefix, and for passages."""

    rates: Rates
    threshold: MinSaved
    prefix: float
    passages: float


class Worth:
    """Asked by the steps of sharing for one request. Thread-safe."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._known: _Shortest | None = None  # computed once for the same rates

    def shortest(self, limits: PlannerLimits) -> float:
        """The tokens of the shortest prompt whose lookup may save more than it takes; or infinity."""
        return self._shortest(limits).prefix

    def lookup(self, num_tokens: int, limits: PlannerLimits) -> bool:
        """Whether a prompt is so long that a lookup may save more than it takes."""
        return num_tokens >= self.shortest(limits)

    def passages(self, num_tokens: int, limits: PlannerLimits) -> bool:
        """The same for the search for passages, whose reuse takes a pass."""
        return num_tokens >= self._shortest(limits).passages

    def planning(self, num_tokens: int, nomination: Nomination, limits: PlannerLimits) -> bool:
        """Whether a plan may pay by what its donors share with the prompt, as far as that is estimated."""
        scores = [candidate.score for candidate in nomination.candidates]
        computed = 1 - sum(scores) - _UNSURE
        if computed <= 0 or 0.0 in scores:
            return True
        rates, prefix = self._hopeful(), nomination.num_prefix_tokens
        behind = PrefillWork(num_tokens - prefix, (num_tokens**2 - prefix**2) / 2, num_reused=prefix)
        cases = rates.best_case(num_tokens, computed=computed), rates.estimate(num_tokens, behind)
        return any(limits.threshold.pays(case.full_s, case.shared_s) for case in cases)

    def _shortest(self, limits: PlannerLimits) -> _Shortest:
        rates, threshold, known = self._cost.rates, limits.threshold, self._known
        if known is None or known.rates is not rates or known.threshold is not threshold:
            hopeful = self._hopeful()
            found = (
                hopeful.break_even(computed=computed, threshold=threshold, with_lookup=True)
                for computed in (0.0, _FEW_CHANGES)
            )
            lengths = (math.inf if length is None else length for length in found)
            known = self._known = _Shortest(rates, threshold, *lengths)
        return known

    def _hopeful(self) -> Rates:
        """
        The rates, where loads and passes cost nothing until they are measured: a wrong prior would refuse
        what corrects it.
        """
        rates, cost = self._cost.rates, self._cost
        return replace(
            rates,
            loads=rates.loads if cost.knows(LOAD) else {},
            pass_s=rates.pass_s if cost.knows(PASS) else 0.0,
        )

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
        tried, has_pass = None, bool(rates.num_extra_passes)
        if not (self._cost.knows(LOAD) and (self._cost.knows(PASS) or not has_pass)):
            tried = make(replace(limits, threshold=_ANY), rates)
            if isinstance(tried, Plan) and not self._may_pay(tried, limits.threshold):
                return plan
        # Where a plan has a pass, carrying it out measures the load, too.
        is_due = self._cost.tries(PASS if has_pass else LOAD)
        return (tried or make(replace(limits, threshold=_ANY), rates)) if is_due else plan

    def _may_pay(self, plan: Plan, threshold: MinSaved) -> bool:
        """Whether it pays if what was not measured costs nothing."""
        rates = self._hopeful()
        case = rates.estimate(plan.num_tokens, plan.work(num_extra_passes=rates.num_extra_passes))
        return threshold.pays(case.full_s, case.shared_s)
