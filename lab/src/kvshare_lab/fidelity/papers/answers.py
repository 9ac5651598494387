"""
The greedy, free-running answers of arms to prompts, the cost of computing the prompts, and figures over them.

A figure of a prompt is a number or, for BLEU, the counts from which the BLEU of a corpus is computed.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from delta_tree import TokenIds
from kvshare.embedded.tokenizer import PromptEncoder
from kvshare.settings import Settings
from kvshare.sharing.plan import Plan
from kvshare.sharing.repair_choice import covered
from kvshare_lab.fidelity.arms import make_trial
from kvshare_lab.fidelity.layered import LayeredModel, Start, greedy_answers
from kvshare_lab.fidelity.measures import Figures, corpus_bleu, rounded
from kvshare_lab.fidelity.rules import RULES
from kvshare_lab.fidelity.rules.base import num_wanted
from kvshare_lab.fidelity.rules.deviation import CHECK_LAYER, falling
from kvshare_lab.fidelity.scenario import Prompt, Scenario
from kvshare_lab.fidelity.stored_prompts import StoredPrompts, prefill
from kvshare_lab.fidelity.trial import Outcome, Selection, Trial

_TOGETHER = 4  # arms that answer in the same passes; with more, attention costs more than is saved
_RESAMPLES = 1000
_PERCENTILES = (2.5, 97.5)
_ANY_NUMBER = 64  # of donors, for the arms that are not the server's


class Arm(NamedTuple):
    """A rule under the name that the paper gives it. `rule` None: the server's own plan, or an old answer."""

    name: str
    rule: str | None = None
    budget: float = 0.0


FULL = Arm("full", "full")


class Answer(NamedTuple):
    """`computed`, `b`: see `Outcome`. `is_approximate`: of the server's plan only."""

    text: str
    seconds: float  # of the pass over the prompt, with copying
    b: float
    computed: float
    is_approximate: bool | None = None


@dataclass(frozen=True, slots=True)
class Answerer:
    """A model that answers prompts by any rule."""

    model: LayeredModel
    encoder: PromptEncoder
    settings: Settings

    def store(self, prompts: Sequence[Prompt]) -> StoredPrompts:
        return StoredPrompts.computed(self.model, prompts, self._unlimited.sharing)

    def trial(self, scenario: Scenario, stored: StoredPrompts) -> Trial | None:
        """None where nothing approximate can be copied."""
        return make_trial(scenario, self.model, self._unlimited, stored)

    def full_answer(self, prompt: Prompt, limit: int) -> str:
        done = prefill(self.model, prompt)
        starts = [(done.kv, done.first)]
        return self._text(greedy_answers(self.model, starts, num_tokens=len(prompt), limit=limit)[0])

    def answers(self, trial: Trial, arms: Sequence[Arm], *, limit: int, turn: int) -> dict[Arm, Answer]:
        """The answers of all arms. Another one is first in every turn, as the first pays for warming up."""
        first = turn % len(arms)
        order = (*arms[first:], *arms[:first])
        found: dict[Arm, Answer] = {}
        for place in range(0, len(order), _TOGETHER):
            found |= self._answers(trial, order[place : place + _TOGETHER], limit)
        return {arm: found[arm] for arm in arms}

    def _answers(self, trial: Trial, arms: Sequence[Arm], limit: int) -> dict[Arm, Answer]:
        starts: list[Start] = []
        costs = []
        for arm in arms:
            selection, is_approximate = self._selection(trial, arm)
            outcome, seconds = timed(trial, selection)
            if arm.rule == "cacheblend":
                seconds = timed(trial, _with_probe(trial, selection, arm.budget))[1]
            starts.append((outcome.kv, outcome.log_probabilities[0]))
            costs.append((seconds, outcome.b, outcome.charged, is_approximate))
        found = greedy_answers(self.model, starts, num_tokens=trial.num_tokens, limit=limit)
        both = zip(arms, found, costs, strict=True)
        return {arm: Answer(self._text(answer), *cost) for arm, answer, cost in both}

    def _selection(self, trial: Trial, arm: Arm) -> tuple[Selection, bool | None]:
        if arm.rule is not None:
            return RULES[arm.rule].choose(trial, arm.budget), None
        plan = trial.stored.plan(trial.scenario.prompt.token_ids, self.settings)
        if not isinstance(plan, Plan):
            return RULES["full"].choose(trial, 0.0), False
        computed = covered(plan.placeholders, trial.num_tokens)
        return Selection(computed, copies=plan.copies), plan.decision == "approx"

    def _text(self, answer: TokenIds) -> str:
        return self.encoder.backend.decode(answer.tolist(), skip_special_tokens=True).strip()

    @property
    def _unlimited(self) -> Settings:
        sharing = self.settings.sharing.model_copy(update={"max_donors": _ANY_NUMBER})
        return self.settings.model_copy(update={"sharing": sharing})


