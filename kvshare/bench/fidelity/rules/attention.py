"""Rules that look at attention: of the tokens that are computed anyway, or in the stored prompts' prefill."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from delta_tree import Copy, Span
from kvshare.bench.fidelity.layered import Mask
from kvshare.bench.fidelity.rules.base import Choices, chunks, heads, no_probe, num_wanted, pieces, takes_all
from kvshare.bench.fidelity.stored_prompts import copies_from
from kvshare.bench.fidelity.trial import Selection, Trial
from kvshare.sharing.plan import within
from kvshare.sharing.selection import Scores, blocks, covered, highest

_WINDOW = 8  # tokens
_PARAGRAPH = 12  # tokens: a shorter last part is the end of the chat template


def second_pass(trial: Trial) -> float:
    """The base is the probe, and is computed again with the repairs."""
    return float(trial.base_layer_tokens())


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
    attention, _ = trial.base_pass
    scores: Scores = attention[:, question(trial)[trial.base]].mean(axis=1)
    return scores


def _by_question(trial: Trial) -> Scores:
    """(T,) the question's attention, summed over layers."""
    scores: Scores = question_attention(trial).sum(axis=0)
    return scores


def _by_base(trial: Trial) -> Scores:
    """(T,) attention of every token that is computed anyway, placeholders too."""
    attention, _ = trial.base_pass
    scores: Scores = attention.sum(axis=(0, 1))
    return scores


def _most_asked_for(
    trial: Trial, budget: float, *, scores: Callable[[Trial], Scores], window: int = 1
) -> Selection:
    """The tokens, or windows of equal size, with the highest scores."""
    rows = blocks(scores(trial), trial.copied, num_wanted(trial, budget), window)
    return Selection(rows, probe=second_pass(trial))


def _base_once(trial: Trial, budget: float, *, scores: Callable[[Trial], Scores]) -> Selection:
    """The same, but the base is computed once, as the probe, and only the question is computed again."""
    rows = highest(scores(trial), trial.copied, num_wanted(trial, budget))
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
    prompt = trial.scenario.prompt
    places = {prompt.token_ids[part.start : part.end].tobytes(): part for part in prompt.parts}
    best: list[Copy] = []
    behind = Span(trial.exact_length, trial.num_tokens)
    for node in trial.stored.nodes:
        if (done := trial.stored.prefills.get(node.node_id)) is None:
            continue
        copies: list[Copy] = []
        for part in done.prompt.parts:
            target = places.get(done.prompt.token_ids[part.start : part.end].tobytes())
            if target is None:
                break
            copies += within(copies_from(node, part, target), behind)
        if sum(copy.length for copy in copies) > sum(copy.length for copy in best):
            best = copies
    copies = [*within(trial.copies, Span(0, trial.exact_length)), *best]
    reused = covered([copy.target for copy in copies], trial.num_tokens)
    return Selection(~reused, copies=tuple(copies))


CHOICES: Choices = {
    "query": (partial(_most_asked_for, scores=_by_question), second_pass),
    "query-all": (partial(_most_asked_for, scores=_by_base), second_pass),
    "query-once": (partial(_base_once, scores=_by_question), _question_again),
    "query-all-once": (partial(_base_once, scores=_by_base), _question_again),
    "query-windows": (partial(_most_asked_for, scores=_by_question, window=_WINDOW), second_pass),
    "windows-query": (_half_and_half, second_pass),
    "most-attended": (_most_attended, no_probe),
    "set-cache": (_set_cache, no_probe),
}
