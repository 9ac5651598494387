"""
`kvshare calibrate`: what a plan's shape tells of its answer with one model, in a file that servers read.

Measures plans with both ways of repairing (or takes what the lab has measured), makes the same plans again,
without KV, and fits. How well that works is told on plans that the fit has not seen: other source documents,
and whole suites that were left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from delta_tree import Span
from kvshare.bench.fidelity.laboratory import Laboratory, work
from kvshare.bench.fidelity.rows import Plan, read_plans
from kvshare.bench.fidelity.shards import Shards, Stage
from kvshare.bench.fidelity.suites import SUITES
from kvshare.errors import ConfigError, LogError
from kvshare.served_model import find_model
from kvshare.settings import load_settings
from kvshare.sharing.calibration import ModelCalibration
from kvshare.sharing.plan import within
from kvshare.sharing.prediction import FLOOR, Calibration, Shape, Vector, fit, shape_of, typical_of_unseen
from kvshare.sharing.repair import RepairRule

# What the lab calls each way of repairing, at whatever budgets it was measured.
_RULES: dict[RepairRule, tuple[str, ...]] = {
    "windows": ("placeholders", "default", "edit-windows"),
    "attention": ("placeholders", "kvshare"),
}
_BUDGETS = (0.05, 0.1, 0.2, 0.5)
_CHAINED, _LOG = "chain", "log"  # no single plans; the user's own
_FOLDS = 5
_EXPECTED = (0.0, 0.001, 0.005, 0.01, 0.02, 0.05, 10.0)  # nats: where expected and found means are compared
_FEWEST = 100  # measured arms of a rule


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
    Measure what is left of `plans` plans a suite, unless `rows` has others; fit on half 0; write `out`.

    With a `log`, its requests count for as many plans as all suites together. `suites`: names with commas,
    where a model is made for some kinds of prompts only.

    Raises:  ConfigError, ModelError; LogError where too few plans are measured
    """
    if out is not None and not out.absolute().parent.is_dir():  # better now than when all is measured
        raise ConfigError("--out", f"there is no folder {out.absolute().parent}")
    laboratory = Laboratory.open(find_model(model, download=True), load_settings(), data=data, noise=False)
    laboratory.log = log
    wanted = _wanted(suites)
    shards, stage = Shards(rows), _stage(plans, wanted, with_log=log is not None)
    if not shards.models or (rows / stage.name).exists():
        counts = work(laboratory, shards, [stage], minutes=minutes)
        if counts["left"]:
            raise LogError(f"{rows}: {counts['left']} plans are left to measure; run the same command again")
    known = read_plans(rows, half=0, model=laboratory.name)
    measured = [plan for plan in known if plan.suite in stage.plans]
    made = [(plan, shape) for plan in measured if (shape := _shape(laboratory, plan)) is not None]
    found = {rule: _arms(made, names) for rule, names in _RULES.items()}
    for rule, arms in found.items():
        if len(arms.kl) < _FEWEST:
            few = f"{len(arms.kl)} measured arms for {rule}, expected {_FEWEST} or more"
            raise LogError(f"{rows}: {few}; measure more with --plans")
    calibration = ModelCalibration(
        model=laboratory.name,
        fingerprint=laboratory.model.model.fingerprint,
        rules={rule: arms.fitted() for rule, arms in found.items()},
        longest=max(shape.num_tokens for _, shape in made),
        measured={"plans": len(made), "suites": sorted({plan.suite for plan, _ in made})},
    )
    if out is not None:
        out.write_text(json.dumps(calibration.as_document(), indent=1) + "\n", encoding="utf-8")
    return {
        "rows": str(rows),
        "data": _named(data),
        "log": _named(log),
        "out": _named(out),
        "rules": {rule: evaluated(arms) for rule, arms in found.items()},
        "calibration": calibration.as_document(),
    }


def _wanted(suites: str | None) -> list[str]:
    """Raises ConfigError for a suite that there is not."""
    known = [suite for suite in SUITES if suite not in (_CHAINED, _LOG)]
    chosen = known if suites is None else [name.strip() for name in suites.split(",")]
    if unknown := [name for name in chosen if name not in known]:
        raise ConfigError("--suites", f"no suite {unknown[0]!r}; there are {', '.join(known)}")
    return chosen


def _stage(plans: int, suites: Sequence[str], *, with_log: bool) -> Stage:
    own = {_LOG: plans * len(suites)} if with_log else {}
    return Stage(
        name="calibration",
        half=0,
        plans={**dict.fromkeys(suites, plans), **own},
        rules=tuple(dict.fromkeys(name for names in _RULES.values() for name in names)),
        budgets=_BUDGETS,
    )


