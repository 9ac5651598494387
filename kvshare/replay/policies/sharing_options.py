"""
The differences of a kvshare policy from config.yaml's server, and what its thresholds cost.

In all of them time limits are lifted (a busy machine must not change a result) and the index is never
optimised. Losses are found by planning again with the same candidates and other limits, which no server does.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from delta_tree import Node, Segment, SegmentId, TokenIds
from kvshare.served_index import nominator_settings
from kvshare.settings import Settings
from kvshare.sharing.calibration import of_default_model
from kvshare.sharing.limits import PlannerLimits, Policy
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.planner import make_plan
from kvshare.sharing.rates import MinSaved, Rates
from vector_index import NominatorSettings

_NEVER = 2**30  # no prompt has so many tokens, no store so many donors or generations
_NO_TIMEOUTS = dict.fromkeys(("search_timeout_s", "embed_timeout_s", "write_timeout_s"), 3600.0)
_OPEN_GATES = {"min_prompt_tokens": 1, "max_deviation": math.inf, "max_risk": 1.0}
_NO_REPAIR = {"rule": "windows", "edit_window": 0, "relocated_head": 0, "tail": 1, "max_budget": 0.0}
_REJECTIONS = frozenset(
    {
        *("not_enough_saved", "deviates_too_much", "too_much_relocated", "does_not_pay"),
        *("rotation_unknown", "exact_only"),
    }
)


@dataclass(frozen=True, slots=True)
class SharingOptions:
    """
    `nominate`: which searches there are; "embedding" has neither fingerprints nor the prefix table. "prefix":
    only that table, as for requests that allow nothing approximate.

    `open_gates`: every possible copy is made, whatever it costs in fidelity or time. No threshold applies,
    nothing is repaired, and the search by embedding always runs: the result is how much is found.
    None leaves a setting as config.yaml has it.
    """

    nominate: Literal["both", "fingerprints", "embedding", "prefix"] = "both"
    open_gates: bool = False
    max_distance: float | None = None
    min_run: int | None = None
    max_donors: int | None = None
    max_deviation: float | None = None
    max_risk: float | None = None
    max_generation: int | None = None
    max_relocated_fraction: float | None = None
    min_saved_fraction: float | None = None
    max_candidates: int | None = None
    kgram: int | None = None
    window: int | None = None

    @property
    def uses_embedding(self) -> bool:
        return self.nominate in {"both", "embedding"}

    def limits(self, settings: Settings) -> PlannerLimits:
        limits = PlannerLimits.from_settings(settings, can_probe=True)
        if settings.sharing.calibration is None:
            limits = replace(limits, calibration=of_default_model())
        changes = self._changed("min_run", "max_donors", "max_deviation", "max_risk")
        policy = Policy(**self._changed("max_generation", "max_relocated_fraction", "min_saved_fraction"))
        if self.open_gates:
            changes, policy = changes | _OPEN_GATES, Policy(max_generation=_NEVER)
            repair = limits.repair.model_copy(update=_NO_REPAIR)
            limits = replace(limits, repair=repair, threshold=MinSaved(-math.inf), dense_max_share=None)
        return replace(limits, sharing=limits.sharing.model_copy(update=changes), policy=policy)

    def nominator(self, settings: Settings) -> NominatorSettings:
        changes = _NO_TIMEOUTS | self._changed("kgram", "window", "max_candidates", "max_distance")
        if self.window is not None and self.window < settings.index.window:
            changes["max_fingerprints"] = _NEVER
        if self.nominate == "embedding":
            changes |= {"kgram": _NEVER, "block_size": _NEVER}
        if self.nominate == "prefix":
            changes["kgram"] = _NEVER
        if self.open_gates or self.nominate == "embedding":
            changes |= {"dense_min_tokens": 0, "dense_min_uncovered": 0.0}
        return replace(nominator_settings(settings.index), **changes)

    def _changed(self, *names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class LossFinder:
    """
    Plans again where another limit may have given more.

    Some thresholds reject a finished plan. Two, of the generation and of the number of donors, limit it while
    it is composed and leave no reason.
    """

    def __init__(
        self, sharing: SharingOptions, settings: Settings, segment_of: Callable[[SegmentId], Segment]
    ) -> None:
        self._limits = sharing.limits(settings)
        self._any_generation = replace(sharing, max_generation=_NEVER).limits(settings)
        self._open = replace(sharing, open_gates=True, max_donors=_NEVER).limits(settings)
        self._segment_of = segment_of

    def losses(
        self, token_ids: TokenIds, plan: Plan | NoPlan, nodes: Sequence[Node], rates: Rates
    ) -> tuple[int, int]:
        """
        Tokens that the candidates had and a threshold rejected; of these, only for their generation.

        Of a request whose `plan` was made from these candidates at these rates.
        """
        plan_again = partial(make_plan, token_ids, nodes, self._segment_of, approximate=True, rates=rates)
        segments = (self._segment_of(one) for node in nodes for one in node.pieces.segment_ids)
        has_too_high = any(one.generation > self._limits.policy.max_generation for one in segments)
        if not (has_too_high or plan.reason in _REJECTIONS or self._may_lack_donors(plan, nodes)):
            return 0, 0
        num_refused = max(0, _num_covered(plan_again(limits=self._open)) - _num_covered(plan))
        if not (has_too_high and num_refused):
            return num_refused, 0
        num_deeper = _num_covered(plan_again(limits=self._any_generation)) - _num_covered(plan)
        return num_refused, min(max(0, num_deeper), num_refused)

    def _may_lack_donors(self, plan: Plan | NoPlan, nodes: Sequence[Node]) -> bool:
        """Each donor after the equal prefix gives at least a run, even where it is repaired afterwards."""
        sharing = self._limits.sharing
        if isinstance(plan, NoPlan) or len(nodes) <= sharing.max_donors:
            return False
        return _num_covered(plan) - plan.exact_length >= sharing.max_donors * sharing.min_run


def _num_covered(plan: Plan | NoPlan) -> int:
    """Tokens that a donor had: reused or repaired."""
    return 0 if isinstance(plan, NoPlan) else plan.num_tokens - plan.num_recomputed
