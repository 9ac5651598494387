"""
What a kvshare policy's thresholds cost: the same candidates planned again with other limits. No server does
this.

Some thresholds reject a finished plan. Two, of the generation and of the number of donors, limit it while it
is composed and leave no reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from delta_tree import Node, Segment, SegmentId, TokenIds
from kvshare.replay.policies.sharing_options import SharingOptions
from kvshare.settings import Settings
from kvshare.sharing.cost import Rates
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.planner import make_plan

_REJECTIONS = frozenset(
    {"not_enough_saved", "deviates_too_much", "too_much_relocated", "does_not_pay", "rotation_unknown"}
)
_ANY = 2**30  # more donors or generations than there are


@dataclass(frozen=True, slots=True)
class Losses:
    """Of one request: tokens that the candidates had and a threshold rejected."""

    num_refused: int = 0
    num_generation: int = 0  # of these: rejected only for their generation


class LossFinder:
    """Plans again where another limit may have given more."""

    def __init__(
        self, sharing: SharingOptions, settings: Settings, segment_of: Callable[[SegmentId], Segment]
    ) -> None:
        self._limits = sharing.limits(settings)
        self._any_generation = replace(sharing, max_generation=_ANY).limits(settings)
        self._open = replace(sharing, open_gates=True, max_donors=_ANY).limits(settings)
        self._segment_of = segment_of

    def losses(self, token_ids: TokenIds, plan: Plan | NoPlan, nodes: Sequence[Node], rates: Rates) -> Losses:
        """Of a request whose `plan` was made from these candidates at these rates."""
        plan_again = partial(make_plan, token_ids, nodes, self._segment_of, approximate=True, rates=rates)
        has_too_high = any(self._is_too_high(node) for node in nodes)
        if not (has_too_high or plan.reason in _REJECTIONS or self._may_lack_donors(plan, nodes)):
            return Losses()
        num_refused = max(0, _num_covered(plan_again(limits=self._open)) - _num_covered(plan))
        if not (has_too_high and num_refused):
            return Losses(num_refused)
        num_deeper = _num_covered(plan_again(limits=self._any_generation)) - _num_covered(plan)
        return Losses(num_refused, min(max(0, num_deeper), num_refused))

    def _is_too_high(self, node: Node) -> bool:
        """Whether some of its KV has a generation above the limit."""
        generations = (self._segment_of(one).generation for one in node.pieces.segment_ids)
        return any(generation > self._limits.policy.max_generation for generation in generations)

    def _may_lack_donors(self, plan: Plan | NoPlan, nodes: Sequence[Node]) -> bool:
        """Each donor behind the equal prefix gives at least a run, even where it is repaired afterwards."""
        sharing = self._limits.sharing
        if isinstance(plan, NoPlan) or len(nodes) <= sharing.max_donors:
            return False
        return _num_covered(plan) - plan.exact_length >= sharing.max_donors * sharing.min_run


def _num_covered(plan: Plan | NoPlan) -> int:
    """Tokens that a donor had: reused or repaired."""
    return 0 if isinstance(plan, NoPlan) else plan.num_tokens - plan.num_recomputed