def _named(path: Path | None) -> str | None:
    return None if path is None else str(path)


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured arms: features (N, F) and mean KL (N,), by suite and source document."""

    values: Vector
    kl: NDArray[np.float64]
    suites: NDArray[np.str_]
    sources: NDArray[np.str_]

    @property
    def folds(self) -> NDArray[np.int64]:
        """(N,) which of five parts an arm is in: all of one source document in the same."""
        return np.array([xxhash.xxh3_64_intdigest(source.encode()) % _FOLDS for source in self.sources])

    def fitted(self) -> Calibration:
        """On all; bias and slope on what is predicted for other source documents."""
        return fit(self.values, self.kl, self.folds)


def _arms(made: Sequence[tuple[Plan, Shape]], rules: Sequence[str]) -> Measured:
    found = list(_arms_of(made, rules))
    return Measured(
        values=np.array([values for _, values, _ in found]),
        kl=np.array([kl for _, _, kl in found]),
        suites=np.array([plan.suite for plan, _, _ in found]),
        sources=np.array([plan.source for plan, _, _ in found]),
    )


def _arms_of(
    made: Sequence[tuple[Plan, Shape]], rules: Sequence[str]
) -> Iterator[tuple[Plan, Vector, float]]:
    """Arms whose budget is by what they repair: what they are charged says how they choose, not how well."""
    for plan, shape in made:
        for setting, arm in plan.arms.items():
            if setting.rule in rules and setting.by == "b" and arm.get("kl") is not None:
                yield plan, shape.repaired(arm["b"] * plan.row["tokens"]), arm["kl"]


def _shape(laboratory: Laboratory, plan: Plan) -> Shape | None:
    """None where the lab makes another plan of this number now."""
    scenario = laboratory.scenario(plan.suite, plan.row["half"], plan.row["number"])
    if scenario is None or len(scenario.prompt) != plan.row["tokens"]:
        return None
    stored, tokens = laboratory.stored_prompts(scenario), scenario.prompt.token_ids
    composition = stored.compose(tokens)
    exact_length = min(composition.exact_length, len(tokens) - 1)
    tail = max(exact_length, len(tokens) - laboratory.settings.repair.tail)
    return shape_of(
        within(composition.copies, Span(exact_length, tail)),
        num_tokens=len(tokens),
        exact_length=exact_length,
        common=stored.common_prefixes(tokens),
    )


def evaluated(arms: Measured) -> dict[str, Any]:
    """
    How much of the variance is explained, how far means are from what is expected, and each suite as
    predicted by the others.
    """
    by_source = typical_of_unseen(arms.values, arms.kl, arms.folds)
    groups = np.unique(arms.suites, return_inverse=True)[1]
    of_others = groups if groups.any() else arms.folds  # of a single suite there are no others
    by_suite = typical_of_unseen(arms.values, arms.kl, of_others)
    fitted = arms.fitted()
    return {
        "arms": len(arms.kl),
        "explained": {
            "other_sources": _explained(arms.kl, by_source),
            "other_suites": _explained(arms.kl, by_suite),
        },
        "bias": fitted.bias,
        "slope": fitted.slope,
        "means": list(_found_and_expected(arms, fitted.mean_where(by_source))),
        "suites": {
            str(suite): {
                "arms": int((arms.suites == suite).sum()),
                **_means(arms.suites == suite, {"measured": arms.kl, "predicted": by_suite}),
            }
            for suite in np.unique(arms.suites)
        },
    }


def _found_and_expected(arms: Measured, expected: NDArray[np.float64]) -> Iterator[dict[str, float]]:
    """Mean KL of arms that repair anything, found and expected, by what is expected."""
    served = arms.values[:, -1] > 0
    for low, high in pairwise(_EXPECTED):
        inside = served & (expected >= low) & (expected < high)
        if inside.any():
            means = {"found": float(arms.kl[inside].mean()), "expected": float(expected[inside].mean())}
            yield {"from": low, "to": high, "arms": int(inside.sum()), **means}


def _explained(kl: NDArray[np.float64], predicted: NDArray[np.float64]) -> float:
    """Share of the variance of log10 KL."""
    target = np.log10(kl + FLOOR)
    return float(1 - ((target - np.log10(predicted)) ** 2).mean() / target.var())


def _means(inside: NDArray[np.bool_], columns: dict[str, NDArray[np.float64]]) -> dict[str, float]:
    """Geometric means of some arms."""
    mean: Callable[[NDArray[np.float64]], float] = lambda values: float(  # noqa: E731
        10 ** np.log10(values + FLOOR).mean()
    )
    return {name: mean(values[inside]) for name, values in columns.items()}
