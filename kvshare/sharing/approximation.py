"""
The approximate plans of one composition. All have the same copies; they differ in what is repaired.

The first plan repairs fixed windows. If its answer may deviate by more than the limit, the windows are
widened, or an engine that can choose repairs is given more tokens to choose. The cheapest plan within the
limit is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from delta_tree import (
    Composition,
    Copy,
    Node,
    Segment,
    SegmentId,
    Span,
    TokenIds,
    common_prefix_length,
    merge,
)
from kvshare.reasons import Reason
from kvshare.requests import Prediction
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.media import outside_media, with_whole_media
from kvshare.sharing.placed import Placed, ends, inside, placed
from kvshare.sharing.plan import MAX_TAIL_TOKENS, Plan, uncovered, within, without
from kvshare.sharing.prediction import Shape, carried, shape_of
from kvshare.sharing.rates import Estimate, Rates
from kvshare.sharing.repair import RepairRule, Repairs, repairs_by_place, repairs_to_choose, tail_repairs
from kvshare.sharing.risk import bound_of_inherited

_WIDENED = (1.0, 2.0, 4.0, 8.0)  # times the windows of the settings
DOSES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # repaired tokens per stale token


class _Outline(NamedTuple):
    """A plan without its copies, which take most of the time: only plans that may be used get them."""

    rule: RepairRule | Literal["none"]
    plan: Plan
    least_s: float  # it takes at least as long, estimated


class Approximation:
    """The candidate plans of one composition. Copies after the exact prefix are approximate."""

    def __init__(
        self,
        composition: Composition,
        candidates: Sequence[Node],
        token_ids: TokenIds,
        segment_of: Callable[[SegmentId], Segment],
        limits: PlannerLimits,
        rates: Rates,
        media: tuple[Span, ...] = (),
    ) -> None:
        """
        `candidates` include all donors of `composition`. Each of the `media` that begins before the end of
        the last copy is covered by copies as a whole.

        Shapes: token_ids (T,) int32
        """
        self._rates, self._media = rates, media
        self._settings, self._calibration = limits.repair, limits.calibration
        self._max_deviation, self._max_risk = limits.sharing.max_deviation, limits.sharing.max_risk
        self._size = size = composition.num_tokens
        self._exact_length = min(composition.exact_length, size - 1)
        self._exact = within(composition.copies, Span(0, self._exact_length))
        self._foreign = within(composition.copies, Span(self._exact_length, size))
        used = {copy.donor for copy in self._foreign}
        self._donors = {node.node_id: node for node in candidates if node.node_id in used}
        self._common = {
            donor: common_prefix_length(node.token_ids, token_ids) for donor, node in self._donors.items()
        }
        self._gaps = uncovered((*self._exact, *self._foreign), size)
        self._known = placed_copies = placed(self._foreign)
        self._generations = {
            segment: segment_of(segment).generation
            for segment in dict.fromkeys(copy.segment_id for copy in self._foreign)
        }
        is_settled = self._are_settled(placed_copies)
        self._moved = placed_copies[~is_settled]
        self._num_settled = int(placed_copies[is_settled, 3].sum())
        tail = tail_repairs(placed_copies, num_tokens=size, settings=self._settings)
        self._tail = merge([*outside_media(tail, media), Span(size - 1, size)]) if media else tail
        self._shape = self._shape_of(self._moved)
        num_tail = size - (int(ends(placed_copies)[-1]) if len(placed_copies) else 0)
        may_choose = limits.can_probe and not media  # a chosen repair might lie inside a medium
        self._is_uncertified = self._shape is not None and limits.refuses(self._shape.regime, size)
        self._chooses = may_choose and self._settings.rule != "windows" and num_tail <= MAX_TAIL_TOKENS

    @property
    def is_refused(self) -> bool:
        """Return whether every plan is above the limit: no repairs keep it, and no copy does without them."""
        return self._is_uncertified and not self._num_settled

    def cheapest(self) -> Plan:
        """
        Return the fastest plan whose bound is within the limit.

        If there is none: a plan with the settled copies only. Without settled copies, or if the prompt should
        be renewed (`_should_renew`): the plan that deviates least, which the gate refuses. The prompt is then
        computed in full, so that it carries no deviation to later prompts.
        """
        if self._shape is None:
            return self._whole(self._outline("none", Repairs(())))
        if self._is_uncertified and self._num_settled:
            return self._settled_only()
        outlines = self._outlines(self._shape)
        plans: dict[int, Plan] = {}  # by place in `outlines`
        fastest: int | None = None
        for place in sorted(range(len(outlines)), key=lambda place: outlines[place].least_s):
            if fastest is not None and outlines[place].least_s > plans[fastest].estimate.shared_s:
                break
            plans[place] = plan = self._whole(outlines[place])
            if plan.num_copied and _bound(plan) <= self._max_deviation:
                fastest = (
                    place
                    if fastest is None
                    else min(fastest, place, key=lambda each: (plans[each].estimate.shared_s, each))
                )
        if fastest is not None:
            return plans[fastest]
        return self._otherwise([plans[place] for place in range(len(outlines))])

    def _outlines(self, shape: Shape) -> list[_Outline]:
        widened: Sequence[float] = _WIDENED
        if self._chooses:
            widened = () if self._settings.rule == "attention" else _WIDENED[:1]
        found = [self._by_place(factor) for factor in widened]
        return [*found, self._chosen(shape)] if self._chooses else found

    def _otherwise(self, found: Sequence[Plan]) -> Plan:
        """Return a plan for the case that none of the plans `found` is within the limit."""
        if self._num_settled and not self._should_renew(found):
            return self._settled_only()
        return min(found, key=lambda plan: plan.deviation)

    def _settled_only(self) -> Plan:
        moved = zip(self._moved[:, 1].tolist(), ends(self._moved).tolist(), strict=True)
        without_moved = Repairs(tuple(Span(start, end) for start, end in moved))
        plan = self._whole(self._outline("none", without_moved))
        return replace(plan, reason=Reason.DEVIATES_TOO_MUCH)

    def _should_renew(self, found: Sequence[Plan]) -> bool:
        """Return whether only the donors' deviation exceeds the limit, and fewer than half is settled."""
        within_limit = (
            _bound(plan) - self._bound_of(_inherited(plan)) <= self._max_deviation
            for plan in found
            if plan.num_copied
        )
        return int(self._moved[:, 3].sum()) > self._num_settled and any(within_limit)

    def _are_settled(self, copies: Placed) -> NDArray[np.bool_]:
        """
        Return which copies have the same position and the same tokens in front of them as in their donors, as
        in the next turn of a chat. Such a copy adds no deviation, so it needs no repair.
        """
        common = np.array([self._common[donor] for donor in copies[:, 0].tolist()], np.int64)
        found: NDArray[np.bool_] = (copies[:, 1] == copies[:, 2]) & (ends(copies) <= common)
        return found

    def _shape_of(self, moved: Placed) -> Shape | None:
        tail = max(self._exact_length, self._size - self._settings.tail)
        return shape_of(
            inside(moved, Span(self._exact_length, tail)),
            num_tokens=self._size,
            exact_length=self._exact_length,
            common=self._common,
        )

    def _by_place(self, widened: float) -> _Outline:
        spans = repairs_by_place(self._moved, num_tokens=self._size, settings=self._settings, widened=widened)
        return self._outline("windows", Repairs(outside_media(spans, self._media)))

    def _chosen(self, shape: Shape) -> _Outline:
        """Return the outline with the smallest dose within the limit, else that with the largest dose."""
        least = self._calibration.least_repaired(shape, "attention", risk=self._max_risk)
        doses = [max(least, dose * shape.stale) for dose in DOSES]
        allowed = self._max_deviation - self._bound_of(self._inherited(self._foreign))
        bounds = self._calibration.bounds(shape, "attention", doses, risk=self._max_risk)
        fitting = (dose for dose, bound in zip(doses, bounds, strict=True) if bound <= allowed)
        repairs = repairs_to_choose(
            self._moved, num_tokens=self._size, wanted=next(fitting, doses[-1]), settings=self._settings
        )
        return self._outline("attention", repairs)

    def _expected(self, rule: RepairRule, repaired: float) -> float:
        """Return the KL in nats that this plan is expected to add to the deviation of its donors."""
        if self._shape is None:
            return 0.0
        return self._calibration.expected(self._shape, rule, repaired)

    def _bound(self, rule: RepairRule, repaired: float) -> float:
        """Return the KL, in nats, that answers exceed with at most the allowed risk, if donors are exact."""
        if self._shape is None:
            return 0.0
        return self._calibration.bound(self._shape, rule, repaired, risk=self._max_risk)

    def _bound_of(self, inherited: float) -> float:
        return bound_of_inherited(inherited, self._max_risk)

    def _outline(self, rule: RepairRule | Literal["none"], repairs: Repairs) -> _Outline:
        spans = merge([*repairs.spans, *self._tail])
        plan = Plan(
            num_tokens=self._size,
            exact_length=self._exact_length,
            copies=(),
            placeholders=merge([*self._gaps, *spans]),
            repairs=spans,
            generation=0,
            estimate=Estimate(0.0, 0.0),
            order=repairs.order,
        )
        work = plan.work(num_extra_passes=self._rates.num_extra_passes)
        return _Outline(rule, plan, self._rates.least(self._size, work).shared_s)

    def _whole(self, outline: _Outline) -> Plan:
        """Add copies, estimate and prediction to a plan."""
        size, settings, rates, rule = self._size, self._settings, self._rates, outline.rule
        spans = outline.plan.repairs
        copied, placeholders = without(self._foreign, spans), outline.plan.placeholders
        if self._media:
            copied = with_whole_media((*self._exact, *copied), self._media)[len(self._exact) :]
            kept = [copy.target for copy in copied]
            spans = merge(copy.target for copy in without(self._foreign, kept))
            placeholders = uncovered((*self._exact, *copied), size)
        plan = replace(
            outline.plan,
            repairs=spans,
            placeholders=placeholders,
            copies=(*self._exact, *copied),
            generation=self._generation_after(copied),
        )
        in_tail = sum(max(0, span.end - max(span.start, size - settings.tail)) for span in spans)
        repaired = plan.num_repaired - in_tail
        work = plan.work(num_extra_passes=rates.num_extra_passes, queue=rates.queue)
        inherited = self._inherited(copied)
        return replace(
            plan,
            estimate=rates.estimate(size, work),
            prediction=Prediction(
                expected=inherited + (0.0 if rule == "none" else self._expected(rule, repaired)),
                bound=self._bound_of(inherited) + (0.0 if rule == "none" else self._bound(rule, repaired)),
                inherited=inherited,
                limit=self._max_deviation,
                rule=rule,
                repaired=repaired,
            ),
        )

    def _inherited(self, copies: Sequence[Copy]) -> float:
        """Return the expected KL in nats that these copies carry from their donors."""
        if not copies or not any(donor.deviation for donor in self._donors.values()):
            return 0.0
        own = self._known if copies is self._foreign else placed(copies)
        return carried(own, self._donors, known=self._known, common=self._common)

    def _generation_after(self, copies: Sequence[Copy]) -> int:
        """Return the generation of KV that is computed over these copies; 0 if there are none."""
        if not copies:
            return 0
        generations = [self._generations[copy.segment_id] for copy in copies]
        if not self._num_settled:
            return max(generations) + 1
        settled = self._are_settled(placed(copies)).tolist()
        pairs = zip(generations, settled, strict=True)
        return max(max(1, found) if is_settled else found + 1 for found, is_settled in pairs)


def _bound(plan: Plan) -> float:
    return 0.0 if plan.prediction is None else plan.prediction.bound


def _inherited(plan: Plan) -> float:
    return 0.0 if plan.prediction is None else plan.prediction.inherited
