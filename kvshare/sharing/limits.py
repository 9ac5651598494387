"""
What limits the plans of one model: the settings, the abilities of its engine, and its calibration.

Knows no plan: the planner asks it which candidates may be copied, and compares its plans with the limits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from delta_tree import Node
from kvshare.settings import RepairSettings, Settings, SharingSettings
from kvshare.sharing.calibration import RULES, ModelCalibration, calibration_of, cautious
from kvshare.sharing.rates import ANYTHING, MinSaved
from kvshare.sharing.risk import Regime, bound_of_inherited

MAX_GENERATION = 40  # longer chains of copies were not measured (`chain` in docs/fidelity.md)


@dataclass(frozen=True, slots=True)
class Policy:
    """Thresholds besides that of the deviation. A replay varies them, a server does not. None: no limit."""

    max_generation: int = MAX_GENERATION
    max_relocated_fraction: float | None = None
    min_saved_fraction: float | None = None


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """
    A model as planning sees it, on all engines that serve it. `can_probe`: repairs can be chosen after a
    probe pass. `has_eight_bits`: some of them store KV in 8 bits, after which answers deviate more.
    """

    fingerprint: str
    can_move_keys: bool
    can_probe: bool
    has_eight_bits: bool = False


@dataclass(frozen=True, slots=True)
class PlannerLimits:
    """The planner's limits: the settings, the abilities of the engine, the calibration of the model."""

    sharing: SharingSettings
    repair: RepairSettings
    calibration: ModelCalibration = field(default_factory=cautious)
    can_share: bool = True
    can_move_keys: bool = True
    can_probe: bool = False  # whether the engine can choose repairs after a probe pass
    threshold: MinSaved = ANYTHING  # what a plan must save
    # A search by embedding may take this share of what it can save; None: any.
    dense_max_share: float | None = None
    policy: Policy = Policy()

    def of_model(self, model: ModelTraits) -> Self:
        """Return these limits with a model's abilities, and its calibration if the settings name none."""
        named = self.sharing.calibration is not None
        calibration = self.calibration if named else calibration_of(model.fingerprint)
        return replace(
            self,
            calibration=replace(calibration, has_eight_bits=model.has_eight_bits),
            can_move_keys=model.can_move_keys,
            can_probe=model.can_probe,
        )

    def deviating_at_most(self, max_deviation: float | None) -> Self:
        """Return these limits; with the request's limit of deviation, in nats, if that is lower."""
        if max_deviation is None or max_deviation >= self.sharing.max_deviation:
            return self
        return replace(self, sharing=self.sharing.model_copy(update={"max_deviation": max_deviation}))

    def least_share(self, regime: Regime, num_tokens: int) -> float | None:
        """Return the share of a prompt that plans of this kind must repair; None if they are all refused."""
        may_choose = self.can_probe and self.repair.rule != "windows"
        limit, risk = self.sharing.max_deviation, self.sharing.max_risk
        rules = RULES if may_choose else RULES[:1]
        found = self.calibration.least_share(regime, num_tokens, rules, risk=risk, limit=limit)
        return None if found is None or found > self.repair.max_budget else found

    def refuses(self, regime: Regime, num_tokens: int) -> bool:
        """Return whether plans of this kind deviate by more than the limit, whatever they repair."""
        return self.least_share(regime, num_tokens) is None

    def usable(self, node: Node) -> Node | None:
        """Return the part of a prompt that may be copied: if it deviates too much, only its exact prefix."""
        if bound_of_inherited(node.deviation, self.sharing.max_risk) <= self.sharing.max_deviation:
            return node
        return exact_part(node)

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
        Return the limits in config.yaml, for an engine with these abilities.

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
            threshold=MinSaved(settings.cost.min_saved_s, settings.cost.min_saved_fraction),
            dense_max_share=settings.index.dense_max_share,
        )


def is_exact(node: Node) -> bool:
    """Return whether all KV of a prompt is exact, as after a full prefill."""
    return node.exact_length == node.num_tokens


def exact_part(node: Node) -> Node | None:
    """Return a stored prompt's exact prefix; None if it has none."""
    if is_exact(node):
        return node
    if not node.exact_length:
        return None
    return replace(
        node, token_ids=node.token_ids[: node.exact_length], pieces=node.pieces.first(node.exact_length)
    )
