"""The greedy, free-running answer of an arm to a prompt, and the cost of computing the prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from delta_tree import TokenIds
from kvshare.bench.fidelity.greedy import Start, greedy_answer, greedy_answers
from kvshare.bench.fidelity.layered import LayeredModel
from kvshare.bench.fidelity.rules import RULES
from kvshare.bench.fidelity.rules.base import num_wanted
from kvshare.bench.fidelity.rules.deviation import CHECK_LAYER, falling
from kvshare.bench.fidelity.scenario import Prompt, Scenario
from kvshare.bench.fidelity.stored_prompts import StoredPrompts, prefill
from kvshare.bench.fidelity.trial import Outcome, Selection, Trial
from kvshare.engines.embedded.tokenizer import PromptEncoder
from kvshare.settings import Settings
from kvshare.sharing.plan import Plan
from kvshare.sharing.selection import covered

_TOGETHER = 4  # arms that answer in the same passes; with more, attention costs more than is saved
_ANY_NUMBER = 64  # of donors, for the arms that are not the server's


@dataclass(frozen=True, slots=True)
class Arm:
    """A rule under the name that the paper gives it. `rule` None: the server's own plan."""

    name: str
    rule: str | None = None
    budget: float = 0.0


FULL = Arm("full", "full")


@dataclass(frozen=True, slots=True)
class Answer:
    """`computed`, `b`: see `Outcome`. `is_approximate`: of the server's plan only."""

    text: str
    seconds: float  # of the pass over the prompt, with copying
    b: float
    computed: float
    is_approximate: bool | None = None


@dataclass(frozen=True, slots=True)
class Server:
    """A model that answers prompts by any rule."""

    model: LayeredModel
    encoder: PromptEncoder
    settings: Settings

    def store(self, prompts: Sequence[Prompt]) -> StoredPrompts:
        """These prompts, computed in full."""
        stored = StoredPrompts(self._unlimited.sharing)
        for prompt in prompts:
            stored.store_full(prefill(self.model, prompt))
        return stored

    def trial(self, scenario: Scenario, stored: StoredPrompts) -> Trial | None:
        """None where nothing approximate can be copied."""
        trial = Trial(scenario, self.model, self._unlimited, stored)
        return trial if trial.copied.any() else None

    def full_answer(self, prompt: Prompt, limit: int) -> str:
        """The answer to a prompt without sharing."""
        done = prefill(self.model, prompt)
        return self._text(greedy_answer(self.model, done.kv, done.first, num_tokens=len(prompt), limit=limit))

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
    if selection.copies is None:  # a trial keeps its copies for all rules, a server copies each time
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
    rows[: CHECK_LAYER + 1] = trial.copied
    for layer in range(CHECK_LAYER + 1, trial.num_layers):
        rows[layer, chosen[: counts[layer]]] = True
    return Selection(rows, copies=selection.copies)
