"""What a repair rule is, and what most rules need: budgets as token counts, the best so many, equal heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from delta_tree import Span
from kvshare.bench.fidelity.layered import Mask
from kvshare.bench.fidelity.trial import Selection, Trial
from kvshare.sharing.plan import continues
from kvshare.sharing.selection import stretches

NO_COST: Callable[[Trial], float] = lambda trial: 0.0  # noqa: E731


@dataclass(frozen=True, slots=True)
class Rule:
    """
    A way to choose what is computed again.

    `choose(trial, budget)`: budget b as a share of layers x prompt tokens; rules without one ignore it.
    `probe(trial)`: layer-tokens that the selection itself gives fresh Q, K, V, whatever the budget;
    `paid_layers`: in so many layers repaired rows are part of it.
    `after`: our reading of a published description, not of its code. `per_layer`: layers differ in their
    rows, so the rule cannot run in an engine whose compiled forward takes one set of positions.
    """

    name: str
    title: str
    source: str
    choose: Callable[[Trial, float], Selection]
    probe: Callable[[Trial], float] = NO_COST
    paid_layers: float = 0.0
    has_budget: bool = True
    after: bool = False
    per_layer: bool = False
    published: bool = True

    def affordable(self, trial: Trial, charged: float) -> float:
        """What a charged budget leaves for repairs; not above 0 where selecting alone costs more."""
        num_layers = trial.num_layers
        left = charged - self.probe(trial) / (num_layers * trial.num_tokens)
        return left * num_layers / (num_layers - self.paid_layers)


def num_wanted(trial: Trial, budget: float) -> int:
    """Positions that a budget buys in all layers; never more than there are copied ones."""
    return min(int(trial.copied.sum()), round(budget * trial.num_tokens))


def takes_all(trial: Trial, budget: float) -> bool:
    """Whether a budget buys every copied position: then nothing may stay that was computed over stale KV."""
    return num_wanted(trial, budget) == int(trial.copied.sum())


def heads(stretches: Sequence[Span], num_tokens: int, count: int, *, from_end: bool = False) -> Mask:
    """(T,) equally many positions at the start (or end) of each stretch, `count` together."""
    rows = np.zeros(num_tokens, np.bool_)
    left, depth = min(count, sum(len(stretch) for stretch in stretches)), 0
    while left > 0:
        for stretch in stretches:
            if depth < len(stretch) and left > 0:
                rows[stretch.end - 1 - depth if from_end else stretch.start + depth] = True
                left -= 1
        depth += 1
    return rows


def cut(mask: Mask, starts: Sequence[int]) -> list[Span]:
    """The runs of True, cut before each of these positions too."""
    found: list[Span] = []
    for run in stretches(mask):
        inside = [start for start in starts if run.start < start < run.end]
        edges = [run.start, *sorted(inside), run.end]
        found += [Span(start, end) for start, end in pairwise(edges)]
    return found


def pieces(trial: Trial) -> list[Span]:
    """Stretches of copied positions from one place of one donor each."""
    starts = []
    for before, copy in pairwise(trial.foreign):
        if not continues(before, copy):
            starts.append(copy.target_start)
    return cut(trial.copied, starts)


def chunks(trial: Trial) -> list[Span]:
    """Copied stretches within one part of the prompt each: what systems for retrieved text call chunks."""
    return cut(trial.copied, [part.start for part in trial.scenario.prompt.parts])


def moved(trial: Trial) -> NDArray[np.int64]:
    """(T,) by how many tokens each copied position moved; 0 elsewhere."""
    shifts = np.zeros(trial.num_tokens, np.int64)
    for copy in trial.foreign:
        shifts[copy.target_start : copy.target_start + copy.length] = copy.shift
    return shifts * trial.copied
