"""
From tokens and candidates to a plan: a pure function. Gates may refuse; the result is then NoPlan(reason).

Order of preference: exact prefix, then copies at the same place, then moved ones; everything else, and what
repair asks for, is a placeholder.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Self

from delta_tree import (
    Composition,
    Copy,
    Node,
    NodeId,
    Segment,
    SegmentId,
    Span,
    TokenIds,
    common_prefix_length,
    compose,
    gaps,
)
from kvshare.settings import RepairSettings, Settings, SharingSettings
from kvshare.sharing.cost import Rates
from kvshare.sharing.plan import NoPlan, Plan, clip, without
from kvshare.sharing.repair import find_repairs

_SMALL_SHIFT_FRACTION = 0.1  # of the prompt: in a short one 512 tokens would reach past every document


@dataclass(frozen=True, slots=True)
class PlannerLimits:
    """What the planner may do: the operator's settings and what the engine can."""

    sharing: SharingSettings
    repair: RepairSettings
    can_move_keys: bool = True
    can_probe: bool = False  # whether the engine can choose repairs after a probe pass
    min_saved_s: float = 0.0
    dense_min_prefill_s: float = 0.0  # search by meaning only where prefill would take this long

    @classmethod
    def from_settings(
        cls, settings: Settings, *, can_move_keys: bool = True, can_probe: bool = False
    ) -> Self:
        """What config.yaml says, for an engine that can or cannot move keys and choose repairs."""
        return cls(
            sharing=settings.sharing,
            repair=settings.repair,
            can_move_keys=can_move_keys,
            can_probe=can_probe,
            min_saved_s=settings.cost.min_saved_s,
            dense_min_prefill_s=settings.index.dense_min_prefill_s,
        )


def make_plan(
    token_ids: TokenIds,
    candidates: Sequence[Node],
    segment_of: Callable[[SegmentId], Segment],
    *,
    approximate: bool,
    limits: PlannerLimits,
    rates: Rates,
) -> Plan | NoPlan:
    """
    The cheapest plan for a prompt of T tokens from nominated donors of the same namespace.

    Shapes:  token_ids (T,) int32
    Returns: a Plan that computes at least the last token, or NoPlan; never raises for odd prompts
    """
    num_tokens = len(token_ids)
    sharing = limits.sharing
    if num_tokens < sharing.min_prompt_tokens:
        return NoPlan("short_prompt")
    if not candidates:
        return NoPlan("no_candidates")
    may_approximate = approximate and limits.can_move_keys
    composition = compose(
        token_ids,
        candidates,
        segment_of,
        min_run=sharing.min_run,
        max_donors=sharing.max_donors,
        max_generation=sharing.max_generation,
        allow_approximate=may_approximate,
    )
    exact = _exact_plan(composition, rates, min_length=sharing.min_run)
    refusal = "rotation_unknown" if approximate and not limits.can_move_keys else None
    if may_approximate and any(copy.target_start >= composition.exact_length for copy in composition.copies):
        context = {node.node_id: common_prefix_length(node.token_ids, token_ids) for node in candidates}
        plan = _approximate_plan(composition, context, segment_of, limits, rates)
        refusal = _gate(plan, exact, limits)
        if refusal is None:
            return plan
    if exact is None:
        return NoPlan(refusal or "nothing_in_common")
    if exact.estimate.full_s - exact.estimate.shared_s < limits.min_saved_s:
        return NoPlan("does_not_pay")
    return replace(exact, reason=refusal)


def _exact_plan(composition: Composition, rates: Rates, *, min_length: int) -> Plan | None:
    """
    Only the equal prefix; the last token is always computed, its logits are the answer's beginning.

    All chats begin with the same few tokens of the template: less than `min_length` is not worth a plan.
    """
    num_tokens = composition.num_tokens
    length = min(composition.exact_length, num_tokens - 1)
    if length < min_length:
        return None
    return Plan(
        num_tokens=num_tokens,
        exact_length=length,
        copies=_within(composition.copies, Span(0, length)),
        placeholders=(Span(length, num_tokens),),
        repairs=(Span(length, num_tokens),) if composition.exact_length == num_tokens else (),
        generation=0,
        estimate=rates.estimate(num_tokens=num_tokens, num_computed=num_tokens - length),
    )


