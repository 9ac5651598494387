"""
Calibration files: weights that predict the deviation of a model's answers from reused KV, per repair rule.

`kvshare calibrate` writes them; the files in `calibrations/` are part of the package. A file belongs to the
model with its fingerprint (`kvshare.kv.parameters`). A model without a file is served with the default
model's weights, and its deviations are taken to be `_CAUTION` times as large, as the worst measured model's.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

from kvshare.errors import ConfigError
from kvshare.sharing.prediction import Calibration, Shape
from kvshare.sharing.repair import RepairRule
from kvshare.sharing.risk import ANY_DEVIATION, Regime, RiskTable

log = logging.getLogger(__name__)

FOLDER = Path(__file__).with_name("calibrations")
RULES: tuple[RepairRule, ...] = ("windows", "attention")
_DEFAULT_MODEL = "smollm2-135m-instruct"
# Measured deviation after edits: 1.5 times the default model's with 0.6 B parameters, 9 times with 8 B.
_CAUTION = 9.0
# Where KV is stored in 8 bits, answers deviated 2.0 (e4m3) and 3.5 (e5m2) times as much, on a CPU.
OF_EIGHT_BITS = 4.0
_UNCERTIFIED = RiskTable()
_UNMEASURED = 2.0  # factor on expectations and bounds for prompts that are longer than any measured one


@dataclass(frozen=True, slots=True)
class ModelCalibration:
    """
    Predicts the deviation of one model.

    `caution`: factor on every prediction; 1 for a measured model. `has_eight_bits`: KV is stored so, which
    costs another factor (`OF_EIGHT_BITS`). `longest`: length of the longest measured
    prompt. Predictions for longer prompts are multiplied by the factor of the longest measured ones
    (`Calibration.at_length`), for moved text also by the ratio of the lengths, and doubled.

    `composed`: weights that were fitted to plans of several donors alone, where repairs work in another way:
    with the weights of all plans, mosaics of threads deviated 1.8 times as far as expected. A rule without
    such weights predicts these plans with those of all. Their `least_repaired` limits what is certified.
    """

    model: str
    fingerprint: str
    rules: Mapping[RepairRule, Calibration]
    longest: int  # tokens
    caution: float = 1.0
    has_eight_bits: bool = False
    measured: Mapping[str, Any] = field(default_factory=dict)  # how it was measured, for people
    composed: Mapping[RepairRule, Calibration] = field(default_factory=dict)

    def expected(self, shape: Shape, rule: RepairRule, repaired: float) -> float:
        """Return the expected KL, nats, of plans of this shape if a rule repairs `repaired` tokens."""
        mean = float(self._weights(shape.regime, rule).expected(shape.repaired(repaired)))
        return self._unmeasured(shape.num_tokens) * self._factor(shape, rule) * mean

    def bound(self, shape: Shape, rule: RepairRule, repaired: float, *, risk: float) -> float:
        """Return the KL, nats, that answers of such plans exceed with at most this risk; at 1 the mean."""
        return self.bounds(shape, rule, [repaired], risk=risk)[0]

    def bounds(
        self, shape: Shape, rule: RepairRule, repaired: Sequence[float], *, risk: float
    ) -> list[float]:
        """Return `bound` for several numbers of repaired tokens."""
        calibration, values = self._weights(shape.regime, rule), shape.repaired(repaired)
        unmeasured, factor = self._unmeasured(shape.num_tokens), self._factor(shape, rule)
        if risk >= 1:
            return [unmeasured * factor * mean for mean in calibration.expected(values).tolist()]
        risks = calibration.risks.get(shape.regime, _UNCERTIFIED)
        typical = calibration.typical(values).tolist()
        enough = calibration.repairs_enough(repaired, shape.num_tokens).tolist()
        return [
            unmeasured * (risks.bound(factor * each, risk) if is_enough else ANY_DEVIATION)
            for each, is_enough in zip(typical, enough, strict=True)
        ]

    def least_repaired(self, shape: Shape, rule: RepairRule, *, risk: float) -> float:
        """Return the tokens that a plan must repair to have a `bound`; where the mean is limited, none."""
        return 0.0 if risk >= 1 else self._weights(shape.regime, rule).least_repaired * shape.num_tokens

    def least_share(
        self, regime: Regime, num_tokens: int, rules: Sequence[RepairRule], *, risk: float, limit: float
    ) -> float | None:
        """
        Return the share of a prompt that must be repaired, by one of these rules, to keep a limit at a risk,
        whatever the plan's shape. None: no plan of such a prompt keeps the limit.
        """
        if risk >= 1:
            return 0.0
        unmeasured = self._unmeasured(num_tokens)
        known = (self._weights(regime, rule) for rule in rules)
        shares = (
            each.least_repaired
            for each in known
            if unmeasured * each.risks.get(regime, _UNCERTIFIED).bound(0.0, risk) <= limit
        )
        return min(shares, default=None)

    def _weights(self, regime: Regime, rule: RepairRule) -> Calibration:
        return self.composed.get(rule, self.rules[rule]) if regime == "composed" else self.rules[rule]

    def _unmeasured(self, num_tokens: int) -> float:
        return _UNMEASURED if num_tokens > self.longest else 1.0

    def _factor(self, shape: Shape, rule: RepairRule) -> float:
        """Return the factor by which plans of this shape are taken to be worse than predicted."""
        beyond = shape.num_tokens / self.longest
        of_length = self._weights(shape.regime, rule).at_length * beyond**shape.far if beyond > 1 else 1.0
        return self.caution * (OF_EIGHT_BITS if self.has_eight_bits else 1.0) * of_length

    @property
    def digest(self) -> str:
        """Hash everything that predictions depend on. KV stored with another digest is not used."""
        document = self.as_document()
        parts = [document["rules"], self.longest, self.caution, *[True] * self.has_eight_bits]
        parts += [document["composed"]] if self.composed else []
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def as_document(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        composed = {rule: calibration.as_document() for rule, calibration in self.composed.items()}
        return {
            "model": self.model,
            "fingerprint": self.fingerprint,
            "longest": self.longest,
            "measured": dict(self.measured),
            "rules": {rule: calibration.as_document() for rule, calibration in self.rules.items()},
            **({"composed": composed} if composed else {}),
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Raises ValueError with the name of a value that is missing or not a number."""
        try:
            calibration = cls(
                model=str(document["model"]),
                fingerprint=str(document["fingerprint"]),
                rules={rule: Calibration.from_document(document["rules"][rule]) for rule in RULES},
                longest=int(document["longest"]),
                measured=dict(document.get("measured", {})),
                composed={
                    rule: Calibration.from_document(document["composed"][rule])
                    for rule in RULES
                    if rule in document.get("composed", {})
                },
            )
            if calibration.longest < 1:
                raise ValueError(f"longest is {calibration.longest}, expected at least 1 token")
            return calibration
        except (KeyError, TypeError) as exc:
            raise ValueError(f"not a calibration: {type(exc).__name__}: {exc}") from exc


