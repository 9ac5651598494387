"""One scenario measured: every rule at every budget on the same plan, and the noise beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from delta_tree import TokenIds
from kvshare.bench.fidelity.layered import LayeredModel
from kvshare.bench.fidelity.measures import agreement, divergence, free_running, margin, rounded, text_scores
from kvshare.bench.fidelity.rules.base import Rule
from kvshare.bench.fidelity.scenario import Scenario
from kvshare.bench.fidelity.shelf import Shelf, prefill
from kvshare.bench.fidelity.trial import Outcome, Selection, Trial, forced_pass
from kvshare.settings import Settings

_CHUNK = 128  # tokens: the other chunking of the same prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class Arms:
    """What is measured of each scenario. `charged`: budgets that pay for the selection too."""

    rules: Sequence[Rule]
    budgets: Sequence[float]
    charged: Sequence[float] = ()
    rank: bool = True
    free_tokens: int = 0  # of the free-running answer; 0: none
    decode: Callable[[TokenIds], str] = str  # token ids -> text
    noise: bool = True


def make_trial(scenario: Scenario, model: LayeredModel, settings: Settings) -> Trial | None:
    """The scenario with its stored prompts computed; None where nothing approximate can be copied."""
    shelf = Shelf(settings.sharing)
    for prompt in scenario.stored:
        shelf.store_full(prefill(model, prompt))
    trial = Trial(scenario, model, settings, shelf)
    return trial if trial.copied.any() else None


def measured(trial: Trial, arms: Arms, *, other: LayeredModel | None = None) -> dict[str, Any]:
    """
    The row of one plan, without a word of its text.

    `other`: the same model in bfloat16, for the noise.
    """
    row = described(trial)
    if arms.noise:
        row["noise"] = _noise(trial, other)
    row["arms"] = [measured_arm(trial, arms, *each) for each in _selections(trial, arms)]
    return row


def described(trial: Trial) -> dict[str, Any]:
    """The plan: whose it is, and how many tokens are exact, copied and computed."""
    scenario, size = trial.scenario, trial.num_tokens
    copied = sum(copy.length for copy in trial.foreign)
    moved = sum(copy.length for copy in trial.foreign if copy.shift)
    return {
        "suite": scenario.suite,
        "number": scenario.number,
        "source": scenario.source,
        "labels": dict(scenario.labels),
        "tokens": size,
        "exact": trial.exact_length,
        "copied": int(trial.copied.sum()),
        "computed": int(trial.base.sum()),
        "pieces": len(trial.foreign),
        "moved": rounded(moved / max(1, copied)),
        "answer": len(trial.answer),
    }


def _selections(trial: Trial, arms: Arms) -> Iterator[tuple[Rule, float, str, Selection | None]]:
    """Each rule at each budget; None where its selection alone costs more than it may."""
    for rule in arms.rules:
        if not rule.has_budget:
            yield rule, 0.0, "b", rule.choose(trial, 0.0)
            continue
        for budget in arms.budgets:
            yield rule, budget, "b", rule.choose(trial, budget)
        for budget in arms.charged:
            left = rule.affordable(trial, budget)
            yield rule, budget, "charged", rule.choose(trial, left) if left > 0 else None


def measured_arm(
    trial: Trial, arms: Arms, rule: Rule, budget: float, by: str, selection: Selection | None
) -> dict[str, Any]:
    """What one rule came to at one budget; `selection` None: selecting alone costs more than it may."""
    arm: dict[str, Any] = {"rule": rule.name, "budget": budget, "by": by}
    if selection is None:
        return {**arm, "cannot": True}
    rank = arms.rank and len(trial.scenario.candidates) > 1
    outcome = trial.run(selection, rank=rank)
    arm |= {"b": rounded(outcome.b), "charged": rounded(outcome.charged), "runs": outcome.runs}
    arm |= divergence(trial.truth, outcome.log_probabilities).as_document()
    if rank:
        scores = outcome.candidate_scores.tolist()
        arm |= {"margin": rounded(margin(scores)), "rank": int(np.argmax(scores) == 0)}
    if arms.free_tokens:
        arm["free"] = _free(trial, outcome, arms)
    return arm


def _free(trial: Trial, outcome: Outcome, arms: Arms) -> dict[str, Any]:
    """The arm's own answer against the full prefill's; `exact` where the suite knows what it must contain."""
    limit, first = arms.free_tokens, outcome.log_probabilities[0]
    found = free_running(trial.model, outcome.kv, first, num_tokens=trial.num_tokens, limit=limit)
    full = trial.free_answer(limit)
    own, expected = arms.decode(found), trial.scenario.expected
    scores = {**agreement(full, found), **text_scores(arms.decode(full), own)}
    return scores if expected is None else {**scores, "exact": int(expected in own)}


def _noise(trial: Trial, other: LayeredModel | None) -> Mapping[str, Any]:
    """What is no repair's fault: rounding, the number format, and the order of documents."""
    prompt = trial.scenario.prompt
    found = {"chunked": trial.full_pass(prompt.token_ids, chunk=_CHUNK)}
    if other is not None:
        found["bfloat16"] = forced_pass(other, prompt.token_ids, trial.answer)
    if (reordered := trial.scenario.reordered) is not None:
        found["reordered"] = trial.full_pass(reordered.token_ids)
    return {name: divergence(trial.truth, passed).as_document() for name, passed in found.items()}
