"""
Cache-Craft (SIGMOD'25): how much a cached chunk depends on what stood before it, and which of its tokens.

Attention is what was recorded when the stored prompts were computed, mean over layers and heads. Equation
numbers are the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from delta_tree import Copy, Node, Span
from kvshare.bench.fidelity.layered import Mask
from kvshare.bench.fidelity.rules.attention import question, second_pass
from kvshare.bench.fidelity.rules.base import Rule, num_wanted
from kvshare.bench.fidelity.rules.chunks import (
    LEAST_MISMATCH,
    ChunkStore,
    Variant,
    content,
    fix_overhead,
    focused_chunks,
    variant,
)
from kvshare.bench.fidelity.shelf import Prefill, copies_from, covered
from kvshare.bench.fidelity.trial import Selection, Trial
from kvshare.sharing.plan import clip
from kvshare.sharing.selection import Scores, highest, stretches

_CAPACITY = 256  # variants, N x M: more than a scenario has chunks, or the oldest would leave
_CONFIDENCE = 3  # layers that must agree on the focused chunks (w of algorithm 1; the paper gives no value)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of the new prompt of which KV is stored."""

    span: Span
    overhead: float  # CFO without alpha
    scores: Scores  # (T,) of its tokens, 0 elsewhere
    copies: tuple[Copy, ...]


def _found_chunks(trial: Trial) -> list[_Chunk]:
    """
    Every part that is copied, from the variant with the least overhead.

    A part that no stored prompt has as a whole is a miss in the paper; here it keeps the plan's copies and
    the record of most of it.
    """
    prompt, found = trial.scenario.prompt, []
    store, origins = _stored(trial)
    for number, span in enumerate(prompt.parts):
        if not trial.copied[span.start : span.end].any():
            continue
        prefix = [content(prompt, before) for before in range(number)]
        best = store.best(content(prompt, number), prefix)
        if best is None:
            found.append(_partly_copied(trial, span, prefix))
            continue
        node, source = origins[best]
        scores = np.zeros(trial.num_tokens)
        scores[span.start : span.end] = store[best].token_scores
        inside = stretches(covered([span], trial.num_tokens) & trial.copied)
        laid = [clip(copy, run) for copy in copies_from(node, source, span) for run in inside]
        found.append(_Chunk(span, fix_overhead(store[best], prefix), scores, tuple(filter(None, laid))))
    return found


def _stored(trial: Trial) -> tuple[ChunkStore, dict[int, tuple[Node, Span]]]:
    """Every chunk of every stored prompt, and which node and part of it a variant is of."""
    store, origins = ChunkStore(_CAPACITY), {}
    for node in reversed(trial.shelf.nodes):
        if (done := trial.shelf.prefills.get(node.node_id)) is not None:
            for part, span in enumerate(done.prompt.parts):
                origins[store.add(_recorded(done, part))] = (node, span)
    return store, origins


def _recorded(done: Prefill, part: int) -> Variant:
    return variant(done.prompt, done.watched.to_parts, done.watched.itself, part)


def _partly_copied(trial: Trial, span: Span, prefix: Sequence[bytes]) -> _Chunk:
    scores = np.zeros(trial.num_tokens)
    most, cost = 0, 1.0
    for copy in trial.copies:
        start, end = max(copy.target_start, span.start), min(copy.target_start + copy.length, span.end)
        done = trial.shelf.prefills.get(copy.donor)
        if start >= end or done is None:
            continue
        first = copy.donor_start + start - copy.target_start
        part = int(done.watched.part_of[first])
        seen = done.watched.to_parts[first : first + end - start, :part]
        scores[start:end] = seen.sum(axis=1)
        if end - start > most:
            most = end - start
            cost = fix_overhead(_recorded(done, part), prefix)
    return _Chunk(span, cost, scores, ())


def _layout(trial: Trial, chunks: Sequence[_Chunk]) -> tuple[Copy, ...]:
    """The plan's copies, with whole chunks from their best variants laid over them."""
    return (*trial.copies, *(copy for chunk in chunks for copy in chunk.copies))


