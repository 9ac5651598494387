"""
How a kvshare policy differs from the server that config.yaml describes.

In all of them time limits are lifted (a busy machine must not change a result) and the index is never
optimised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvshare.index_factory import nominator_settings
from kvshare.settings import Settings
from kvshare.sharing.calibration import of_default_model
from kvshare.sharing.planner import PlannerLimits, Policy
from vector_index import NominatorSettings

_NEVER = 2**30  # tokens: no prompt is so long
_NO_TIMEOUTS = dict.fromkeys(("search_timeout_s", "embed_timeout_s", "write_timeout_s"), 3600.0)
_OPEN_GATES = {"min_prompt_tokens": 1, "max_deviation": math.inf}
_NO_REPAIR = {"rule": "windows", "edit_window": 0, "relocated_head": 0, "tail": 1, "max_budget": 0.0}


@dataclass(frozen=True, slots=True)
class SharingOptions:
    """
    `nominate`: which searches there are; "meaning" has neither fingerprints nor the prefix table.

    `open_gates`: every possible copy is made, whatever it costs in fidelity or time. No threshold applies,
    nothing is repaired, and the search by embedding always runs: the result is how much is found.
    None leaves a setting as config.yaml has it.
    """

    nominate: Literal["both", "fingerprints", "meaning"] = "both"
    open_gates: bool = False
    max_distance: float | None = None
    min_run: int | None = None
    max_donors: int | None = None
    max_deviation: float | None = None
    max_generation: int | None = None
    max_relocated_fraction: float | None = None
    min_saved_fraction: float | None = None
    max_candidates: int | None = None
    kgram: int | None = None
    window: int | None = None

    @property
    def uses_embedding(self) -> bool:
        return self.nominate != "fingerprints"

    def limits(self, settings: Settings) -> PlannerLimits:
        """The planner's limits."""
        limits = PlannerLimits.from_settings(settings, can_probe=True)
        if settings.sharing.calibration is None:
            limits = replace(limits, calibration=of_default_model())
        changes = self._changed("min_run", "max_donors", "max_deviation")
        policy = Policy(**self._changed("max_generation", "max_relocated_fraction", "min_saved_fraction"))
        if self.open_gates:
            changes, policy = changes | _OPEN_GATES, Policy(max_generation=_NEVER)
            repair = limits.repair.model_copy(update=_NO_REPAIR)
            limits = replace(limits, repair=repair, min_saved_s=-math.inf, dense_min_prefill_s=0.0)
        return replace(limits, sharing=limits.sharing.model_copy(update=changes), policy=policy)

    def nominator(self, settings: Settings) -> NominatorSettings:
        """The nominator's settings."""
        changes = _NO_TIMEOUTS | self._changed("kgram", "window", "max_candidates", "max_distance")
        if self.window is not None and self.window < settings.index.window:
            changes["max_fingerprints"] = _NEVER
        if self.nominate == "meaning":
            changes |= {"kgram": _NEVER, "block_size": _NEVER}
        if self.open_gates or self.nominate == "meaning":
            changes |= {"dense_min_tokens": 0, "dense_min_uncovered": 0.0}
        return replace(nominator_settings(settings.index), **changes)

    def _changed(self, *names: str) -> dict[str, Any]:
        """Those of these options that are not left to config.yaml."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}
