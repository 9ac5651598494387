"""Rules that look at attention: of the tokens that are computed anyway, or at the time of caching."""

from __future__ import annotations

import numpy as np

from delta_tree import Copy, Span
from kvshare.bench.fidelity.layered import Mask
from kvshare.bench.fidelity.rules.base import Rule, chunks, heads, num_wanted, pieces, takes_all
from kvshare.bench.fidelity.shelf import copies_from, covered
from kvshare.bench.fidelity.trial import Selection, Trial
from kvshare.sharing.plan import clip
from kvshare.sharing.selection import Scores, blocks, highest

_WINDOW = 8  # tokens
_PARAGRAPH = 12  # tokens: a shorter last part is what the chat template ends with


def second_pass(trial: Trial) -> float:
    """The tokens computed anyway are the probe, and computed again with the repairs."""
    return float(trial.base_layer_tokens())


def last_again(trial: Trial) -> float:
    """The same, but of these tokens only the question is computed again."""
    return float(question(trial).sum() * trial.num_layers)


def question(trial: Trial) -> Mask:
    """(T,) the computed tokens from the last paragraph on, or from the tail if that is further in front."""
    last = next(part for part in reversed(trial.scenario.prompt.parts) if len(part) >= _PARAGRAPH)
    start = min(last.start, trial.num_tokens - trial.settings.repair.tail)
    return trial.base & (np.arange(trial.num_tokens) >= start)


def asked_for(trial: Trial) -> Scores:
    """(T,) attention of the question, mean over its tokens, summed over layers."""
    asking = question(trial)[trial.base]
    scores: Scores = trial.guided[:, asking].mean(axis=1).sum(axis=0)
    return scores


def _query(trial: Trial, budget: float) -> Selection:
    rows = highest(asked_for(trial), trial.copied, num_wanted(trial, budget))
    return Selection(rows, probe=second_pass(trial))


def _all_asked_for(trial: Trial) -> Scores:
    """(T,) attention of every token that is computed anyway."""
    scores: Scores = trial.guided.sum(axis=(0, 1))
    return scores


def _query_all(trial: Trial, budget: float) -> Selection:
    """Every token that is computed anyway asks, placeholders too."""
    return Selection(
        highest(_all_asked_for(trial), trial.copied, num_wanted(trial, budget)), probe=second_pass(trial)
    )


def _once(trial: Trial, scores: Scores, budget: float) -> Selection:
    """Placeholders are computed once, in the pass that is watched; behind the repairs the question again."""
    rows = highest(scores, trial.copied, num_wanted(trial, budget))
    kept = None if takes_all(trial, budget) else trial.base & ~question(trial)
    return Selection(rows, probe=last_again(trial), kv=trial.guided_kv, kept=kept)


def _query_once(trial: Trial, budget: float) -> Selection:
    return _once(trial, asked_for(trial), budget)


def _query_all_once(trial: Trial, budget: float) -> Selection:
    return _once(trial, _all_asked_for(trial), budget)


def windows(scores: Scores, allowed: Mask, count: int) -> Mask:
    """Windows of equal size with the highest mean scores, `count` positions together."""
    return blocks(scores, allowed, count, _WINDOW)


def _query_windows(trial: Trial, budget: float) -> Selection:
    rows = windows(asked_for(trial), trial.copied, num_wanted(trial, budget))
    return Selection(rows, probe=second_pass(trial))


def _half_and_half(trial: Trial, budget: float) -> Selection:
    """Half of the budget for windows behind edits, half for what the query attends to."""
    count = num_wanted(trial, budget)
    rows = heads(pieces(trial), trial.num_tokens, count // 2)
    rows |= highest(asked_for(trial), trial.copied & ~rows, count - int(rows.sum()))
    return Selection(rows, probe=second_pass(trial))


def _most_attended(trial: Trial, budget: float) -> Selection:
    """In each chunk, the same share of tokens: those most attended to when the chunk was cached."""
    scores = np.zeros(trial.num_tokens)
    for copy in trial.foreign:
        if (done := trial.shelf.prefills.get(copy.donor)) is not None:
            source = slice(copy.donor_start, copy.donor_start + copy.length)
            scores[copy.target_start : copy.target_start + copy.length] = done.watched.received[source]
    rows = np.zeros(trial.num_tokens, np.bool_)
    total, spent, wanted = int(trial.copied.sum()), 0, num_wanted(trial, budget)
    seen = 0
    for chunk in chunks(trial):
        seen += len(chunk)
        count = round(wanted * seen / max(1, total)) - spent
        rows |= highest(scores, covered([chunk], trial.num_tokens), count)
        spent += count
    return Selection(rows)


def _set_cache(trial: Trial, budget: float) -> Selection:
    """
    The longest stored beginning whose documents all occur in the prompt, in any order, keys moved.

    Everything else is computed. There is no budget: it is what it is.
    """
    prompt = trial.scenario.prompt
    places = {prompt.token_ids[part.start : part.end].tobytes(): part for part in prompt.parts}
    best: list[Copy] = []
    behind = Span(trial.exact_length, trial.num_tokens)
    for node in trial.shelf.nodes:
        done = trial.shelf.prefills.get(node.node_id)
        if done is None:
            continue
        copies: list[Copy] = []
        for part in done.prompt.parts:
            target = places.get(done.prompt.token_ids[part.start : part.end].tobytes())
            if target is None:
                break
            found = copies_from(node, part, target)
            copies += [own for copy in found if (own := clip(copy, behind))]
        if sum(copy.length for copy in copies) > sum(copy.length for copy in best):
            best = copies
    exact = [kept for copy in trial.copies if (kept := clip(copy, Span(0, trial.exact_length)))]
    reused = covered([copy.target for copy in (*exact, *best)], trial.num_tokens)
    return Selection(~reused, copies=(*exact, *best))


RULES = (
    Rule("query", "after query-guided selection", "arXiv:2602.02579", _query, second_pass, after=True),
    Rule("query-all", "after SparseX", "arXiv:2606.01751", _query_all, second_pass, after=True),
    Rule(
        "query-once",
        "after query-guided, placeholders once",
        "arXiv:2602.02579",
        _query_once,
        last_again,
        after=True,
    ),
    Rule(
        "query-all-once",
        "after SparseX, placeholders once",
        "arXiv:2606.01751",
        _query_all_once,
        last_again,
        after=True,
    ),
    Rule(
        "query-windows",
        "after CacheClip (windows)",
        "arXiv:2510.10129",
        _query_windows,
        second_pass,
        after=True,
    ),
    Rule("windows-query", "half windows, half query", "", _half_and_half, second_pass, published=False),
    Rule("most-attended", "Prefill-H2O", "Cache-Craft's baseline", _most_attended),
    Rule("set-cache", "Set-Cache", "Cache-Craft's baseline", _set_cache, has_budget=False),
)
