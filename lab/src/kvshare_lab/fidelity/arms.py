"""
Measures one scenario: every rule at every budget on the same plan, and noise that no rule causes.

A chain is a prompt that was shared many times in a row before it is measured, with three policies of storing:

    originals   every turn copies from the place where the KV was computed, as KVShare stores it
    unrepaired  the same, but repairs are not stored: the next turn copies what they replaced
    re-saved    every turn saves its whole KV and the next one copies that; for comparison with other systems
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from delta_tree import Copy, TokenIds
from kvshare.settings import Settings
from kvshare.sharing.plan import NoPlan, Plan, without
from kvshare.sharing.rates import Estimate
from kvshare.sharing.repair_choice import covered, spans_where
from kvshare_lab.fidelity.layered import LayeredModel, greedy_answers
from kvshare_lab.fidelity.measures import agreement, divergence, margin, rounded, text_scores
from kvshare_lab.fidelity.rows import Stage
from kvshare_lab.fidelity.rules import RULES
from kvshare_lab.fidelity.rules.base import Rule
from kvshare_lab.fidelity.scenario import Prompt, Scenario
from kvshare_lab.fidelity.stored_prompts import StoredPrompts, prefill
from kvshare_lab.fidelity.trial import Outcome, Selection, Trial, forced_pass

_CHUNK = 128  # tokens: the same prefill in other chunks

POLICIES = ("originals", "unrepaired", "re-saved")

Decode = Callable[[TokenIds], str]


def make_trial(
    scenario: Scenario, model: LayeredModel, settings: Settings, stored: StoredPrompts | None = None
) -> Trial | None:
    """The scenario with its stored prompts, by default computed here; None if no copy is approximate."""
    stored = stored or StoredPrompts.computed(model, scenario.stored, settings.sharing)
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
    row["arms"] = [measured_arm(trial, stage, *each, decode) for each in _settings(stage)]
    return row


def described(trial: Trial) -> dict[str, Any]:
    """The plan: its source, and how many tokens are exact, copied and computed."""
    scenario, size = trial.scenario, trial.num_tokens
    copied = sum(copy.length for copy in trial.approximate_copies)
    moved = sum(copy.length for copy in trial.approximate_copies if copy.shift)
    return {
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


def _settings(stage: Stage) -> Iterator[tuple[Rule, float, str]]:
    """Each rule at each budget, for repairs alone and charged."""
    for rule in (RULES[name] for name in stage.rules):
        yield from ((rule, budget, "b") for budget in (stage.budgets if rule.has_budget else (0.0,)))
        yield from ((rule, budget, "charged") for budget in (stage.charged if rule.has_budget else ()))


def measured_arm(
    trial: Trial, stage: Stage, rule: Rule, budget: float, by: str, decode: Decode = str
) -> dict[str, Any]:
    """The measures of one rule at one budget, or `cannot` where selecting alone exceeds a charged budget."""
    arm: dict[str, Any] = {"rule": rule.name, "budget": budget, "by": by}
    left = rule.affordable(trial, budget) if by == "charged" else budget
    if by == "charged" and left <= 0:
        return {**arm, "cannot": True}
    selection = rule.choose(trial, left)
    rank = stage.rank and len(trial.scenario.candidates) > 1
    outcome = trial.run(selection, rank=rank)
    arm |= {"b": rounded(outcome.b), "charged": rounded(outcome.charged), "runs": outcome.runs}
    arm |= divergence(trial.truth, outcome.log_probabilities).as_document()
    if rank:
        scores = outcome.candidate_scores.tolist()
        arm |= {"margin": rounded(margin(scores)), "rank": int(np.argmax(scores) == 0)}
    if (limit := stage.free_tokens) > 0:
        start, full = (outcome.kv, outcome.log_probabilities[0]), trial.free_answer(limit)
        (answer,) = greedy_answers(trial.model, [start], num_tokens=trial.num_tokens, limit=limit)
        text, expected = decode(answer), trial.scenario.expected
        exact = {} if expected is None else {"exact": int(expected in text)}  # what the suite expects in it
        arm["free"] = {**agreement(full, answer), **text_scores(decode(full), text), **exact}
    return arm


def _noise(trial: Trial, other: LayeredModel | None) -> dict[str, Any]:
    """Divergence without any sharing: from rounding, the number format, and the order of documents."""
    prompt, reordered = trial.scenario.prompt.token_ids, trial.scenario.reordered
    passes = {"chunked": forced_pass(trial.model, prompt, trial.answer, chunk=_CHUNK)}
    if other is not None:
        passes["bfloat16"] = forced_pass(other, prompt, trial.answer)
    if reordered is not None:
        passes["reordered"] = forced_pass(trial.model, reordered.token_ids, trial.answer)
    return {name: divergence(trial.truth, found).as_document() for name, found in passes.items()}


def measured_chain(
    scenario: Scenario, model: LayeredModel, settings: Settings, stage: Stage, *, decode: Decode = str
) -> dict[str, Any]:
    """The row of a chain: each rule, used in every turn, with each policy of storing; see `measured`."""
    first, arms = prefill(model, scenario.stored[0]), []

    def after_turns(prompts: Sequence[Prompt], rule: Rule, budget: float, policy: str) -> Trial:
        """The trial of the new prompt after these turns, served by the rule."""
        stored = StoredPrompts(settings.sharing)
        stored.store_full(first)
        for prompt in prompts:
            turn = Trial(replace(scenario, prompt=prompt, stages=(), candidates=()), model, settings, stored)
            selection = rule.choose(turn, budget)
            outcome = turn.run(selection, forced=False)
            stored.store(prompt.token_ids, outcome.kv, _stored(turn, selection, outcome, policy))
        return Trial(scenario, model, settings, stored)

    truth = after_turns((), RULES["full"], 0.0, POLICIES[0])
    for rule in (RULES[name] for name in stage.rules):
        for policy, budget in product(POLICIES, stage.budgets if rule.has_budget else (0.0,)):
            trial, name = truth, rule.name if policy == POLICIES[0] else f"{rule.name}/{policy}"
            if rule.name != "full":
                trial = after_turns(scenario.stages, rule, budget, policy)
                trial.full, trial.answer, trial.truth = truth.full, truth.answer, truth.truth
            elif policy != POLICIES[0]:
                continue
            arm = measured_arm(trial, stage, rule, budget, "b", decode)
            arms.append({**arm, "rule": name})
    return {**described(truth), "arms": arms}


def _stored(turn: Trial, selection: Selection, outcome: Outcome, policy: str) -> Plan | NoPlan:
    """
    The plan by which the server would store the turn: what was copied and what was computed.

    A position that some layer did not compute counts as a copy: it is as old as its oldest layer. What a
    probe pass computed over copies that were repaired later is not exact, even if none of those copies
    remains.
    """
    if policy == "re-saved":
        return NoPlan()
    copies = _uppermost(turn.copies if selection.copies is None else selection.copies)
    is_copied = covered([copy.target for copy in copies], turn.num_tokens)
    is_exact = np.arange(turn.num_tokens) < turn.exact_length
    fresh = turn.base | outcome.computed if policy == "originals" else turn.base
    spans = tuple(spans_where(~is_copied | fresh & ~is_exact))
    return Plan(
        num_tokens=turn.num_tokens,
        exact_length=turn.exact_length,
        copies=without(copies, spans),
        placeholders=spans,
        repairs=(),
        generation=1,
        estimate=Estimate(0.0, 0.0),
        exact_until=None if selection.computed is None else turn.first_approximate,
    )


def _uppermost(copies: Sequence[Copy]) -> tuple[Copy, ...]:
    """Ascending by target and apart; where two cover a position, the later one counts."""
    found: list[Copy] = []
    for copy in copies:
        found = sorted((*without(found, [copy.target]), copy), key=lambda each: each.target_start)
    return tuple(found)
