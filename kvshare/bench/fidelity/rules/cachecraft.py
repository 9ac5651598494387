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
from kvshare.bench.fidelity.rules.base import Rule, Scores, highest, num_wanted, stretches
from kvshare.bench.fidelity.rules.chunks import (
    LEAST_MISMATCH,
    Variant,
    content,
    fix_overhead,
    focused_chunks,
    variant,
)
from kvshare.bench.fidelity.scenario import Prompt
from kvshare.bench.fidelity.shelf import Prefill, covered
from kvshare.bench.fidelity.trial import Selection, Trial
from kvshare.sharing.plan import clip

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

    A part that no stored prompt has as a whole keeps the plan's copies, and the record of most of it.
    """
    prompt = trial.scenario.prompt
    found = []
    for number, span in enumerate(prompt.parts):
        if not trial.copied[span.start : span.end].any():
            continue
        prefix = [content(prompt, before) for before in range(number)]
        whole = [
            (fix_overhead(stored, prefix), stored, node, part)
            for node in trial.shelf.nodes
            if (done := trial.shelf.prefills.get(node.node_id)) is not None
            for part in _same_parts(done, prompt, number)
            for stored in [_recorded(done, part)]
        ]
        if whole:
            cost, stored, node, part = min(whole, key=lambda each: each[0])
            scores = np.zeros(trial.num_tokens)
            scores[span.start : span.end] = stored.token_scores
            source = trial.shelf.prefills[node.node_id].prompt.parts[part]
            inside = stretches(covered([span], trial.num_tokens) & trial.copied)
            laid = [clip(copy, run) for copy in copies_from(node, source, span) for run in inside]
            found.append(_Chunk(span, cost, scores, tuple(filter(None, laid))))
        else:
            found.append(_partly_copied(trial, span, prefix))
    return found


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


def _same_parts(done: Prefill, prompt: Prompt, number: int) -> list[int]:
    wanted = content(prompt, number)
    return [part for part in range(len(done.prompt.parts)) if content(done.prompt, part) == wanted]


def copies_from(node: Node, source: Span, target: Span) -> list[Copy]:
    """A part of a stored prompt, laid at a part of the new one."""
    found = []
    for start, segment_id, offset, length in node.pieces.rows():
        first, end = max(start, source.start), min(start + length, source.end)
        if first < end:
            target_start = target.start + first - source.start
            found.append(
                Copy(
                    donor=node.node_id,
                    segment_id=segment_id,
                    offset=offset + first - start,
                    length=end - first,
                    target_start=target_start,
                    source_position=first,
                    donor_start=first,
                )
            )
    return found


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
    paper finds them on the way. That pass is not charged.
    """
    chunks = _found_chunks(trial)
    spans = [chunk.span for chunk in chunks]
    attention = trial.guided[:, -trial.settings.repair.tail :].mean(axis=1)  # (L, T)
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
    return Selection(rows, copies=_layout(trial, chunks))


def _union(masks: Sequence[Mask], num_tokens: int) -> Mask:
    rows = np.zeros(num_tokens, np.bool_)
    for mask in masks:
        rows |= mask
    return rows


RULES = (
    Rule("cache-craft", "Cache-Craft", "SIGMOD'25, section 3", _cachecraft),
    Rule("cache-craft-focused", "Cache-Craft, focused chunks", "SIGMOD'25, 3.2.2", _focused, per_layer=True),
)
