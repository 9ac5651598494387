"""
`kvshare calibrate`: how far answers of one model deviate, by the shape of their plans, in a file for servers.

Measures plans with both ways of repairing (or takes rows that the fidelity lab has measured), makes the same
plans again without KV, and fits. The fit is judged on plans that it has not seen: of other source documents,
and of whole suites that were left out.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from scipy.stats import gmean

from delta_tree import Span, common_prefix_length
from kvshare.errors import ConfigError, LogError
from kvshare.served_model import find_model
from kvshare.settings import load_settings
from kvshare.sharing.calibration import ModelCalibration
from kvshare.sharing.plan import within
from kvshare.sharing.prediction import FLOOR, Shape, Vector, fit, shape_of, typical_of_unseen
from kvshare.sharing.repair import RepairRule
from kvshare_lab.bench.harness import chosen
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
_FOLDS = 5
_EXPECTED = (0.0, 0.001, 0.005, 0.01, 0.02, 0.05, 10.0)  # nats: bins of expected KL
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
    Measure `plans` plans of each suite, unless `rows` is of another lab run; fit on half 0; write `out`.

    With a `log`, as many plans of its requests are measured as of all suites together. `suites`: names with
    commas; None: all. An interrupted run goes on from its rows.

    Raises:  ConfigError, ModelError; LogError where too few plans are measured
    """
    if out is not None and not out.absolute().parent.is_dir():  # before all is measured
        raise ConfigError("--out", f"there is no folder {out.absolute().parent}")
    laboratory = Laboratory.open(find_model(model, download=True), load_settings(), data=data, noise=False)
    laboratory.log = log
    known = [suite for suite in SUITES if suite not in (_CHAINED, _LOG)]
    wanted = known if suites is None else chosen(suites, known, "--suites")
    own = {} if log is None else {_LOG: plans * len(wanted)}
    stage = Stage(
        name="calibration",
        half=0,
        plans={**dict.fromkeys(wanted, plans), **own},
        rules=tuple(dict.fromkeys(name for names in _RULES.values() for name in names)),
        budgets=_BUDGETS,
    )
    shards = Shards(rows)
    if not shards.models or (rows / stage.name).exists():
        counts = work(laboratory, shards, [stage], minutes=minutes)
        if counts["left"]:
            raise LogError(f"{rows}: {counts['left']} plans are left to measure; run the same command again")
    made = [
        (plan, shape)
        for plan in read_plans(rows, half=0, model=laboratory.name)
        if plan.suite in stage.plans and (shape := _shape(laboratory, plan)) is not None
    ]
    found = {rule: _arms(made, names) for rule, names in _RULES.items()}
    for rule, arms in found.items():
        if len(arms.kl) < _FEWEST:
            few = f"{len(arms.kl)} measured arms for {rule}, expected {_FEWEST} or more"
            raise LogError(f"{rows}: {few}; measure more with --plans")
    calibration = ModelCalibration(
        model=laboratory.name,
        fingerprint=laboratory.model.model.fingerprint,
        rules={rule: fit(arms.values, arms.kl, arms.folds) for rule, arms in found.items()},
        longest=max(shape.num_tokens for _, shape in made),
        measured={"plans": len(made), "suites": sorted({plan.suite for plan, _ in made})},
    )
    if out is not None:
        out.write_text(json.dumps(calibration.as_document(), indent=1) + "\n", encoding="utf-8")
    files = {"rows": rows, "data": data, "log": log, "out": out}
    return {
        **{name: None if path is None else str(path) for name, path in files.items()},
        "rules": {rule: evaluated(arms) for rule, arms in found.items()},
        "calibration": calibration.as_document(),
    }


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured arms: features (N, F) and mean KL (N,), by suite and source document."""

    values: Vector
    kl: NDArray[np.float64]
    suites: NDArray[np.str_]
    sources: NDArray[np.str_]

    @property
    def folds(self) -> NDArray[np.int64]:
        """(N,) the fold of each arm, out of five; all arms of one source document are in the same."""
        return np.array([xxhash.xxh3_64_intdigest(source.encode()) % _FOLDS for source in self.sources])


def _arms(made: Sequence[tuple[Plan, Shape]], rules: Sequence[str]) -> Measured:
    """The arms of these rules whose budget limits what they repair, and not what choosing costs as well."""
    found = [
        (shape.repaired(arm["b"] * plan.row["tokens"]), arm["kl"], plan.suite, plan.source)
        for plan, shape in made
        for setting, arm in plan.arms.items()
        if setting.rule in rules and setting.by == "b" and arm.get("kl") is not None
    ]
    return Measured(*(np.array([row[column] for row in found]) for column in range(4)))


def _shape(laboratory: Laboratory, plan: Plan) -> Shape | None:
    """None where the lab now makes another plan of this number."""
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
        common={node.node_id: common_prefix_length(node.token_ids, tokens) for node in stored.nodes},
    )


def evaluated(arms: Measured) -> dict[str, Any]:
    """The explained share of the variance, expected and measured means, each suite as others predict it."""
    by_source = typical_of_unseen(arms.values, arms.kl, arms.folds)
    suites, groups = np.unique(arms.suites, return_inverse=True)
    # With a single suite there are no others.
    by_suite = typical_of_unseen(arms.values, arms.kl, groups if len(suites) > 1 else arms.folds)
    fitted = fit(arms.values, arms.kl, arms.folds)
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
                "arms": int(inside.sum()),
                "measured": float(gmean(arms.kl[inside] + FLOOR)),
                "predicted": float(gmean(by_suite[inside] + FLOOR)),
            }
            for number, suite in enumerate(suites)
            for inside in [groups == number]
        },
    }


def _found_and_expected(arms: Measured, expected: NDArray[np.float64]) -> Iterator[dict[str, float]]:
    """Mean KL of the arms that repair anything, found and expected, for each bin of expected KL."""
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