def read_calibration(path: Path) -> ModelCalibration:
    """Read a file of `kvshare calibrate`. Raises a ConfigError that names the file and what was expected."""
    try:
        return ModelCalibration.from_document(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as exc:
        expected = f"{path}: expected a file written by `kvshare calibrate` of this version: {exc}"
        raise ConfigError("sharing.calibration", expected) from exc


@cache
def shipped() -> Mapping[str, ModelCalibration]:
    """Return the calibrations of the package, by fingerprint."""
    found = [read_calibration(path) for path in sorted(FOLDER.glob("*.json"))]
    return {calibration.fingerprint: calibration for calibration in found}


def calibration_of(fingerprint: str, path: str | None = None) -> ModelCalibration:
    """
    Return the calibration at `path` if given, for whatever model; else the model's own; else `cautious()`.

    Raises:  ConfigError if the file at `path` cannot be read
    """
    if path is not None:
        return read_calibration(Path(path))
    return shipped().get(fingerprint) or cautious()


def log_calibration(calibration: ModelCalibration, fingerprint: str) -> None:
    """Log which calibration is used, and what to do if it is not the served model's own."""
    if calibration.caution != 1:
        log.warning(
            "this model has no calibration: deviations are predicted as those of %s times %g, and less is "
            "shared. Run `kvshare calibrate --model PATH` to measure it",
            _DEFAULT_MODEL,
            calibration.caution,
        )
    elif calibration.fingerprint != fingerprint:
        log.warning(
            "sharing.calibration was measured with %s, which is not the served model. Run `kvshare calibrate "
            "--model PATH` to measure the served one",
            calibration.model,
        )
    else:
        log.info(
            "deviations are predicted with the calibration of %s, which holds up to %d tokens",
            calibration.model,
            calibration.longest,
        )


@cache
def of_default_model() -> ModelCalibration:
    """Return the default model's calibration; a replay, which has no model, uses it."""
    return read_calibration(FOLDER / f"{_DEFAULT_MODEL}.json")


@cache
def cautious() -> ModelCalibration:
    """Return the calibration for models that were not measured."""
    return replace(of_default_model(), model="unknown", fingerprint="", caution=_CAUTION)
