"""
Makes a plan from the tokens of a prompt and its candidates, as a pure function.

The exact prefix is copied first, then matches at the same position, then moved matches. Everything else, and
what is repaired, is a placeholder. If the gate refuses every plan, the result is NoPlan(reason).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from delta_tree import Composition, Node, Segment, SegmentId, Span, Target, TokenIds, compose
from kvshare.reasons import Reason
from kvshare.requests import Prediction
from kvshare.sharing.approximation import Approximation
from kvshare.sharing.limits import PlannerLimits, exact_part, is_exact
from kvshare.sharing.media import composed_with_whole_media
from kvshare.sharing.plan import NoPlan, Plan, small_shift, within
from kvshare.sharing.rates import Estimate, Rates
from kvshare.sharing.splitting import split_reads

_LIGHT = 0.1  # share of a prompt; with fewer repairs no other composition is tried
_ABOUT_EQUAL = 0.02  # of what a plan saves
_WITHHELD_BY = 2  # donors that are looked at for a reason: it must not delay the prompt


def make_plan(
    token_ids: TokenIds,
    candidates: Sequence[Node],
    segment_of: Callable[[SegmentId], Segment],
    *,
    approximate: bool,
    limits: PlannerLimits,
    rates: Rates,
    media: tuple[Span, ...] = (),
) -> Plan | NoPlan:
    """
    The fastest plan for a prompt of T tokens with candidates of the same namespace.

    Shapes:  token_ids (T,) int32
    Units:   `media`: token positions, ascending; each of these is copied as a whole or not at all
    Returns: a Plan that computes at least the last token, or NoPlan
    """
    if len(token_ids) < limits.sharing.min_prompt_tokens:
        return NoPlan(Reason.SHORT_PROMPT)
    if not candidates:
        return NoPlan(Reason.NO_CANDIDATES)
    donors = [node for candidate in candidates if (node := limits.usable(candidate)) is not None]
    search = _Search(token_ids, segment_of, limits, rates, approximate=approximate, media=media)
    return search.best_plan(donors)


class _Search:
    """Composes one prompt in several ways, and notes which approximate plans pass the gate."""

    def __init__(
        self,
        token_ids: TokenIds,
        segment_of: Callable[[SegmentId], Segment],
        limits: PlannerLimits,
        rates: Rates,
        *,
        approximate: bool,
        media: tuple[Span, ...],
    ) -> None:
        self._token_ids, self._segment_of, self._media = token_ids, segment_of, media
        self._target = Target(token_ids, min_run=limits.sharing.min_run)  # of all its compositions
        self._limits, self._rates = limits, rates
        self._approximate = approximate
        self._accepted: list[Plan] = []
        self._refusal: Reason | None = None  # the first one
        self._prediction: Prediction | None = None  # of the plan that was tried last

    def best_plan(self, donors: Sequence[Node]) -> Plan | NoPlan:
        composition = self._first_composition(donors)
        exact = _exact_plan(composition, self._rates, min_length=self._limits.sharing.min_run)
        exact = exact and self._split(exact)
        if self._approximate:
            self._try_approximate(composition, donors, exact)
            self._try_originals(donors, exact)
        if self._accepted:
            return _preferred(self._accepted)
        if exact is None:
            return self._refused(Reason.NOTHING_IN_COMMON, donors)
        if not self._limits.threshold.pays(exact.estimate.full_s, exact.estimate.shared_s):
            return self._refused(Reason.DOES_NOT_PAY, donors)
        return replace(exact, reason=self._refusal, prediction=self._prediction)

    def _refused(self, last: Reason, donors: Sequence[Node]) -> NoPlan:
        """Make no plan, because of what was refused first: what users can change. `last`: without that."""
        first = self._refusal
        if not self._approximate and self._withholds(donors):
            first = Reason.EXACT_ONLY
        by_rates = Reason.DOES_NOT_PAY in (last, self._refusal)
        return NoPlan(first or last, self._prediction, refused_by_rates=by_rates)

    def _withholds(self, donors: Sequence[Node]) -> bool:
        """Return whether the best donors share text that the mode of the request does not permit to copy."""
        best, may_move = donors[:_WITHHELD_BY], self._limits.can_move_keys
        return self._composed(best, max_donors=1, may_move=may_move, gives_reasons=True).withheld

    def _composed(
        self, donors: Sequence[Node], *, max_donors: int, may_move: bool, gives_reasons: bool = False
    ) -> Composition:
        composition = compose(
            self._target,
            donors,
            self._segment_of,
            max_donors=max_donors,
            may_move=may_move,
            min_run=self._limits.sharing.min_run,
            max_generation=self._limits.policy.max_generation,
            allow_approximate=self._approximate,
            gives_reasons=gives_reasons,
        )
        return composed_with_whole_media(composition, self._media)

    def _first_composition(self, donors: Sequence[Node]) -> Composition:
        """Compose a plan from all donors; once more without moves if the engine cannot move keys."""
        max_donors = self._limits.sharing.max_donors
        composition = self._composed(donors, max_donors=max_donors, may_move=True)
        if self._limits.can_move_keys or not any(copy.shift for copy in composition.copies):
            return composition
        self._refusal = Reason.ROTATION_UNKNOWN
        return self._composed(donors, max_donors=max_donors, may_move=False)

    def _try_approximate(self, composition: Composition, donors: Sequence[Node], exact: Plan | None) -> None:
        """Plan with all donors; then, unless that saves nearly all, with the best one alone."""
        while composition.approximate_donors:
            plan = self._cheapest(composition, donors)
            refused = _gate(plan, exact, self._limits)
            self._prediction, self._refusal = plan.prediction, self._refusal or refused
            if refused is None:
                self._accepted.append(plan)
            # With so few repairs another composition can hardly save more.
            is_light = plan.prediction is not None and plan.prediction.repaired <= _LIGHT * plan.num_tokens
            if len(composition.approximate_donors) == 1 or (refused is None and is_light):
                break
            # The best donor alone may need less repair than all of them together.
            composition = self._composed(donors, max_donors=1, may_move=self._limits.can_move_keys)

    def _try_originals(self, donors: Sequence[Node], exact: Plan | None) -> None:
        """If the plan tried last inherits deviation, also plan with only the exact KV of the donors."""
        inherits = self._prediction is not None and self._prediction.inherited
        if not inherits or not any(map(is_exact, donors)):
            return
        originals = [part for node in donors if (part := exact_part(node)) is not None]
        composition = self._composed(
            originals, max_donors=self._limits.sharing.max_donors, may_move=self._limits.can_move_keys
        )
        if composition.approximate_donors:
            plan = self._cheapest(composition, originals)
            if _gate(plan, exact, self._limits) is None:
                self._accepted.append(plan)

    def _cheapest(self, composition: Composition, donors: Sequence[Node]) -> Plan:
        found = Approximation(
            composition, donors, self._token_ids, self._segment_of, self._limits, self._rates, self._media
        )
        return self._split(found.cheapest())

    def _split(self, plan: Plan) -> Plan:
        """The plan, or a faster one that computes its beginning while the rest is read from disk."""
        return plan if self._media else split_reads(plan, self._rates)


def _preferred(accepted: Sequence[Plan]) -> Plan:
    """Return the fastest plan, or one that inherits nothing, deviates no more and saves nearly as much."""
    fastest = min(accepted, key=_seconds)
    longest = _seconds(fastest) + _ABOUT_EQUAL * (fastest.estimate.full_s - _seconds(fastest))
    near = (plan for plan in accepted if not _inherited(plan) and _seconds(plan) <= longest)
    others = [plan for plan in near if plan.deviation <= fastest.deviation]
    return min(others, key=_seconds, default=fastest)


def _seconds(plan: Plan) -> float:
    return plan.estimate.shared_s


def _inherited(plan: Plan) -> float:
    return 0.0 if plan.prediction is None else plan.prediction.inherited


def _exact_plan(composition: Composition, rates: Rates, *, min_length: int) -> Plan | None:
    """
    A plan that copies the equal prefix only. The last token is always computed: its logits start the answer.

    Returns: None if fewer than `min_length` tokens are equal, as all chats begin with the same template
    """
    num_tokens = composition.num_tokens
    length = min(composition.exact_length, num_tokens - 1)
    if length < min_length:
        return None
    plan = Plan(
        num_tokens=num_tokens,
        exact_length=length,
        copies=within(composition.copies, Span(0, length)),
        placeholders=(Span(length, num_tokens),),
        repairs=(Span(length, num_tokens),) if composition.exact_length == num_tokens else (),
        generation=0,
        estimate=Estimate(0.0, 0.0),  # set below, as it depends on what the plan computes
    )
    work = plan.work(queue=rates.queue)
    return replace(plan, estimate=rates.estimate(num_tokens, work))


def _gate(plan: Plan, exact: Plan | None, limits: PlannerLimits) -> Reason | None:
    """Return why an approximate plan may not be used; None if it passes the gate."""
    policy = limits.policy
    num_exact = exact.num_exact if exact is not None else 0
    num_computed = plan.num_computed + plan.num_selecting
    saved = plan.num_tokens - num_computed - num_exact  # beyond the exact plan
    if plan.num_ahead:  # the two are split at places of their own, so that only the time is comparable
        saved = plan.num_copied - plan.num_selecting
    # Repairs may leave so few copied tokens that they are not worth any deviation.
    if saved < max(limits.sharing.min_run, (policy.min_saved_fraction or 0.0) * plan.num_tokens):
        return Reason.NOT_ENOUGH_SAVED
    if plan.prediction is not None and not plan.prediction.keeps_limit:
        return Reason.DEVIATES_TOO_MUCH
    if policy.max_relocated_fraction is not None:
        limit = small_shift(plan.num_tokens)
        approximate = (copy for copy in plan.copies if copy.target_start >= plan.exact_length)
        relocated = sum(copy.length for copy in approximate if abs(copy.shift) > limit)
        if relocated > policy.max_relocated_fraction * plan.num_tokens:
            return Reason.TOO_MUCH_RELOCATED
    full_s = plan.estimate.full_s
    # With a slow disk the exact plan may take longer than computing.
    baseline = full_s if exact is None else min(full_s, exact.estimate.shared_s)
    if not limits.threshold.pays(baseline, plan.estimate.shared_s):
        return Reason.DOES_NOT_PAY
    return None
