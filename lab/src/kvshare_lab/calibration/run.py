"""
Measures plans with both ways of repairing, or takes rows that the fidelity lab has measured, fits a
calibration to them and writes it into a file for servers.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvshare.errors import ConfigError, LogError
from kvshare.served_model import find_model
from kvshare.settings import load_settings
from kvshare.sharing.calibration import ModelCalibration
from kvshare.sharing.prediction import Calibration, Shape
from kvshare.sharing.repair import RepairRule
from kvshare_lab.bench.harness import chosen
from kvshare_lab.calibration.arms import Measured, measured_arms, shape_again
from kvshare_lab.calibration.evaluation import evaluated
from kvshare_lab.calibration.fitting import fit, typical_of_unseen
from kvshare_lab.calibration.risks import FEWEST_PLANS, at_length, certified
from kvshare_lab.fidelity.laboratory import Laboratory, work
from kvshare_lab.fidelity.rows import Plan, Shards, Stage, read_plans
from kvshare_lab.fidelity.suites import SUITES

# The lab's names for each way of repairing.
_RULES: dict[RepairRule, tuple[str, ...]] = {
    "windows": ("placeholders", "default", "edit-windows"),
    "attention": ("placeholders", "kvshare"),
}
_BUDGETS = (0.05, 0.1, 0.2, 0.5)
_CHAINED, _LOG = "chain", "log"  # suites: of more than single plans; of the user's own requests
_FEWEST = 100  # measured arms of a rule
# Of a prompt's tokens, for plans of several donors. The arms of half 0: with .35 repaired 12 of 381 are above
# .05 nats, with .5 4 (docs/log, 2026-11-28).
_LEAST_REPAIRED: dict[RepairRule, float] = {"attention": 0.5}


def run(
    *,
    model: str = "default",
    rows: Path = Path("calibration"),
    data: Path | None = None,
    log: Path | None = None,
    suites: str | None = None,
    plans: int = 12,
    minutes: float = 24 * 60.0,
    out: Path | None = None,
) -> dict[str, Any]:
    """
    Measure `plans` plans of each suite, unless `rows` is of another lab run; fit on half 0; write `out`.

    With a `log`, as many plans of its requests are measured as of all suites together. `suites`: names with
    commas; None: all. An interrupted run goes on from its rows.

    Raises:  ConfigError, ModelError; LogError where too few plans are measured
    """
    if out is not None and not out.absolute().parent.is_dir():  # before all is measured
        raise ConfigError("--out", f"there is no folder {out.absolute().parent}")
    laboratory = Laboratory.open(find_model(model, download=True), load_settings(), data=data, noise=False)
    laboratory.log = log
    made = _measured_plans(laboratory, _stage(suites, plans, log), rows, minutes=minutes)
    arms = _arms_by_rule(made, rows)
    calibration = calibrated(laboratory, made)
    if out is not None:
        out.write_text(json.dumps(calibration.as_document(), indent=1) + "\n", encoding="utf-8")
    files = {"rows": rows, "data": data, "log": log, "out": out}
    return {
        **{name: None if path is None else str(path) for name, path in files.items()},
        "rules": {rule: evaluated(measured) for rule, measured in arms.items()},
        "calibration": calibration.as_document(),
    }


def _stage(suites: str | None, plans: int, log: Path | None) -> Stage:
    """What is measured. Raises ConfigError for an unknown suite."""
    known = [suite for suite in SUITES if suite not in (_CHAINED, _LOG)]
    wanted = known if suites is None else chosen(suites, known, "--suites")
    own = {} if log is None else {_LOG: plans * len(wanted)}
    return Stage(
        name="calibration",
        half=0,
        plans={**dict.fromkeys(wanted, plans), **own},
        rules=tuple(dict.fromkeys(name for names in _RULES.values() for name in names)),
        budgets=_BUDGETS,
    )


def _measured_plans(
    laboratory: Laboratory, stage: Stage, rows: Path, *, minutes: float
) -> list[tuple[Plan, Shape]]:
    """All plans of the stage with their shapes. Raises LogError if the time ends before they are measured."""
    shards = Shards(rows)
    if not shards.models or (rows / stage.name).exists():
        counts = work(laboratory, shards, [stage], minutes=minutes)
        if counts["left"]:
            raise LogError(f"{rows}: {counts['left']} plans are left to measure; run the same command again")
    return [
        (plan, shape)
        for plan in read_plans(rows, half=0, model=laboratory.name)
        if plan.suite in stage.plans and (shape := shape_again(laboratory, plan)) is not None
    ]


def _by_rule(made: Sequence[tuple[Plan, Shape]]) -> dict[RepairRule, Measured]:
    return {rule: measured_arms(made, names) for rule, names in _RULES.items()}


def _arms_by_rule(made: list[tuple[Plan, Shape]], rows: Path) -> dict[RepairRule, Measured]:
    """Raises LogError for a rule with too few measured arms."""
    arms = _by_rule(made)
    for rule, measured in arms.items():
        if len(measured.kl) < _FEWEST:
            few = f"{len(measured.kl)} measured arms for {rule}, expected {_FEWEST} or more"
            raise LogError(f"{rows}: {few}; measure more with --plans")
    return arms


def calibrated(laboratory: Laboratory, made: Sequence[tuple[Plan, Shape]]) -> ModelCalibration:
    """The calibration of a model that is fitted to these plans."""
    arms, several = _by_rule(made), _by_rule([each for each in made if each[1].regime == "composed"])
    return ModelCalibration(
        model=laboratory.name,
        fingerprint=laboratory.model.model.fingerprint,
        rules={rule: _fitted(each) for rule, each in arms.items()},
        composed={
            rule: _fitted(each, least_repaired=_LEAST_REPAIRED.get(rule, 0.0))
            for rule, each in several.items()
            if each.num_repaired >= FEWEST_PLANS
        },
        longest=max(shape.num_tokens for _, shape in made),
        measured={"plans": len(made), "suites": sorted({plan.suite for plan, _ in made})},
    )


def _fitted(arms: Measured, *, least_repaired: float = 0.0) -> Calibration:
    """
    The weights, and the tables of risk that hold for plans which the weights have not seen, if they repair
    at least this share.
    """
    unseen = typical_of_unseen(arms.values, arms.kl, arms.folds)
    fitted = replace(fit(arms.values, arms.kl, arms.folds), least_repaired=least_repaired)
    enough = fitted.repairs_enough(arms.repaired, arms.lengths)
    return replace(
        fitted, risks=certified(arms, unseen, enough), at_length=at_length(arms, fitted.mean_where(unseen))
    )
