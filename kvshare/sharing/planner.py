"""
Makes a plan from the tokens of a prompt and its candidates, as a pure function.

The exact prefix is copied first, then matches at the same position, then moved matches. Everything else, and
what is repaired, is a placeholder. If the gate refuses every plan, the result is NoPlan(reason).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

from delta_tree import Composition, Node, Segment, SegmentId, Span, TokenIds, compose
from kvshare.reasons import Reason
from kvshare.requests import Prediction
from kvshare.settings import RepairSettings, Settings, SharingSettings
from kvshare.sharing.approximation import Approximation
from kvshare.sharing.calibration import ModelCalibration, calibration_of, cautious
from kvshare.sharing.cost import Rates
from kvshare.sharing.plan import NoPlan, Plan, small_shift, within

_LIGHT = 0.1  # share of a prompt; with fewer repairs no other composition is tried
_ABOUT_EQUAL = 0.02  # of what a plan saves
MAX_GENERATION = 40  # longer chains of copies were not measured (`chain` in docs/fidelity.md)


@dataclass(frozen=True, slots=True)
class Policy:
    """Thresholds besides the predicted deviation. A replay varies them, a server does not. None: no limit."""

    max_generation: int = MAX_GENERATION
    max_relocated_fraction: float | None = None
    min_saved_fraction: float | None = None


@dataclass(frozen=True, slots=True)
class PlannerLimits:
    """What limits the planner: the settings, the abilities of the engine, the calibration of the model."""

    sharing: SharingSettings
    repair: RepairSettings
    calibration: ModelCalibration = field(default_factory=cautious)
    can_share: bool = True
    can_move_keys: bool = True
    can_probe: bool = False  # whether the engine can choose repairs after a probe pass
    min_saved_s: float = 0.0
    dense_min_prefill_s: float = 0.0  # shortest prefill that pays a search by embedding
    policy: Policy = Policy()

    def of_model(self, fingerprint: str) -> Self:
        """These limits with the calibration of a model, unless the settings name a calibration."""
        if self.sharing.calibration is not None:
            return self
        return replace(self, calibration=calibration_of(fingerprint))

    def usable(self, node: Node) -> Node | None:
        """The part of a prompt that may be copied: only its exact prefix if it deviates too much."""
        if node.deviation <= self.sharing.max_deviation:
            return node
        return _exact_part(node)

    @classmethod
    def from_settings(
        cls,
        settings: Settings,
        *,
        fingerprint: str = "",
        can_share: bool = True,
        can_move_keys: bool = True,
        can_probe: bool = False,
    ) -> Self:
        """
        The limits in config.yaml, for an engine with these abilities.

        `fingerprint`: the model's; empty while it is unknown.
        Raises:  ConfigError for a calibration that cannot be read
        """
        return cls(
            sharing=settings.sharing,
            repair=settings.repair,
            calibration=calibration_of(fingerprint, settings.sharing.calibration),
            can_share=can_share,
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
    The fastest plan for a prompt of T tokens with candidates of the same namespace.

    Shapes:  token_ids (T,) int32
    Returns: a Plan that computes at least the last token, or NoPlan
    """
    num_tokens = len(token_ids)
    sharing = limits.sharing
    if num_tokens < sharing.min_prompt_tokens:
        return NoPlan(Reason.SHORT_PROMPT)
    if not candidates:
        return NoPlan(Reason.NO_CANDIDATES)
    donors = [node for candidate in candidates if (node := limits.usable(candidate)) is not None]
    composed = partial(
        compose,
        token_ids,
        segment_of=segment_of,
        min_run=sharing.min_run,
        max_generation=limits.policy.max_generation,
        allow_approximate=approximate,
    )
    composition = composed(donors, max_donors=sharing.max_donors)
    refusal: Reason | None = None
    if not limits.can_move_keys and any(copy.shift for copy in composition.copies):
        composition = composed(donors, max_donors=sharing.max_donors, may_move=False)
        refusal = Reason.ROTATION_UNKNOWN
    exact = _exact_plan(composition, rates, min_length=sharing.min_run)
    prediction: Prediction | None = None
    accepted: list[Plan] = []
    while approximate and composition.approximate_donors:
        plan = Approximation(composition, donors, token_ids, segment_of, limits, rates).cheapest()
        prediction, refused = plan.prediction, _gate(plan, exact, limits)
        refusal = refusal or refused
        if refused is None:
            accepted.append(plan)
        # With so few repairs another composition can hardly save more.
        is_light = plan.prediction is not None and plan.prediction.repaired <= _LIGHT * plan.num_tokens
        if len(composition.approximate_donors) == 1 or (refused is None and is_light):
            break
        # The best donor alone may need less repair than all of them together.
        composition = composed(donors, max_donors=1, may_move=limits.can_move_keys)
    if prediction is not None and prediction.inherited and any(map(_is_exact, donors)):
        originals = [part for node in donors if (part := _exact_part(node)) is not None]
        composition = composed(originals, max_donors=sharing.max_donors, may_move=limits.can_move_keys)
        if composition.approximate_donors:
            plan = Approximation(composition, originals, token_ids, segment_of, limits, rates).cheapest()
            accepted += [plan] if _gate(plan, exact, limits) is None else []
    if accepted:
        return _preferred(accepted)
    if exact is None:
        return NoPlan(refusal or Reason.NOTHING_IN_COMMON, prediction)
    if exact.estimate.full_s - exact.estimate.shared_s < limits.min_saved_s:
        return NoPlan(Reason.DOES_NOT_PAY, prediction)
    return replace(exact, reason=refusal, prediction=prediction)


