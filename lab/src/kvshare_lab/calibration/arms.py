"""The measured arms of plans, and the shapes of these plans, which are made again without KV."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from delta_tree import Span, common_prefix_length
from kvshare.sharing.placed import placed
from kvshare.sharing.plan import within
from kvshare.sharing.prediction import Shape, Vector, shape_of
from kvshare_lab.fidelity.laboratory import Laboratory
from kvshare_lab.fidelity.rows import Plan
from kvshare_lab.fidelity.scenario import Scenario

_FOLDS = 5


@dataclass(frozen=True, slots=True)
class Measured:
    """
    Measured arms: features (N, F) and mean KL (N,), by suite and source document.

    `plans`: (N,) the number of the plan that an arm is of; `repaired`, `lengths`: (N,) tokens.
    """

    values: Vector
    kl: NDArray[np.float64]
    suites: NDArray[np.str_]
    sources: NDArray[np.str_]
    regimes: NDArray[np.str_]
    plans: NDArray[np.int64]
    repaired: NDArray[np.float64]
    lengths: NDArray[np.int64]

    @property
    def num_repaired(self) -> int:
        """How many plans have an arm that repairs anything."""
        return len(np.unique(self.plans[self.repaired > 0]))

    @property
    def folds(self) -> NDArray[np.int64]:
        """(N,) the fold of each arm, out of five; all arms of one source document are in the same."""
        return np.array([xxhash.xxh3_64_intdigest(source.encode()) % _FOLDS for source in self.sources])


def measured_arms(made: Sequence[tuple[Plan, Shape]], rules: Sequence[str]) -> Measured:
    """The arms of these rules whose budget limits what they repair, and not what choosing costs as well."""
    found = [
        (
            shape.repaired(repaired),
            arm["kl"],
            plan.suite,
            plan.source,
            shape.regime,
            number,
            repaired,
            shape.num_tokens,
        )
        for number, (plan, shape) in enumerate(made)
        for setting, arm in plan.arms.items()
        if setting.rule in rules and setting.by == "b" and arm.get("kl") is not None
        for repaired in [arm["b"] * plan.row["tokens"]]
    ]
    columns = zip(*found, strict=True) if found else ((),) * len(Measured.__slots__)
    return Measured(*map(np.array, columns))


def shape_again(laboratory: Laboratory, plan: Plan) -> Shape | None:
    """The shape of a measured plan; None where the lab now makes another plan of this number."""
    scenario = laboratory.scenario(plan.suite, plan.row["half"], plan.row["number"])
    if scenario is None or len(scenario.prompt) != plan.row["tokens"]:
        return None
    return shape_of_scenario(laboratory, scenario)


def shape_of_scenario(laboratory: Laboratory, scenario: Scenario) -> Shape | None:
    """The shape of the scenario's plan; None if it copies nothing approximately."""
    stored, tokens = laboratory.stored_prompts(scenario), scenario.prompt.token_ids
    composition = stored.compose(tokens)
    exact_length = min(composition.exact_length, len(tokens) - 1)
    tail = max(exact_length, len(tokens) - laboratory.settings.repair.tail)
    return shape_of(
        placed(within(composition.copies, Span(exact_length, tail))),
        num_tokens=len(tokens),
        exact_length=exact_length,
        common={node.node_id: common_prefix_length(node.token_ids, tokens) for node in stored.nodes},
    )
