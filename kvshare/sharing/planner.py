"""
Makes a plan from the tokens of a prompt and its candidates, as a pure function.

The exact prefix is copied first, then matches at the same position, then moved matches. All other tokens, and
the tokens to repair, are placeholders. If the gate refuses every plan, the result is NoPlan(reason).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from delta_tree import (
    Composition,
    Node,
    Segment,
    SegmentId,
    Span,
    Target,
    TokenIds,
    common_prefix_length,
    compose,
)
from kvshare.reasons import Reason
from kvshare.requests import Prediction
from kvshare.sharing.acceptance import about_as_long, gate, preferred, seconds
from kvshare.sharing.approximation import Approximation
from kvshare.sharing.limits import PlannerLimits, exact_part, is_exact
from kvshare.sharing.media import composed_with_whole_media
from kvshare.sharing.originals import least_s
from kvshare.sharing.plan import NoPlan, Plan, within
from kvshare.sharing.rates import Estimate, Rates
from kvshare.sharing.splitting import split_reads

_FEW = 1 / 64  # of a prompt
_LIGHT = 0.1  # share of a prompt; if a plan repairs less, no other composition is tried
_WITHHELD_BY = 2  # donors searched for the reason of a refusal; a search of more would delay the prompt


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
    Return the fastest plan for a prompt of T tokens with candidates of the same namespace.

    Shapes:  token_ids (T,) int32
    Units:   `media`: token positions, ascending; each of these spans is copied as a whole or not at all
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
        self._target = Target(token_ids, min_run=limits.sharing.min_run)  # shared by all compositions
        self._limits, self._rates = limits, rates
        self._approximate = approximate
        self._accepted: list[Plan] = []
        self._is_of_one = False  # the first composition has one donor, though others may add copies
        self._refusal: Reason | None = None  # of the plan that was refused first
        self._prediction: Prediction | None = None  # of the plan that was tried last

    def best_plan(self, donors: Sequence[Node]) -> Plan | NoPlan:
        composition = self._first_composition(donors)
        exact = _exact_plan(composition, self._rates, min_length=self._limits.sharing.min_run)
        exact = exact and self._split(exact)
        if self._approximate:
            self._try_approximate(composition, donors, exact)
            if self._is_of_one and not self._is_of_one_enough():
                self._try_again(donors, exact)
            self._try_originals(donors, exact)
        if self._accepted:
            return preferred(self._accepted)
        if exact is None:
            return self._refused(Reason.NOTHING_IN_COMMON, donors)
        if not self._limits.threshold.pays(exact.estimate.full_s, exact.estimate.shared_s):
            return self._refused(Reason.DOES_NOT_PAY, donors)
        return replace(exact, reason=self._refusal, prediction=self._prediction)

    def _refused(self, last: Reason, donors: Sequence[Node]) -> NoPlan:
        """Return NoPlan with the first refusal, which users can change; without a refusal, with `last`."""
        first = self._refusal
        if not self._approximate and self._withholds(donors):
            first = Reason.EXACT_ONLY
        by_rates = Reason.DOES_NOT_PAY in (last, self._refusal)
        return NoPlan(first or last, self._prediction, refused_by_rates=by_rates)

    def _withholds(self, donors: Sequence[Node]) -> bool:
        """Return whether the best donors share text that the mode of the request forbids to copy."""
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
        """
        Compose the prompt from all donors; if the engine cannot move keys, compose it again without moves.

        Compose it from the best donor only, if two conditions hold: plans of several donors are refused or
        must repair much, and no other donor has more of the prompt's beginning than the best donor.
        """
        max_donors = self._limits.sharing.max_donors
        if self._approximate and max_donors > 1 and not self._media and self._limits.can_move_keys:
            alone = self._composed_of_one(donors)
            if alone is not None:
                self._is_of_one = True
                return alone
        composition = self._composed(donors, max_donors=max_donors, may_move=True)
        if self._limits.can_move_keys or not any(copy.shift for copy in composition.copies):
            return composition
        self._refusal = Reason.ROTATION_UNKNOWN
        return self._composed(donors, max_donors=max_donors, may_move=False)

    def _composed_of_one(self, donors: Sequence[Node]) -> Composition | None:
        num_tokens = len(self._token_ids)
        if len(donors) < 2 or self._limits.least_share("composed", num_tokens) == 0:
            return None
        common = {node.node_id: common_prefix_length(node.token_ids, self._token_ids) for node in donors}
        most = max(common.values())
        composition = self._composed(donors, max_donors=1, may_move=True)
        is_alone = len(used := composition.approximate_donors) == 1 and common[used[0]] == most
        # Tokens in front of the first edit need no repair, so several donors may provide them.
        return composition if is_alone and most - composition.exact_length <= _FEW * num_tokens else None

    def _is_of_one_enough(self) -> bool:
        """Return whether the best donor's plan passes, and computes no more than plans of several donors."""
        num_tokens = len(self._token_ids)
        share = self._limits.least_share("composed", num_tokens)
        most = num_tokens if share is None else share * num_tokens
        return any(plan.reason is None and plan.num_computed <= most for plan in self._accepted)

    def _try_approximate(self, composition: Composition, donors: Sequence[Node], exact: Plan | None) -> None:
        """
        Plan with all donors. Unless this plan saves nearly all, also plan with the best donor alone.

        If no repair keeps a plan of several donors within the limit, that plan is tried last, and only if no
        other plan is accepted. It then gives the reason of the refusal.
        """
        before, refused = self._refusal, None
        while composition.approximate_donors:
            approximation = self._approximation(composition, donors)
            is_alone = len(composition.approximate_donors) == 1
            if approximation.is_refused and not is_alone:
                refused = approximation
            elif self._is_light(approximation, exact) or is_alone:
                break
            # The best donor alone may need less repair than all of them together.
            composition = self._composed(donors, max_donors=1, may_move=self._limits.can_move_keys)
        if refused is not None and not self._accepted:
            later, last = self._refusal, self._prediction
            self._refusal = before
            self._try(refused, exact)
            self._refusal, self._prediction = self._refusal or later, last or self._prediction

    def _try_again(self, donors: Sequence[Node], exact: Plan | None) -> None:
        """Discard the plan of the best donor alone, which was not enough, and plan with all donors."""
        self._accepted, self._refusal, self._prediction = [], None, None
        max_donors = self._limits.sharing.max_donors
        composition = self._composed(donors, max_donors=max_donors, may_move=True)
        self._try_approximate(composition, donors, exact)

    def _is_light(self, found: Approximation, exact: Plan | None) -> bool:
        """Try a plan. Return whether it has so few repairs that another composition can hardly save more."""
        plan = self._try(found, exact)
        return (
            plan is not None
            and plan.prediction is not None
            and plan.prediction.repaired <= _LIGHT * plan.num_tokens
        )

    def _try(self, found: Approximation, exact: Plan | None) -> Plan | None:
        """Return the cheapest plan of an approximation, or None if the gate refuses that plan."""
        plan = self._split(found.cheapest())
        refused = gate(plan, exact, self._limits)
        self._prediction, self._refusal = plan.prediction, self._refusal or refused
        if refused is not None:
            return None
        self._accepted.append(plan)
        return plan

    def _try_originals(self, donors: Sequence[Node], exact: Plan | None) -> None:
        """If the plan tried last inherits deviation, also plan with only the exact KV of the donors."""
        inherits = self._prediction is not None and self._prediction.inherited
        if not inherits or not any(map(is_exact, donors)):
            return
        originals = [part for node in donors if (part := exact_part(node)) is not None]
        if self._accepted and not self._media and self._takes_longer(originals):
            return
        composition = self._composed(
            originals, max_donors=self._limits.sharing.max_donors, may_move=self._limits.can_move_keys
        )
        found = self._approximation(composition, originals) if composition.approximate_donors else None
        if found is not None and not found.is_refused:
            plan = self._split(found.cheapest())
            if gate(plan, exact, self._limits) is None:
                self._accepted.append(plan)

    def _takes_longer(self, originals: Sequence[Node]) -> bool:
        """Return whether no plan with these donors would be used, because an accepted plan is faster."""
        prompts = [node.token_ids for node in originals]
        least = least_s(self._target, prompts, self._limits.repair, self._rates)
        return least > about_as_long(min(self._accepted, key=seconds))

    def _approximation(self, composition: Composition, donors: Sequence[Node]) -> Approximation:
        return Approximation(
            composition, donors, self._token_ids, self._segment_of, self._limits, self._rates, self._media
        )

    def _split(self, plan: Plan) -> Plan:
        """Return the plan, or a faster one that computes its beginning while the rest is read from disk."""
        return plan if self._media else split_reads(plan, self._rates)


def _exact_plan(composition: Composition, rates: Rates, *, min_length: int) -> Plan | None:
    """
    Return a plan that copies the equal prefix only. The last token is always computed: its logits start the
    answer.

    Returns: None if fewer than `min_length` tokens are equal: all chats begin with the same template
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
        estimate=Estimate(0.0, 0.0),  # set below, because it depends on what the plan computes
    )
    work = plan.work(queue=rates.queue)
    return replace(plan, estimate=rates.estimate(num_tokens, work))
