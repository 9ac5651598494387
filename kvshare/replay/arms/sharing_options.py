"""
How a kvshare arm differs from the server that config.yaml describes.

Time limits are lifted in all of them (a busy machine must not change a result), and the index is never
optimised.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from kvshare.index_factory import nominator_settings
from kvshare.settings import Settings
from kvshare.sharing.calibration import of_default_model
from kvshare.sharing.planner import PlannerLimits, Policy
from vector_index import NominatorSettings

Nominate = Literal["both", "fingerprints", "meaning"]

_LIMITS = ("min_run", "max_donors", "max_deviation")
_POLICY = ("max_generation", "max_relocated_fraction", "min_saved_fraction")
_NEVER = 2**30  # tokens: no prompt is so long
_NO_TIMEOUTS = dict.fromkeys(("search_timeout_s", "embed_timeout_s", "write_timeout_s"), 3600.0)
_OPEN_GATES = {"min_prompt_tokens": 1, "max_deviation": math.inf}
_NO_REPAIR = {"rule": "windows", "edit_window": 0, "relocated_head": 0, "tail": 1, "max_budget": 0.0}


@dataclass(frozen=True, slots=True)
class SharingOptions:
    """
    `nominate` says which searches there are; "meaning" has neither fingerprints nor prefix table.

    `open_gates`: every copy is made that can be, whatever it costs in fidelity or time: nothing is refused
    for being too far off, nothing is repaired, no generation is too high, the search by meaning is always
    worth it. What is left is how much is found. None keeps what config.yaml says.
    """

    nominate: Nominate = "both"
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
    def uses_meaning(self) -> bool:
        return self.nominate != "fingerprints"

    def as_document(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def limits(self, settings: Settings) -> PlannerLimits:
        """The planner's limits."""
        limits = PlannerLimits.from_settings(settings, can_probe=True)
        if settings.sharing.calibration is None:
            limits = replace(limits, calibration=of_default_model())
        if self.open_gates:
            limits = replace(
                limits,
                repair=limits.repair.model_copy(update=_NO_REPAIR),
                min_saved_s=-math.inf,
                dense_min_prefill_s=0.0,
            )
        changes = {**self._given(*_LIMITS), **(_OPEN_GATES if self.open_gates else {})}
        policy = Policy(max_generation=_NEVER) if self.open_gates else Policy(**self._given(*_POLICY))
        return replace(limits, sharing=limits.sharing.model_copy(update=changes), policy=policy)

    def nominator(self, settings: Settings) -> NominatorSettings:
        """The nominator's settings."""
        index = settings.index
        changes = {**_NO_TIMEOUTS, **self._given("kgram", "window", "max_candidates", "max_distance")}
        if self.window is not None and self.window < index.window:
            changes["max_fingerprints"] = _NEVER
        if self.nominate == "meaning":
            changes |= {"kgram": _NEVER, "block_size": _NEVER}
        if self.open_gates or self.nominate == "meaning":
            changes |= {"dense_min_tokens": 0, "dense_min_uncovered": 0.0}
        return replace(nominator_settings(index), **changes)

    def _given(self, *names: str) -> dict[str, Any]:
        """Those of these options that are not left to config.yaml."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}
