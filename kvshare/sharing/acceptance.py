"""Which approximate plans of a prompt may be used, and which of those is."""

from __future__ import annotations

from collections.abc import Sequence

from kvshare.reasons import Reason
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.plan import Plan, small_shift

_ABOUT_EQUAL = 0.02  # of what a plan saves


def gate(plan: Plan, exact: Plan | None, limits: PlannerLimits) -> Reason | None:
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


def preferred(accepted: Sequence[Plan]) -> Plan:
    """Return the fastest plan, or one that inherits nothing, deviates no more and saves nearly as much."""
    fastest = min(accepted, key=seconds)
    longest = about_as_long(fastest)
    near = (plan for plan in accepted if not _inherited(plan) and seconds(plan) <= longest)
    others = [plan for plan in near if plan.deviation <= fastest.deviation]
    return min(others, key=seconds, default=fastest)


def about_as_long(fastest: Plan) -> float:
    """Return how many seconds a plan may take that is preferred to the fastest one."""
    return seconds(fastest) + _ABOUT_EQUAL * (fastest.estimate.full_s - seconds(fastest))


def seconds(plan: Plan) -> float:
    return plan.estimate.shared_s


def _inherited(plan: Plan) -> float:
    return 0.0 if plan.prediction is None else plan.prediction.inherited
