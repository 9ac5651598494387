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
from kvshare.sharing.planner import PlannerLimits
from vector_index import NominatorSettings

Nominate = Literal["both", "fingerprints", "meaning"]

_LIMITS = ("min_run", "max_donors", "max_generation", "max_relocated_fraction", "min_saved_fraction")
_NO_TIMEOUT_S = 3600.0
_NEVER = 2**30  # tokens: no prompt is so long


@dataclass(frozen=True, slots=True)
class SharingOptions:
    """
    `nominate` says which searches there are; "meaning" has neither fingerprints nor prefix table.

    `open_gates`: every copy is made that can be, whatever it costs in fidelity or time: nothing is refused
    for saving too little or coming from far, nothing is repaired, no generation is too high, the search by
    meaning is always worth it. What is left is how much is found. None keeps what config.yaml says.
    """

    nominate: Nominate = "both"
    open_gates: bool = False
    max_distance: float | None = None
    min_run: int | None = None
    max_donors: int | None = None
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
        repair = settings.repair
        changes = {name: value for name in _LIMITS if (value := getattr(self, name)) is not None}
        sharing = settings.sharing.model_copy(update=changes)
        limits = PlannerLimits.from_settings(settings)
        if not self.open_gates:
            return replace(limits, sharing=sharing)
        return PlannerLimits(
            sharing=sharing.model_copy(
                update={
                    "min_prompt_tokens": 1,
                    "max_generation": _NEVER,
                    "min_saved_fraction": 0.0,
                    "max_relocated_fraction": 1.0,
                }
            ),
            repair=repair.model_copy(
                update={"edit_window": 0, "relocated_head": 0, "tail": 1, "max_budget": 0.0}
            ),
            min_saved_s=-math.inf,
            dense_min_prefill_s=0.0,
        )

    def nominator(self, settings: Settings) -> NominatorSettings:
        """The nominator's settings."""
        index = settings.index
        kept = replace(
            nominator_settings(index),
            kgram=self.kgram or index.kgram,
            window=self.window or index.window,
            max_candidates=self.max_candidates or index.max_candidates,
            max_distance=index.max_distance if self.max_distance is None else self.max_distance,
            search_timeout_s=_NO_TIMEOUT_S,
            embed_timeout_s=_NO_TIMEOUT_S,
            write_timeout_s=_NO_TIMEOUT_S,
        )
        if self.window is not None and self.window < index.window:
            kept = replace(kept, max_fingerprints=_NEVER)
        if self.nominate == "meaning":
            kept = replace(kept, kgram=_NEVER, block_size=_NEVER)
        if self.open_gates or self.nominate == "meaning":
            kept = replace(kept, dense_min_tokens=0, dense_min_uncovered=0.0)
        return kept