def _is_exact(node: Node) -> bool:
    """Whether all KV of a prompt is exact, as after a full prefill."""
    return node.exact_length == node.num_tokens


def _exact_part(node: Node) -> Node | None:
    """A stored prompt's exact prefix; None if it has none."""
    if _is_exact(node):
        return node
    if not node.exact_length:
        return None
    return replace(
        node, token_ids=node.token_ids[: node.exact_length], pieces=node.pieces.first(node.exact_length)
    )


def _preferred(accepted: Sequence[Plan]) -> Plan:
    """The fastest plan, or one with full donors that deviates less and saves nearly as much."""
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
    return Plan(
        num_tokens=num_tokens,
        exact_length=length,
        copies=within(composition.copies, Span(0, length)),
        placeholders=(Span(length, num_tokens),),
        repairs=(Span(length, num_tokens),) if composition.exact_length == num_tokens else (),
        generation=0,
        estimate=rates.estimate(num_tokens=num_tokens, num_computed=num_tokens - length),
    )


def _gate(plan: Plan, exact: Plan | None, limits: PlannerLimits) -> Reason | None:
    """The gate: why an approximate plan is not used, or None. A doubtful match counts as no match."""
    policy = limits.policy
    num_exact = exact.exact_length if exact is not None else 0
    num_computed = plan.num_computed + plan.num_selecting
    saved = plan.num_tokens - num_computed - num_exact  # beyond the exact plan
    # Repair may leave few copied tokens: they are not worth any deviation.
    if saved < max(limits.sharing.min_run, (policy.min_saved_fraction or 0.0) * plan.num_tokens):
        return Reason.NOT_ENOUGH_SAVED
    if plan.prediction is not None and not plan.prediction.expected <= plan.prediction.limit:
        return Reason.DEVIATES_TOO_MUCH
    if policy.max_relocated_fraction is not None:
        limit = small_shift(plan.num_tokens)
        behind = (copy for copy in plan.copies if copy.target_start >= plan.exact_length)
        relocated = sum(copy.length for copy in behind if abs(copy.shift) > limit)
        if relocated > policy.max_relocated_fraction * plan.num_tokens:
            return Reason.TOO_MUCH_RELOCATED
    baseline = exact.estimate.shared_s if exact is not None else plan.estimate.full_s
    if baseline - plan.estimate.shared_s < limits.min_saved_s:
        return Reason.DOES_NOT_PAY
    return None
