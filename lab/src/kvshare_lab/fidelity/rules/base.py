"""What a repair rule is, and what most rules need: budgets as token counts, equal heads, pieces, chunks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from delta_tree import Span
from kvshare.sharing.placed import continued, placed
from kvshare.sharing.repair_choice import Scores, spans_where
from kvshare_lab.fidelity.layered import Mask
from kvshare_lab.fidelity.trial import Selection, Trial

Choose = Callable[[Trial, float], Selection]
Probe = Callable[[Trial], float]
Ranking = Callable[[Trial], Scores]  # (T,) by which tokens are chosen: the higher, the earlier
Choices = dict[str, tuple[Choose, Probe]]  # by rule: how it chooses, and what choosing costs


@dataclass(frozen=True, slots=True)
class Rule:
    """
    A way to choose what is computed again; rules.yaml has all fields but the two functions.

    `choose(trial, budget)`: the budget is a share of layers x prompt tokens; rules without one ignore it.
    `probe(trial)`: layer-tokens that the selection gives fresh Q, K, V, at any budget. `paid_layers`: in that
    many layers the probe computes the repaired rows already. `per_layer`: layers differ in their rows, so the
    rule cannot run in an engine whose compiled forward pass takes one set of positions.
    """

    name: str
    choose: Choose
    probe: Probe
    title: str
    source: str = ""
    paid_layers: float = 0.0
    has_budget: bool = True
    per_layer: bool = False

    def affordable(self, trial: Trial, charged: float) -> float:
        """The budget that a charged budget leaves for repairs; 0 or less where selecting alone exceeds it."""
        num_layers = trial.num_layers
        left = charged - self.probe(trial) / (num_layers * trial.num_tokens)
        return left * num_layers / (num_layers - self.paid_layers)


def no_probe(trial: Trial) -> float:
    """The cost of rules that choose without computing anything."""
    return 0.0


def num_wanted(trial: Trial, budget: float) -> int:
    """How many positions a budget pays for in all layers; at most all copied ones."""
    return min(int(trial.copied.sum()), round(budget * trial.num_tokens))


def takes_all(trial: Trial, budget: float) -> bool:
    """Whether a budget pays for every copied position: then no KV that depends on a stale copy may remain."""
    return num_wanted(trial, budget) == int(trial.copied.sum())


def heads(stretches: Sequence[Span], num_tokens: int, count: int, *, from_end: bool = False) -> Mask:
    """(T,) equally many positions at the start (or end) of each stretch, `count` together."""
    rows = np.zeros(num_tokens, np.bool_)
    places = [
        stretch.end - 1 - depth if from_end else stretch.start + depth
        for depth in range(max(map(len, stretches), default=0))
        for stretch in stretches
        if depth < len(stretch)
    ]
    rows[places[:count]] = True
    return rows


def cut(mask: Mask, starts: Sequence[int]) -> list[Span]:
    """The runs of True, cut before each of these positions."""
    found: list[Span] = []
    for run in spans_where(mask):
        inside = [start for start in starts if run.start < start < run.end]
        edges = [run.start, *sorted(inside), run.end]
        found += [Span(start, end) for start, end in pairwise(edges)]
    return found


def pieces(trial: Trial) -> list[Span]:
    """Stretches of copied positions, each from one place of one donor."""
    copies = placed(trial.approximate_copies)
    return cut(trial.copied, copies[~continued(copies), 1].tolist()[1:])


def chunks(trial: Trial) -> list[Span]:
    """Stretches of copied positions, each within one part of the prompt: a chunk of the literature."""
    return cut(trial.copied, [part.start for part in trial.scenario.prompt.parts])
