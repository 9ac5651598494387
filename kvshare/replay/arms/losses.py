"""
What a kvshare arm's gates cost: the same candidates planned again with other limits. No server does this.

Some gates refuse a finished plan; two, of generation and of the number of donors, act while it is composed
and leave no reason behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from delta_tree import Node, Segment, SegmentId, TokenIds
from kvshare.replay.arms.sharing_options import SharingOptions
from kvshare.settings import Settings
from kvshare.sharing.cost import Rates
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.planner import make_plan

_REFUSALS = frozenset(
    {"not_enough_saved", "deviates_too_much", "too_much_relocated", "does_not_pay", "rotation_unknown"}
)
_ANY = 2**30  # donors or generations: never so many


@dataclass(frozen=True, slots=True)
class Losses:
    """Of one request: tokens that the candidates had and a gate would not take."""

    num_refused: int = 0
    num_generation: int = 0  # of these: taken if only the generation did not matter


class SecondLook:
    """Plans again, where another limit may have given more."""

    def __init__(
        self, sharing: SharingOptions, settings: Settings, segment_of: Callable[[SegmentId], Segment]
    ) -> None:
        self._limits = sharing.limits(settings)
        self._any_generation = replace(sharing, max_generation=_ANY).limits(settings)
        self._open = replace(sharing, open_gates=True, max_donors=_ANY).limits(settings)
        self._segment_of = segment_of

    def losses(self, token_ids: TokenIds, plan: Plan | NoPlan, nodes: Sequence[Node], rates: Rates) -> Losses:
        """Of a request, when its `plan` was made from these candidates at these rates."""
        plan_again = partial(make_plan, token_ids, nodes, self._segment_of, approximate=True, rates=rates)
        hides = any(self._hides(node) for node in nodes)
        if not (hides or plan.reason in _REFUSALS or self._may_lack_donors(plan, nodes)):
            return Losses()
        num_refused = max(0, _num_covered(plan_again(limits=self._open)) - _num_covered(plan))
        if not (hides and num_refused):
            return Losses(num_refused)
        num_deeper = _num_covered(plan_again(limits=self._any_generation)) - _num_covered(plan)
        return Losses(num_refused, min(max(0, num_deeper), num_refused))

    def _hides(self, node: Node) -> bool:
        """Whether some of its KV is of a too high generation."""
        generations = (self._segment_of(one).generation for one in node.pieces.segment_ids)
        return any(generation > self._limits.policy.max_generation for generation in generations)

    def _may_lack_donors(self, plan: Plan | NoPlan, nodes: Sequence[Node]) -> bool:
        """Each donor behind the equal prefix gives a run at least, be it repaired afterwards."""
        sharing = self._limits.sharing
        if isinstance(plan, NoPlan) or len(nodes) <= sharing.max_donors:
            return False
        return _num_covered(plan) - plan.exact_length >= sharing.max_donors * sharing.min_run


def _num_covered(plan: Plan | NoPlan) -> int:
    """Tokens that a donor had: not computed, or repaired."""
    return 0 if isinstance(plan, NoPlan) else plan.num_tokens - plan.num_recomputed