def _approximate_plan(
    composition: Composition,
    context: Mapping[NodeId, int],
    segment_of: Callable[[SegmentId], Segment],
    limits: PlannerLimits,
    rates: Rates,
) -> Plan:
    num_tokens = composition.num_tokens
    exact_length = min(composition.exact_length, num_tokens - 1)
    exact = _within(composition.copies, Span(0, exact_length))
    foreign = _within(composition.copies, Span(exact_length, num_tokens))
    repairs = find_repairs(
        foreign,
        num_tokens=num_tokens,
        max_small_shift=small_shift(limits.sharing, num_tokens),
        settings=limits.repair,
        probe=limits.can_probe,
    )
    kept = without(foreign, repairs.spans)
    copies = (*exact, *kept)
    plan = Plan(
        num_tokens=num_tokens,
        exact_length=exact_length,
        copies=copies,
        placeholders=gaps((copy.target for copy in copies), num_tokens),
        repairs=repairs.spans,
        generation=max(
            (
                _generation_after(copy, context[copy.donor], segment_of(copy.segment_id).generation)
                for copy in kept
            ),
            default=0,
        ),
        estimate=rates.estimate(num_tokens=num_tokens, num_computed=0),
        order=repairs.order,
    )
    num_computed = plan.num_computed + plan.num_selecting
    return replace(plan, estimate=rates.estimate(num_tokens=num_tokens, num_computed=num_computed))


def _generation_after(copy: Copy, common_prefix: int, generation: int) -> int:
    """
    Generation of KV that attends to this copy.

    A chat that goes on reuses its own approximate KV in its own context: nothing is added to its deviation,
    so the generation does not grow with every turn.
    """
    continues = copy.donor_start == copy.target_start and copy.target.end <= common_prefix
    return max(1, generation) if continues else generation + 1


def _gate(plan: Plan, exact: Plan | None, limits: PlannerLimits) -> str | None:
    """Why an approximate plan is refused, or None. A doubtful match counts as no match."""
    sharing = limits.sharing
    num_exact = exact.exact_length if exact is not None else 0
    num_computed = plan.num_computed + plan.num_selecting
    saved = plan.num_tokens - num_computed - num_exact  # beyond what is free of doubt
    if saved < max(1, sharing.min_saved_fraction * plan.num_tokens):  # repair may leave nothing of the copies
        return "not_enough_saved"
    limit = small_shift(sharing, plan.num_tokens)
    relocated = sum(
        copy.length
        for copy in plan.copies
        if copy.target_start >= plan.exact_length and abs(copy.shift) > limit
    )
    if relocated > sharing.max_relocated_fraction * plan.num_tokens:
        return "too_much_relocated"
    baseline = exact.estimate.shared_s if exact is not None else plan.estimate.full_s
    if baseline - plan.estimate.shared_s < limits.min_saved_s:
        return "does_not_pay"
    return None


def small_shift(sharing: SharingSettings, num_tokens: int) -> int:
    """How far a copy may move in a prompt of this length before it counts as relocated, in tokens."""
    return min(sharing.max_small_shift, int(_SMALL_SHIFT_FRACTION * num_tokens))


def _within(copies: Sequence[Copy], span: Span) -> tuple[Copy, ...]:
    """The copies, ascending by target and apart, clipped to a span."""
    if not span:
        return ()
    first = bisect_right(copies, span.start, key=lambda copy: copy.target_start + copy.length)
    inside = list(copies[first : bisect_left(copies, span.end, key=attrgetter("target_start"))])
    for edge in (0, -1) if inside else ():
        if (part := clip(inside[edge], span)) is not None:
            inside[edge] = part
    return tuple(inside)
