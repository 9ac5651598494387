"""
What is known of a model's answers behind reused KV: weights for both ways of repairing, in a file.

Files are made by `kvshare calibrate`; those in `calibrations/` ship. A model is known by its fingerprint
(`kvshare.kv.fingerprint`), which both engines compute. For any other the default model's weights are used,
and a plan is expected to be `_CAUTION` times as bad.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

from kvshare.errors import ConfigError
from kvshare.sharing.prediction import Calibration, Shape
from kvshare.sharing.repair import RepairRule

log = logging.getLogger(__name__)

FOLDER = Path(__file__).with_name("calibrations")
RULES: tuple[RepairRule, ...] = ("windows", "attention")
_DEFAULT_MODEL = "smollm2-135m-instruct"
# Edits of governing text cost 1.5 times as much on a model of 0.6 B parameters, and 9 times on one of 8 B.
_CAUTION = 4.0


@dataclass(frozen=True, slots=True)
class ModelCalibration:
    """
    `caution`: how many times worse than predicted a plan is taken to be; 1 for a measured model. Text from
    elsewhere in prompts longer than `longest`, which nobody measured, is taken to be worse in proportion.
    """

    model: str
    fingerprint: str
    rules: Mapping[RepairRule, Calibration]
    longest: int  # tokens
    caution: float = 1.0
    measured: Mapping[str, Any] = field(default_factory=dict)  # how, for readers

    def expected(self, shape: Shape, rule: RepairRule, repaired: float) -> float:
        """Mean KL, nats, of plans of this shape with so many tokens repaired by a rule."""
        beyond = float(max(1.0, shape.num_tokens / self.longest) ** shape.far)
        return self.caution * beyond * float(self.rules[rule].expected(shape.repaired(repaired)))

    def as_document(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "model": self.model,
            "fingerprint": self.fingerprint,
            "longest": self.longest,
            "measured": dict(self.measured),
            "rules": {rule: calibration.as_document() for rule, calibration in self.rules.items()},
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Raises ValueError that names what is missing or no number."""
        try:
            calibration = cls(
                model=str(document["model"]),
                fingerprint=str(document["fingerprint"]),
                rules={rule: Calibration.from_document(document["rules"][rule]) for rule in RULES},
                longest=int(document["longest"]),
                measured=dict(document.get("measured", {})),
            )
            if calibration.longest < 1:
                raise ValueError(f"longest is {calibration.longest}, expected tokens")
            return calibration
        except (KeyError, TypeError) as exc:
            raise ValueError(f"not a calibration: {type(exc).__name__}: {exc}") from exc


def read_calibration(path: Path) -> ModelCalibration:
    """Raises ConfigError that names the file and what was expected of it."""
    try:
        return ModelCalibration.from_document(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as exc:
        expected = f"{path}: expected a file of `kvshare calibrate`: {exc}"
        raise ConfigError("sharing.calibration", expected) from exc


@cache
def shipped() -> Mapping[str, ModelCalibration]:
    """By fingerprint."""
    found = [read_calibration(path) for path in sorted(FOLDER.glob("*.json"))]
    return {calibration.fingerprint: calibration for calibration in found}


def calibration_of(fingerprint: str, path: str | None = None) -> ModelCalibration:
    """
    A model's own weights: those at `path`, whatever model they are of, or those that ship; else the default
    model's, with caution.

    Raises:  ConfigError where the file at `path` cannot be read
    """
    if path is not None:
        return read_calibration(Path(path))
    return shipped().get(fingerprint) or cautious()


def log_calibration(calibration: ModelCalibration, fingerprint: str) -> None:
    """What plans of the served model are judged by, and what to do where that is not the model's own."""
    if calibration.caution != 1:
        log.warning(
            "what reused KV costs this model was not measured: plans are taken to be %g times as far off as "
            "with %s. `kvshare calibrate --model PATH` measures it, and more is shared",
            calibration.caution,
            _DEFAULT_MODEL,
        )
    elif calibration.fingerprint != fingerprint:
        log.warning(
            "sharing.calibration was made for %s, which is not the model that is served; `kvshare calibrate` "
            "makes one for this model",
            calibration.model,
        )
    else:
        log.info("answers behind reused KV are predicted with the calibration of %s", calibration.model)


@cache
def of_default_model() -> ModelCalibration:
    """For a replay, which has no model."""
    return read_calibration(FOLDER / f"{_DEFAULT_MODEL}.json")


@cache
def cautious() -> ModelCalibration:
    """For a model that nobody measured."""
    return replace(of_default_model(), model="unknown", fingerprint="", caution=_CAUTION)
