"""Measures one scenario: every rule at every budget on the same plan, and noise that no rule causes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from delta_tree import TokenIds
from kvshare.bench.fidelity.greedy import greedy_answer
from kvshare.bench.fidelity.layered import LayeredModel
from kvshare.bench.fidelity.measures import agreement, divergence, margin, rounded, text_scores
from kvshare.bench.fidelity.rules import RULES
from kvshare.bench.fidelity.rules.base import Rule
from kvshare.bench.fidelity.scenario import Scenario
from kvshare.bench.fidelity.shards import Stage
from kvshare.bench.fidelity.stored_prompts import StoredPrompts, prefill
from kvshare.bench.fidelity.trial import Outcome, Selection, Trial, forced_pass
from kvshare.settings import Settings

_CHUNK = 128  # tokens: the same prefill in other chunks

Decode = Callable[[TokenIds], str]


def make_trial(scenario: Scenario, model: LayeredModel, settings: Settings) -> Trial | None:
    """The scenario with its stored prompts computed; None where nothing approximate can be copied."""
    stored = StoredPrompts(settings.sharing)
    for prompt in scenario.stored:
        stored.store_full(prefill(model, prompt))
    trial = Trial(scenario, model, settings, stored)
    return trial if trial.copied.any() else None


def measured(
    trial: Trial, stage: Stage, *, decode: Decode = str, other: LayeredModel | None = None
) -> dict[str, Any]:
    """
    The row of one plan, without any of its text.

    `decode`: token ids -> text, for free-running answers. `other`: the same model in bfloat16, for the noise.
    """
    row = described(trial)
    if stage.noise:
        row["noise"] = _noise(trial, other)
    row["arms"] = [measured_arm(trial, stage, *each, decode) for each in _selections(trial, stage)]
    return row


def described(trial: Trial) -> dict[str, Any]:
    """The plan: its suite and source, and how many tokens are exact, copied and computed."""
    scenario, size = trial.scenario, trial.num_tokens
    copied = sum(copy.length for copy in trial.approximate_copies)
    moved = sum(copy.length for copy in trial.approximate_copies if copy.shift)
    return {
        "suite": scenario.suite,
        "number": scenario.number,
        "source": scenario.source,
        "labels": dict(scenario.labels),
        "tokens": size,
        "exact": trial.exact_length,
        "copied": int(trial.copied.sum()),
        "computed": int(trial.base.sum()),
        "pieces": len(trial.approximate_copies),
        "moved": rounded(moved / max(1, copied)),
        "answer": len(trial.answer),
    }


def _selections(trial: Trial, stage: Stage) -> Iterator[tuple[Rule, float, str, Selection | None]]:
    """Each rule at each budget; None where its selection alone exceeds the charged budget."""
    for rule in (RULES[name] for name in stage.rules):
        if not rule.has_budget:
            yield rule, 0.0, "b", rule.choose(trial, 0.0)
            continue
        for budget in stage.budgets:
            yield rule, budget, "b", rule.choose(trial, budget)
        for budget in stage.charged:
            left = rule.affordable(trial, budget)
            yield rule, budget, "charged", rule.choose(trial, left) if left > 0 else None


def measured_arm(
    trial: Trial,
    stage: Stage,
    rule: Rule,
    budget: float,
    by: str,
    selection: Selection | None,
    decode: Decode = str,
) -> dict[str, Any]:
    """The measures of one rule at one budget. `selection` None: selecting alone exceeds the budget."""
    arm: dict[str, Any] = {"rule": rule.name, "budget": budget, "by": by}
    if selection is None:
        return {**arm, "cannot": True}
    rank = stage.rank and len(trial.scenario.candidates) > 1
    outcome = trial.run(selection, rank=rank)
    arm |= {"b": rounded(outcome.b), "charged": rounded(outcome.charged), "runs": outcome.runs}
    arm |= divergence(trial.truth, outcome.log_probabilities).as_document()
    if rank:
        scores = outcome.candidate_scores.tolist()
        arm |= {"margin": rounded(margin(scores)), "rank": int(np.argmax(scores) == 0)}
    if stage.free_tokens:
        arm["free"] = _free(trial, outcome, stage.free_tokens, decode)
    return arm


def _free(trial: Trial, outcome: Outcome, limit: int, decode: Decode) -> dict[str, Any]:
    """The arm's own answer against the full prefill's; `exact` where the suite knows what it must contain."""
    first = outcome.log_probabilities[0]
    answer = greedy_answer(trial.model, outcome.kv, first, num_tokens=trial.num_tokens, limit=limit)
    full, text = trial.free_answer(limit), decode(answer)
    scores = {**agreement(full, answer), **text_scores(decode(full), text)}
    expected = trial.scenario.expected
    return scores if expected is None else {**scores, "exact": int(expected in text)}


def _noise(trial: Trial, other: LayeredModel | None) -> dict[str, Any]:
    """Divergence without any sharing: from rounding, the number format, and the order of documents."""
    prompt, reordered = trial.scenario.prompt.token_ids, trial.scenario.reordered
    passes = {"chunked": trial.full_pass(prompt, chunk=_CHUNK)}
    if other is not None:
        passes["bfloat16"] = forced_pass(other, prompt, trial.answer)
    if reordered is not None:
        passes["reordered"] = trial.full_pass(reordered.token_ids)
    return {name: divergence(trial.truth, found).as_document() for name, found in passes.items()}