def timed(trial: Trial, selection: Selection) -> tuple[Outcome, float]:
    """Copies and computes a prompt; also returns the seconds that this takes."""
    began = time.perf_counter()
    if selection.copies is None:  # a trial places its copies once for all rules, a server for each prompt
        trial.place(trial.copies)
    outcome = trial.run(selection, forced=False)
    return outcome, time.perf_counter() - began


def _with_probe(trial: Trial, selection: Selection, budget: float) -> Selection:
    """
    What CacheBlend computes, to be timed: all tokens in the first layers, then fewer from layer to layer.

    The number of tokens in each layer is CacheBlend's, but which tokens they are is not.
    """
    chosen = selection.rows.nonzero()[0]
    counts = falling(num_wanted(trial, budget), trial.num_layers, most=int(trial.copied.sum()))
    rows = np.zeros((trial.num_layers, trial.num_tokens), np.bool_)
    for layer, count in enumerate(counts):
        rows[layer, chosen[:count]] = True
    rows[: CHECK_LAYER + 1] = trial.copied
    return Selection(rows, copies=selection.copies)


def interval(name: str, figures: Figures, less: Figures | None = None, *, seed: int) -> dict[str, float]:
    """
    The mean (for `bleu`: the corpus' score) of n prompts' figures, with its 95 % bootstrap interval.

    `less`: figures of the same prompts, whose mean is subtracted.
    """
    n = len(figures)
    draws = np.random.default_rng(seed).integers(0, n, (_RESAMPLES, n))
    draws = np.vstack([np.arange(n), draws])
    found = _summary(name, figures[draws])
    if less is not None:
        found = found - _summary(name, less[draws])
    low, high = np.percentile(found[1:], _PERCENTILES)
    return {"mean": rounded(float(found[0])), "low": rounded(float(low)), "high": rounded(float(high))}


def _summary(name: str, figures: Figures) -> Figures:
    """Shapes: (R, n, ...) -> (R,)"""
    return corpus_bleu(figures) if name == "bleu" else np.asarray(figures.mean(axis=1))


@dataclass(slots=True)
class Sheet:
    """Figures of one data set: by arm, budget and measure, one for each prompt."""

    data: str
    task: str | None = None  # where a table has several
    skipped: int = 0  # prompts without approximate copies
    _figures: dict[tuple[str, float], dict[str, list[Any]]] = field(default_factory=dict)

    def add(self, arm: str, budget: float, figures: Mapping[str, float | Figures]) -> None:
        own = self._figures.setdefault((arm, budget), {})
        for name, value in figures.items():
            own.setdefault(name, []).append(value)

    def rows(self, *, compared: Sequence[str] = (), seed: int) -> list[dict[str, Any]]:
        """
        A row for each arm and budget.

        `compared`: measures whose paired difference to the arm `full` is added as `..._minus_full`.
        """
        found, unshared = [], self._figures.get(("full", 0.0), {})
        for (arm, budget), figures in self._figures.items():
            row: dict[str, Any] = {"data": self.data, "task": self.task, "arm": arm, "budget": budget or None}
            row = {name: value for name, value in row.items() if value is not None}
            row |= {"n": max(map(len, figures.values())), "skipped": self.skipped}
            for name, values in figures.items():
                own, full = np.array(values), np.array(unshared.get(name, []))
                row[name] = interval(name, own, seed=seed)
                if name in compared and arm != "full" and len(full) == len(own):
                    row[f"{name}_minus_full"] = interval(name, own, full, seed=seed)
            found.append(row)
        return found
