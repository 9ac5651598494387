"""
Rules that look at attention: of the tokens that are computed anyway, or in the stored prompts' prefill.

The server's rule (`sharing/repair_choice.py`) is one of them: a probe pass computes the base and the probes;
a second pass over the KV that it leaves computes the repairs, and some of the base again.
"""

from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch

from delta_tree import Copy, Span
from kvshare.kv.scoring import Scoring
from kvshare.kv.sequence import SequenceKV
from kvshare.sharing import repair_choice as server
from kvshare.sharing.plan import MAX_LISTENERS, MAX_RENEWED, within
from kvshare.sharing.repair_choice import Scores, blocks, covered, highest
from kvshare_lab.fidelity.layered import Mask
from kvshare_lab.fidelity.rules import base
from kvshare_lab.fidelity.rules.base import Choices, Ranking, chunks, heads, num_wanted, pieces, takes_all
from kvshare_lab.fidelity.stored_prompts import copies_from
from kvshare_lab.fidelity.trial import Selection, Trial

_WINDOW = 8  # tokens
_PARAGRAPH = 12  # tokens: a shorter last part is the end of the chat template


def second_pass(trial: Trial) -> float:
    """The base is the probe, and is computed again with the repairs."""
    return float(trial.base.sum() * trial.num_layers)


def _question_again(trial: Trial) -> float:
    """The base is computed once, as the probe; with the repairs, only the question is computed again."""
    return float(question(trial).sum() * trial.num_layers)


def question(trial: Trial) -> Mask:
    """(T,) the computed tokens from the last paragraph on, or from the tail if it begins before that."""
    last = next(part for part in reversed(trial.scenario.prompt.parts) if len(part) >= _PARAGRAPH)
    start = min(last.start, trial.num_tokens - trial.settings.repair.tail)
    return trial.base & (np.arange(trial.num_tokens) >= start)


def question_attention(trial: Trial) -> Scores:
    """(L, T) attention of the question's tokens to each token, mean over them."""
    return np.asarray(trial.base_pass[0][:, question(trial)[trial.base]].mean(axis=1))


def _by_question(trial: Trial) -> Scores:
    """(T,) the question's attention, summed over layers."""
    return np.asarray(question_attention(trial).sum(axis=0))


def _by_base(trial: Trial) -> Scores:
    """(T,) attention of every token that is computed anyway, placeholders too."""
    return np.asarray(trial.base_pass[0].sum(axis=(0, 1)))


def _most_asked_for(
    trial: Trial, budget: float, *, scores: Ranking, window: int = 1, once: bool = False
) -> Selection:
    """
    The tokens, or windows of equal size, with the highest scores.

    `once`: the base is computed once, as the probe, and only the question is computed again.
    """
    rows = blocks(scores(trial), trial.copied, num_wanted(trial, budget), window)
    if not once:
        return Selection(rows, probe=second_pass(trial))
    computed = None if takes_all(trial, budget) else trial.base & ~question(trial)
    return Selection(rows, probe=_question_again(trial), kv=trial.base_pass[1], computed=computed)


