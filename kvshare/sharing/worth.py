"""
What is worth its time, by the measured rates: looking a prompt up, embedding it, carrying a plan out.

What the rates advise against is done now and then all the same, so that a wrong rate does not stay: see
`CostModel.tries`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import NamedTuple

from kvshare.reasons import Reason
from kvshare.sharing.cost import EMBEDDING, LOAD, LOOKUP, PASS, PLANNING, PREFILL, CostModel
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.rates import MinSaved, PrefillWork, Queue, Rates
from vector_index import Candidate, Nomination

_FEW_CHANGES = 0.1  # share of a prompt that is computed with a good donor
_LEAST_COMPUTED = 0.02  # share of a prompt whose donors have all of it, by their estimate
_UNSURE = 0.1  # share of a prompt by which the estimate of what donors have of it may be too low
_UNFOUND = 0.02  # share of a prompt's own prefill that a search may take while it finds no donors
_FOUND = 0.1  # share that it may take while it always finds some
_HARMLESS_S = 0.0005  # any search may take this long
_FAR = 0.5  # share of a prompt: with more computed, by the estimate, most plans are refused
_AT_FIRST = {LOOKUP: 1.0, EMBEDDING: 0.4, PLANNING: 0.4}  # the chance that one leads to a plan
_NEWEST = 0.25  # weight of the last search in that chance
_ANY = MinSaved(-math.inf)


def _computed(candidates: Sequence[Candidate]) -> float:
    """Return which share of a prompt is computed with these donors, as far as the search estimates it."""
    return max(_LEAST_COMPUTED, 1 - sum(candidate.score for candidate in candidates) - _UNSURE)


class Search(Enum):
    """The kinds of lookup. A prefix takes microseconds, passages take a fraction of a millisecond."""

    NOTHING = auto()
    PREFIX = auto()
    PASSAGES = auto()  # and a prefix


class _Shortest(NamedTuple):
    """Tokens of the shortest prompts that pay a lookup, by these rates: for a prefix, and for passages."""

    rates: Rates
    threshold: MinSaved
    prefix: float
    passages: float


class Worth:
    """Asked by the steps of sharing for one request. Thread-safe."""

    def __init__(
        self, cost: CostModel, *, later: Callable[[Callable[[], None]], object] | None = None
    ) -> None:
        """`later`: makes a call elsewhere, so that no request waits for `_shortest` after rates changed."""
        self._cost, self._later = cost, later
        self._known: _Shortest | None = None  # computed once for the same rates
        # Of prompts of so many bits' length: how likely a search finds what a plan copies from.
        self._chances: dict[tuple[str, int], float] = {}

    def shortest(self, limits: PlannerLimits) -> float:
        """Return the tokens of the shortest prompt whose lookup may save more than it takes; or infinity."""
        return self._shortest(limits).prefix

    def lookup(self, num_tokens: int, limits: PlannerLimits) -> bool:
        """Return whether a prompt is long enough for a lookup to save more than it takes."""
        return num_tokens >= self.shortest(limits)

    def passages(self, num_tokens: int, limits: PlannerLimits) -> bool:
        """Return the same for the search for passages, whose reuse takes a pass."""
        return num_tokens >= self._shortest(limits).passages

    def planning(self, num_tokens: int, nomination: Nomination, limits: PlannerLimits) -> bool:
        """
        Return whether a plan may pay, by what its donors are estimated to share with the prompt.

        Planning itself must pay, too. If prompts share little, most plans are refused, so planning may then
        take only a small share of the prefill.
        """
        scores = [candidate.score for candidate in nomination.candidates]
        if 0.0 in scores:
            return True
        computed = _computed(nomination.candidates)
        rates, prefix = self._cost.hopeful(), nomination.num_prefix_tokens
        rest = PrefillWork(num_tokens - prefix, (num_tokens**2 - prefix**2) / 2, num_reused=prefix)
        cases = rates.best_case(num_tokens, computed=computed), rates.estimate(num_tokens, rest)
        planning_s = rates.planning.seconds(num_tokens)
        if not any(limits.threshold.pays(case.full_s, case.shared_s + planning_s) for case in cases):
            return False
        is_worth = computed < _FAR or self._may_take(PLANNING, planning_s, num_tokens, limits)
        return is_worth or self._cost.tries(LOOKUP)

    @staticmethod
    def unplanned(nomination: Nomination, min_run: int) -> Reason:
        """Return why no plan was tried: planning does not pay, or no candidate is similar to the prompt."""
        shared = sum(candidate.score for candidate in nomination.candidates)
        is_similar = shared >= _UNSURE or nomination.num_prefix_tokens >= min_run
        return Reason.DOES_NOT_PAY if is_similar else Reason.NO_CANDIDATES

    def _shortest(self, limits: PlannerLimits) -> _Shortest:
        rates, threshold, last = self._cost.rates, limits.threshold, self._known
        if last is None or last.threshold is not threshold:
            return self._found_shortest(rates, threshold)
        if last.rates is not rates:
            if self._later is None:
                return self._found_shortest(rates, threshold)
            self._known = last._replace(rates=rates)  # so that no other request asks for it
            self._later(lambda: self._refresh(threshold))
        return self._known or last

    def _refresh(self, threshold: MinSaved) -> None:
        self._found_shortest(self._cost.rates, threshold)

    def _found_shortest(self, rates: Rates, threshold: MinSaved) -> _Shortest:
        hopeful = self._cost.hopeful()
        break_evens = (
            hopeful.break_even(computed=computed, threshold=threshold, with_lookup=True)
            for computed in (0.0, _FEW_CHANGES)
        )
        lengths = (math.inf if length is None else length for length in break_evens)
        self._known = known = _Shortest(rates, threshold, *lengths)
        return known

    def search(self, num_tokens: int, limits: PlannerLimits) -> Search:
        """
        Return the widest search that may save more than it takes. If few of the latest prompts had a donor,
        it must not slow a prompt without one. Now and then a wider search is made, to measure it.
        """
        seconds = self._cost.rates.lookup.seconds(num_tokens)
        is_worth = self.passages(num_tokens, limits) and (
            not self._cost.knows(PREFILL) or self._may_take(LOOKUP, seconds, num_tokens, limits)
        )
        if is_worth or self._cost.tries(LOOKUP):
            return Search.PASSAGES
        return Search.PREFIX if self.lookup(num_tokens, limits) else Search.NOTHING

    def embedding(self, num_tokens: int, limits: PlannerLimits) -> bool:
        """
        Return whether to make an embedding: it takes only a small share of what a donor would save, and does
        not slow a prompt without a donor. One in many is made anyway, to learn whether it finds donors.

        None is made before embeddings and prefills were measured. Embeddings are measured when prompts are
        stored, so no request waits for a trial.
        """
        share, rates = limits.dense_max_share, self._cost.rates
        if share is None:
            return True
        if not (self._cost.knows(EMBEDDING) and self._cost.knows(PREFILL)):
            return False
        seconds = rates.embedding.seconds(num_tokens)
        if seconds > share * rates.best_case(num_tokens, computed=_FEW_CHANGES).saved_s:
            return False
        return self._may_take(EMBEDDING, seconds, num_tokens, limits) or self._cost.tries(EMBEDDING)

    def learn(self, lookup: Lookup) -> None:
        """
        Learn how long the searches for a prompt took, how long planning, and what they found.

        A search for a prefix only teaches nothing: it is always worth its microseconds.
        """
        num_tokens, embedding_s = lookup.num_tokens, lookup.stage_seconds.get("embedding")
        if "fingerprint" in lookup.stage_seconds:
            planning_s = lookup.stage_seconds.get("plan", 0.0) if lookup.candidates else 0.0
            searching_s = lookup.seconds - (embedding_s or 0.0) - planning_s
            self._cost.observe_lookup(num_tokens, searching_s, planning_s=planning_s)
            self._note(LOOKUP, num_tokens, has_found=lookup.copies_by("fingerprint"))
            if planning_s and _computed(lookup.candidates) >= _FAR:
                copies = isinstance(lookup.plan, Plan) and lookup.plan.num_copied > 0
                self._note(PLANNING, num_tokens, has_found=copies)
        if embedding_s is not None:
            self._cost.observe_embedding(num_tokens, embedding_s)
            self._note(EMBEDDING, num_tokens, has_found=lookup.copies_by("embedding", alone=True))

    def _note(self, kind: str, num_tokens: int, *, has_found: bool) -> None:
        chance = self._chance(kind, num_tokens)
        self._chances[kind, num_tokens.bit_length()] = chance + _NEWEST * (has_found - chance)

    def _chance(self, kind: str, num_tokens: int) -> float:
        return self._chances.get((kind, num_tokens.bit_length()), _AT_FIRST[kind])

    def _may_take(self, kind: str, seconds: float, num_tokens: int, limits: PlannerLimits) -> bool:
        """
        Return whether a search may take so long: a prompt without a donor must not be slowed, and the more
        prompts have one, the more it may take. Always true if plans may lose time, or nothing is learned.
        """
        if not self._cost.is_learning or limits.threshold.min_saved_s < 0:
            return True
        share = max(_UNFOUND, _FOUND * self._chance(kind, num_tokens))
        return seconds <= max(_HARMLESS_S, share * self._cost.rates.full_s(num_tokens))

    def plan(
        self,
        make: Callable[[PlannerLimits, Rates], Plan | NoPlan],
        limits: PlannerLimits,
        queue: Queue,
    ) -> Plan | NoPlan:
        """Return the plan that pays, or one that measures rates which may be wrong to refuse it."""
        excess_s = self._cost.waits.excess_s(queue.computing_s)
        rates = replace(self._cost.rates, queue=replace(queue, excess_s=excess_s))
        plan = make(limits, rates)
        if not isinstance(plan, NoPlan) or not plan.refused_by_rates:
            return plan
        tried, has_pass = None, bool(rates.num_extra_passes)
        if not (self._cost.knows(LOAD) and (self._cost.knows(PASS) or not has_pass)):
            tried = make(replace(limits, threshold=_ANY), rates)
            if isinstance(tried, Plan) and not self._may_pay(tried, limits.threshold, queue):
                return plan
        # Where a plan has a pass, carrying it out measures the load, too. All others may come from blocks.
        is_due = self._cost.tries(PASS if has_pass and self._cost.knows(LOAD) else LOAD)
        return (tried or make(replace(limits, threshold=_ANY), rates)) if is_due else plan

    def _may_pay(self, plan: Plan, threshold: MinSaved, queue: Queue) -> bool:
        """Return whether it pays if everything that was not measured costs nothing."""
        rates = self._cost.hopeful()
        work = plan.work(num_extra_passes=rates.num_extra_passes, queue=queue)
        case = rates.estimate(plan.num_tokens, work)
        return threshold.pays(case.full_s, case.shared_s)
