"""
The promise: at most a share `risk` of the answers from shared KV deviates by more than a limit.

A plan's typical deviation is predicted from its shape. How far single answers are from it depends on the
kind of plan, its *regime*. So each regime has a table that `kvshare calibrate` writes: if only plans up to a
typical deviation are shared, at most a share `risk` of their answers deviate by more than a limit, at 95 %
confidence. `kvshare calibrate` tests limits one after another, from the strictest on ("Learn then Test",
Angelopoulos et al., arXiv:2110.01052, fixed sequence testing; Clopper and Pearson's bound).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, Self, get_args

Regime = Literal["in_place", "moved", "composed"]
REGIMES: tuple[Regime, ...] = get_args(Regime)
ANY_DEVIATION = 20.0  # nats: more than any answer deviates by, so that it bounds every plan
CONFIDENCE = 0.95
_CARRIED = 2.0  # nats that an answer may deviate by for each expected nat of its donors: docs/fidelity.md


@dataclass(frozen=True, slots=True)
class RiskTable:
    """
    What is certified for one regime.

    `typical`: by risk and by limit of deviation (nats), the highest typical deviation (nats) of plans that
    keep the promise. A missing entry is not certified, for instance if too few plans were measured.
    """

    typical: Mapping[float, Mapping[float, float]] = field(default_factory=dict)

    def bound(self, typical: float, risk: float) -> float:
        """Return the smallest certified deviation, nats, that such plans exceed with at most this risk."""
        certified = [limits for known, limits in self.typical.items() if known <= risk]
        found = (limit for limits in certified for limit, most in limits.items() if typical <= most)
        return min(found, default=ANY_DEVIATION)

    def as_document(self) -> dict[str, dict[str, float]]:
        """Return it as JSON takes it."""
        return {
            f"{risk:g}": {f"{limit:g}": most for limit, most in limits.items()}
            for risk, limits in self.typical.items()
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Raises ValueError for what is not a table of positive numbers."""
        try:
            limits_by_risk = {
                float(risk): {float(limit): float(most) for limit, most in limits.items()}
                for risk, limits in document.items()
            }
        except (AttributeError, TypeError) as exc:
            raise ValueError(f"risk: expected numbers by risk and deviation: {exc}") from exc
        numbers = [each for limits in limits_by_risk.values() for pair in limits.items() for each in pair]
        if not all(0 < each < inf for each in (*limits_by_risk, *numbers)):
            raise ValueError("risk: expected positive, finite numbers")
        return cls(limits_by_risk)


def bound_of_inherited(expected: float, risk: float) -> float:
    """Return how far, in nats, answers may deviate because of their donors' `expected` deviation."""
    return expected if risk >= 1 else _CARRIED * expected