def _half_and_half(trial: Trial, budget: float) -> Selection:
    """Half of the budget for windows behind edits, half for what the question attends to."""
    count = num_wanted(trial, budget)
    rows = heads(pieces(trial), trial.num_tokens, count // 2)
    rows |= highest(_by_question(trial), trial.copied & ~rows, count - int(rows.sum()))
    return Selection(rows, probe=second_pass(trial))


def _most_attended(trial: Trial, budget: float) -> Selection:
    """The same share of each chunk: what the chunk attended to most when its prompt was computed."""
    scores = np.zeros(trial.num_tokens)
    for copy in trial.approximate_copies:
        if (done := trial.stored.prefills.get(copy.donor)) is not None:
            source = slice(copy.donor_start, copy.donor_start + copy.length)
            scores[copy.target.start : copy.target.end] = done.attention.received[source]
    rows, found = np.zeros(trial.num_tokens, np.bool_), chunks(trial)
    seen, total = np.cumsum([len(chunk) for chunk in found]), max(1, int(trial.copied.sum()))
    counts = np.diff(np.round(num_wanted(trial, budget) * seen / total), prepend=0)
    for chunk, count in zip(found, counts, strict=True):
        rows |= highest(scores, covered([chunk], trial.num_tokens), int(count))
    return Selection(rows)


def _set_cache(trial: Trial, budget: float) -> Selection:
    """
    Reuses the longest stored prefix whose documents all occur in the prompt, in any order, with keys moved.

    Everything else is computed, so there is no budget.
    """
    prompt, behind = trial.scenario.prompt, Span(trial.exact_length, trial.num_tokens)
    places = dict(zip(prompt.contents, prompt.parts, strict=True))
    found: list[list[Copy]] = [[]]
    for node, done in trial.stored.computed_nodes:
        found.append([])
        for part, content in zip(done.prompt.parts, done.prompt.contents, strict=True):
            if content not in places:
                break
            found[-1] += within(copies_from(node, part, places[content]), behind)
    longest = max(found, key=lambda copies: sum(copy.length for copy in copies))
    copies = (*within(trial.copies, Span(0, trial.exact_length)), *longest)
    reused = covered([copy.target for copy in copies], trial.num_tokens)
    return Selection(~reused, copies=copies)


@dataclass(frozen=True, slots=True, eq=False)
class Probed:
    """The results of a probe pass, the same for every budget."""

    scores: Scores  # (T,) of the copied positions
    attended: Scores  # (T,) summed over the layers that are listened to
    kv: SequenceKV  # after the pass, with the copied rows of the probes restored


@lru_cache(maxsize=1)  # all budgets of one plan share its probe pass; the result is never written to
def probed(trial: Trial) -> Probed:
    stretches = pieces(trial)
    places = server.probes(stretches, trial.num_tokens)
    rows = trial.base.copy()
    rows[places] = True
    attention, kv = trial.watch(rows)
    listening = np.isin(rows.nonzero()[0], server.listeners(trial.base))
    at = torch.from_numpy(places)
    layers = slice(server.num_listening_layers(trial.num_layers))
    changed = (kv.v[layers, at].float() - trial.placed.v[layers, at].float()).flatten(2).norm(dim=2)
    for fresh, old in ((kv.k, trial.placed.k), (kv.v, trial.placed.v)):
        fresh[:, at] = old[:, at]
    attended = attention[layers, listening].mean(axis=1)
    weights = server.repairable(stretches, trial.num_tokens)
    scoring = Scoring(stretches, places.tolist(), weights, device=changed.device)
    scores = scoring.scores(torch.from_numpy(attended).to(changed), changed)
    return Probed(scores.cpu().numpy(), attended.sum(axis=0), kv)


def _cost(trial: Trial) -> float:
    """The probes, and what of the base is computed a second time."""
    num_probes = len(server.probes(pieces(trial), trial.num_tokens))
    stale = int(trial.base[trial.first_approximate :].sum())
    listening = min(MAX_LISTENERS, int(trial.base.sum()))
    return float((num_probes + listening + min(MAX_RENEWED, max(0, stale - listening))) * trial.num_layers)


def _kvshare(trial: Trial, budget: float) -> Selection:
    found = probed(trial)
    rows = server.chosen(found.scores, trial.copied, trial.base, num_wanted(trial, budget))
    first = trial.first_approximate
    again = server.renewed(found.attended, trial.base, rows, first_approximate=first)
    computed = None if takes_all(trial, budget) else trial.base & ~again
    return Selection(rows, probe=_cost(trial), kv=found.kv, computed=computed)


CHOICES: Choices = {
    "query": (partial(_most_asked_for, scores=_by_question), second_pass),
    "query-all": (partial(_most_asked_for, scores=_by_base), second_pass),
    "query-once": (partial(_most_asked_for, scores=_by_question, once=True), _question_again),
    "query-all-once": (partial(_most_asked_for, scores=_by_base, once=True), _question_again),
    "query-windows": (partial(_most_asked_for, scores=_by_question, window=_WINDOW), second_pass),
    "windows-query": (_half_and_half, second_pass),
    "most-attended": (_most_attended, base.no_probe),
    "set-cache": (_set_cache, base.no_probe),
    "kvshare": (_kvshare, _cost),
}