def _counts(trial: Trial, chunks: Sequence[_Chunk], weights: Sequence[float], total: float) -> list[int]:
    """N of each chunk (section 3.2.1) with alpha such that the weighted sum is the budget."""
    sizes = [int(trial.copied[chunk.span.start : chunk.span.end].sum()) for chunk in chunks]

    def at(alpha: float) -> list[int]:
        return [
            min(size, math.ceil(alpha * c.overhead * size)) for c, size in zip(chunks, sizes, strict=True)
        ]

    low, high = 0.0, 1 / LEAST_MISMATCH * 4
    for _ in range(80):
        middle = math.sqrt(max(low, 1e-9) * high) if high > 1e-8 else (low + high) / 2
        spent = sum(count * weight for count, weight in zip(at(middle), weights, strict=True))
        low, high = (middle, high) if spent <= total else (low, middle)
    return _topped_up(at(low), sizes, weights, total)


def _topped_up(counts: list[int], sizes: Sequence[int], weights: Sequence[float], total: float) -> list[int]:
    """Single tokens more, where the ceiling of N jumped over the budget."""
    left = total - sum(count * weight for count, weight in zip(counts, weights, strict=True))
    for place in sorted(range(len(counts)), key=lambda place: counts[place] - sizes[place]):
        more = min(sizes[place] - counts[place], int(left // max(weights[place], 1e-9)))
        counts[place] += more
        left -= more * weights[place]
    return counts


def _rows(trial: Trial, chunks: Sequence[_Chunk], counts: Sequence[int]) -> list[Mask]:
    """Of each chunk, the tokens that attended most to what stood before it (eq. 14)."""
    rows = []
    for chunk, count in zip(chunks, counts, strict=True):
        inside = covered([chunk.span], trial.num_tokens) & trial.copied
        rows.append(highest(chunk.scores, inside, count))
    return rows


def _cachecraft(trial: Trial, budget: float) -> Selection:
    chunks = _found_chunks(trial)
    counts = _counts(trial, chunks, [1.0] * len(chunks), num_wanted(trial, budget))
    chosen = _rows(trial, chunks, counts)
    return Selection(_union(chosen, trial.num_tokens), copies=_layout(trial, chunks))


def _focused(trial: Trial, budget: float) -> Selection:
    """
    With early termination (section 3.2.2): behind layer L*, only the chunks that the question looks at go on.

    L* and the focused chunks come from a pass over the tokens computed anyway, so that the budget is met; the
    paper finds them on the way.
    """
    chunks = _found_chunks(trial)
    spans = [chunk.span for chunk in chunks]
    attention = trial.guided[:, question(trial)[trial.base]].mean(axis=1)  # (L, T)
    by_chunk = np.array([[layer[span.start : span.end].sum() for span in spans] for layer in attention])
    focused, last = focused_chunks(by_chunk, confidence=_CONFIDENCE)
    num_layers = trial.num_layers
    shares = [1.0 if number in focused else last / num_layers for number in range(len(chunks))]
    everything = num_wanted(trial, budget) >= int(trial.copied.sum())
    counts = _counts(trial, chunks, [1.0] * len(chunks) if everything else shares, num_wanted(trial, budget))
    chosen = _rows(trial, chunks, counts)
    rows = np.zeros((num_layers, trial.num_tokens), np.bool_)
    for number, own in enumerate(chosen):
        rows[: num_layers if everything or number in focused else last] |= own
    return Selection(rows, probe=second_pass(trial), copies=_layout(trial, chunks))


def _union(masks: Sequence[Mask], num_tokens: int) -> Mask:
    rows = np.zeros(num_tokens, np.bool_)
    for mask in masks:
        rows |= mask
    return rows


RULES = (
    Rule("cache-craft", "Cache-Craft", "SIGMOD'25, section 3", _cachecraft),
    Rule(
        "cache-craft-focused",
        "Cache-Craft, focused chunks",
        "SIGMOD'25, 3.2.2",
        _focused,
        second_pass,
        per_layer=True,
    ),
)
