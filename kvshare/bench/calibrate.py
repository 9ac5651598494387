"""
`kvshare bench calibrate`: how well a plan's shape tells what its answer will cost, and the weights for it.

Takes what the lab has measured, makes the same plans again (no KV is computed), and fits. How well that works
is told on plans that the fit has not seen: other source documents, and whole suites that were left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvshare.bench.fidelity.laboratory import Laboratory
from kvshare.bench.fidelity.rows import Plan, Setting, read_plans
from kvshare.errors import LogError
from kvshare.served_model import find_model
from kvshare.settings import load_settings
from kvshare.sharing.prediction import FLOOR, Vector, features, fit

_FOLDS = 5
_FEWEST = 50  # plans


def run(
    *,
    model: str = "default",
    rows: Path = Path("fidelity"),
    data: Path | None = None,
    rule: str = "kvshare",
    budget: float = 0.1,
) -> dict[str, Any]:
    """
    Fit on the first half of what `rows` holds.

    Raises:  LogError where too few plans have the rule at this budget
    """
    setting = Setting(rule, "b", budget)
    measured = [plan for plan in read_plans(rows, half=0) if setting in plan.arms and plan.suite != "chain"]
    if len(measured) < _FEWEST:
        raise LogError(f"{rows}: {len(measured)} plans with {rule} at {budget}, expected {_FEWEST} or more")
    laboratory = Laboratory.open(find_model(model, download=True), load_settings(), data=data, noise=False)
    shapes = _shapes(laboratory, measured, setting)
    where = {"rows": str(rows), "data": None if data is None else str(data)}
    return {"model": laboratory.name, **where, "rule": rule, "budget": budget, **evaluated(shapes, rule=rule)}


@dataclass(frozen=True, slots=True)
class Shapes:
    """Measured plans: features (N, F) and mean KL (N,), by suite and source document."""

    values: Vector
    kl: NDArray[np.float64]
    suites: NDArray[np.str_]
    sources: NDArray[np.str_]
    model: str


def _shapes(laboratory: Laboratory, measured: Sequence[Plan], setting: Setting) -> Shapes:
    made = [(plan, _features(laboratory, plan)) for plan in measured]
    found = [(plan, values) for plan, values in made if values is not None]
    return Shapes(
        values=np.array([values for _, values in found]),
        kl=np.array([plan.arms[setting]["kl"] for plan, _ in found]),
        suites=np.array([plan.suite for plan, _ in found]),
        sources=np.array([plan.source for plan, _ in found]),
        model=laboratory.name,
    )


def _features(laboratory: Laboratory, plan: Plan) -> Vector | None:
    """None where the lab makes another plan of this number now."""
    scenario = laboratory.scenario(plan.suite, plan.row["half"], plan.row["number"])
    if scenario is None or len(scenario.prompt) != plan.row["tokens"]:
        return None
    shelf, tokens = laboratory.shelf(scenario), scenario.prompt.token_ids
    composition = shelf.compose(tokens)
    return features(
        composition.copies,
        num_tokens=len(tokens),
        exact_length=min(composition.exact_length, len(tokens) - 1),
        tail=laboratory.settings.repair.tail,
        common=shelf.common_prefixes(tokens),
    )


def evaluated(shapes: Shapes, *, rule: str) -> dict[str, Any]:
    """The calibration, how much of the variance it explains, and each suite as predicted by the others."""
    fold = np.array([xxhash.xxh3_64_intdigest(source.encode()) % _FOLDS for source in shapes.sources])
    by_source = _held_out(shapes, fold, rule)
    by_suite = _held_out(shapes, np.unique(shapes.suites, return_inverse=True)[1], rule)
    return {
        "plans": len(shapes.kl),
        "explained": {
            "other_sources": _explained(shapes.kl, by_source),
            "other_suites": _explained(shapes.kl, by_suite),
        },
        "suites": {
            str(suite): {
                "plans": int((shapes.suites == suite).sum()),
                **_means(shapes, shapes.suites == suite, {"measured": shapes.kl, "predicted": by_suite}),
            }
            for suite in np.unique(shapes.suites)
        },
        "calibration": fit(shapes.values, shapes.kl, model=shapes.model, rule=rule).as_document(),
    }


def _held_out(shapes: Shapes, groups: NDArray[np.int64], rule: str) -> NDArray[np.float64]:
    """(N,) typical KL of each plan, from a fit without its group."""
    predicted = np.zeros(len(groups))
    for group in np.unique(groups):
        inside = groups == group
        fitted = fit(shapes.values[~inside], shapes.kl[~inside], model=shapes.model, rule=rule)
        predicted[inside] = fitted.typical(shapes.values[inside])
    return predicted


def _explained(kl: NDArray[np.float64], predicted: NDArray[np.float64]) -> float:
    """Share of the variance of log10 KL."""
    target = np.log10(kl + FLOOR)
    return float(1 - ((target - np.log10(predicted)) ** 2).mean() / target.var())


def _means(
    shapes: Shapes, inside: NDArray[np.bool_], columns: dict[str, NDArray[np.float64]]
) -> dict[str, float]:
    """Geometric means of some plans."""
    mean: Callable[[NDArray[np.float64]], float] = lambda values: float(  # noqa: E731
        10 ** np.log10(values + FLOOR).mean()
    )
    return {name: mean(values[inside]) for name, values in columns.items()}
