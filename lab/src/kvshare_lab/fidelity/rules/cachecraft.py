"""
Cache-Craft (SIGMOD'25): how much a cached chunk depends on its old prefix, and which of its tokens do most.

Attention is that of the stored prompts' prefill, mean over layers and heads. Equations are the paper's.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from delta_tree import Copy, Span
from kvshare.sharing.plan import within
from kvshare.sharing.repair_choice import Scores, covered, highest, spans_where
from kvshare_lab.fidelity.layered import Mask
from kvshare_lab.fidelity.rules.attention import question_attention, second_pass
from kvshare_lab.fidelity.rules.base import Choices, no_probe, num_wanted, takes_all
from kvshare_lab.fidelity.scenario import Prompt
from kvshare_lab.fidelity.stored_prompts import Prefill, copies_from
from kvshare_lab.fidelity.trial import Selection, Trial

_LEAST_MISMATCH = 1e-6  # of 1 - beta': at 100 % every token is computed, whatever was before it
_CONFIDENCE = 3  # layers that must agree on the focused chunks (w of algorithm 1; the paper gives no value)


class Variant(NamedTuple):
    """A chunk as it was computed in one stored prompt."""

    tokens: bytes
    prefix: tuple[bytes, ...]  # the chunks before it, in order
    inter: Scores  # (chunks before,) attention to each of them, summed over the chunk's tokens
    impact: float  # CCI, eq. 11
    token_scores: Scores  # (|C|,) attention of each token to all chunks before it (eq. 14)


def variant(prompt: Prompt, to_parts: Scores, itself: Scores, part: int) -> Variant:
    """
    What is recorded of a chunk when it is computed (eq. 3, 4, 9 to 11).

    Shapes:  to_parts (T, P) attention of each token to each chunk, itself (T,) to itself
    """
    spans, contents = prompt.parts, prompt.contents
    rows, length = slice(spans[part].start, spans[part].end), len(spans[part])
    inter = to_parts[rows, :part].sum(axis=0)
    intra = float(to_parts[rows, part].sum() - itself[rows].sum())
    outside = sum(value / (length * len(spans[j])) for j, value in enumerate(inter))
    inside = intra / length**2
    impact = 1.0 if inside <= 0 else 1 / (1 + math.exp(-min(outside / inside, 50.0)))
    token_scores = to_parts[rows, :part].sum(axis=1)
    return Variant(contents[part], tuple(contents[:part]), inter, impact, token_scores)


def prefix_overlap(stored: Variant, prefix: Sequence[bytes]) -> float:
    """beta' of a stored chunk that now has these chunks before it (eq. 6 to 8)."""
    if not stored.prefix:
        return 1.0 if not prefix else 0.0
    total = float(stored.inter.sum())
    common = [number for number, chunk in enumerate(stored.prefix) if chunk in prefix]
    beta = float(stored.inter[common].sum()) / total if total > 0 else 0.0
    order = [list(prefix).index(stored.prefix[number]) for number in common]
    pairs = list(itertools.combinations(order, 2))
    discordant = sum(first > second for first, second in pairs)
    return beta * (1 - (discordant / len(pairs) if pairs else 0.0))


def fix_overhead(stored: Variant, prefix: Sequence[bytes]) -> float:
    """CFO without alpha: CCI x (1 - beta') (eq. 12)."""
    return stored.impact * max(_LEAST_MISMATCH, 1 - prefix_overlap(stored, prefix))


def focused_chunks(attention: Scores, *, confidence: int) -> tuple[frozenset[int], int]:
    """
    Algorithm 1: the chunks that the question looks at, and the layer after which they no longer change.

    Shapes:  attention (L, k) of the question to each chunk, by layer
    """
    num_layers, num_chunks = attention.shape
    everything = frozenset(range(num_chunks))
    if num_chunks < 3:
        return everything, num_layers
    found: list[frozenset[int]] = []
    for layer, sums in enumerate(np.cumsum(attention, axis=0), start=1):
        order = np.argsort(-sums, kind="stable")
        gaps = -np.diff(sums[order])
        shares = gaps / max(float(gaps.sum()), 1e-12)
        entropy = np.cumsum(-shares * np.log(np.maximum(shares, 1e-12)))
        number = int(np.argmax(np.diff(entropy))) + 1
        found.append(frozenset(order[:number].tolist()))
        if layer >= confidence and len(set(found[-confidence:])) == 1:
            return found[-1], layer
    return everything, num_layers


class _Chunk(NamedTuple):
    """A part of the new prompt of which KV is stored."""

    span: Span
    overhead: float  # CFO without alpha
    scores: Scores  # (T,) of its tokens, 0 elsewhere
    copies: tuple[Copy, ...]


def _found_chunks(trial: Trial) -> list[_Chunk]:
    """
    Every part that is copied, each from its stored variant with the least overhead.

    In the paper, a part that no stored prompt has as a whole is a miss. Here it keeps the plan's copies, and
    is scored by the part that most of it comes from.
    """
    prompt, found = trial.scenario.prompt, []
    contents = prompt.contents
    stored = [
        (_recorded(done, part), node, span)
        for node, done in reversed(trial.stored.computed_nodes)
        for part, span in enumerate(done.prompt.parts)
    ]
    for number, span in enumerate(prompt.parts):
        if not trial.copied[span.start : span.end].any():
            continue
        same = [each for each in stored if each[0].tokens == contents[number]]
        if not same:
            found.append(_partly_copied(trial, span, contents[:number]))
            continue
        overheads = [fix_overhead(each, contents[:number]) for each, *_ in same]
        best, node, source = same[int(np.argmin(overheads))]
        scores = np.zeros(trial.num_tokens)
        scores[span.start : span.end] = best.token_scores
        runs = spans_where(covered([span], trial.num_tokens) & trial.copied)
        copies = [part for run in runs for part in within(copies_from(node, source, span), run)]
        found.append(_Chunk(span, min(overheads), scores, tuple(copies)))
    return found


def _recorded(done: Prefill, part: int) -> Variant:
    return variant(done.prompt, done.attention.to_parts, done.attention.to_itself, part)


def _partly_copied(trial: Trial, span: Span, prefix: Sequence[bytes]) -> _Chunk:
    scores = np.zeros(trial.num_tokens)
    most, overhead = 0, 1.0
    for copy in within(trial.copies, span):
        if (done := trial.stored.prefills.get(copy.donor)) is None:
            continue
        first, target = copy.donor_start, copy.target
        part = next(n for n, each in enumerate(done.prompt.parts) if each.start <= first < each.end)
        seen = done.attention.to_parts[first : first + copy.length, :part]
        scores[target.start : target.end] = seen.sum(axis=1)
        if copy.length > most:
            most, overhead = copy.length, fix_overhead(_recorded(done, part), prefix)
    return _Chunk(span, overhead, scores, ())


def _rows(trial: Trial, chunks: Sequence[_Chunk], weights: Sequence[float], budget: float) -> list[Mask]:
    """
    Of each chunk, the tokens that attended most to what was before it (eq. 14): N of them (section 3.2.1),
    with alpha such that the weighted sum is the budget.
    """
    allowed = [covered([chunk.span], trial.num_tokens) & trial.copied for chunk in chunks]
    sizes, total = [int(mask.sum()) for mask in allowed], num_wanted(trial, budget)

    def counts(alpha: float) -> list[int]:
        both = zip(chunks, sizes, strict=True)
        return [min(size, math.ceil(alpha * chunk.overhead * size)) for chunk, size in both]

    low, high = 0.0, 1 / _LEAST_MISMATCH * 4
    for _ in range(80):
        middle = math.sqrt(max(low, 1e-9) * high) if high > 1e-8 else (low + high) / 2
        spent = sum(count * weight for count, weight in zip(counts(middle), weights, strict=True))
        low, high = (middle, high) if spent <= total else (low, middle)
    found = _topped_up(counts(low), sizes, weights, total)
    chosen = zip(chunks, allowed, found, strict=True)
    return [highest(chunk.scores, mask, count) for chunk, mask, count in chosen]


def _topped_up(counts: list[int], sizes: Sequence[int], weights: Sequence[float], total: float) -> list[int]:
    """Adds single tokens where the ceiling of N jumped over the budget."""
    left = total - sum(count * weight for count, weight in zip(counts, weights, strict=True))
    for place in sorted(range(len(counts)), key=lambda place: counts[place] - sizes[place]):
        more = min(sizes[place] - counts[place], int(left // max(weights[place], 1e-9)))
        counts[place] += more
        left -= more * weights[place]
    return counts


def _copies(trial: Trial, chunks: Sequence[_Chunk]) -> tuple[Copy, ...]:
    """The plan's copies, then those of whole chunks from their best variants, which overwrite them."""
    return (*trial.copies, *(copy for chunk in chunks for copy in chunk.copies))


def _cachecraft(trial: Trial, budget: float) -> Selection:
    chunks, rows = _found_chunks(trial), np.zeros(trial.num_tokens, np.bool_)
    rows = np.logical_or.reduce([rows, *_rows(trial, chunks, [1.0] * len(chunks), budget)])
    return Selection(rows, copies=_copies(trial, chunks))


def _focused(trial: Trial, budget: float) -> Selection:
    """
    With early termination (section 3.2.2): after layer L*, only the chunks that the question looks at go on.

    L* and the focused chunks come from a pass over the base, so that the budget is met; the paper finds them
    during the prefill itself.
    """
    chunks, attention = _found_chunks(trial), question_attention(trial)
    spans = [chunk.span for chunk in chunks]
    by_chunk = np.array([[layer[span.start : span.end].sum() for span in spans] for layer in attention])
    focused, last = focused_chunks(by_chunk, confidence=_CONFIDENCE)
    if takes_all(trial, budget):
        last = trial.num_layers
    depths = [trial.num_layers if number in focused else last for number in range(len(chunks))]
    rows = np.zeros((trial.num_layers, trial.num_tokens), np.bool_)
    chosen = _rows(trial, chunks, [depth / trial.num_layers for depth in depths], budget)
    for depth, own in zip(depths, chosen, strict=True):
        rows[:depth] |= own
    return Selection(rows, probe=second_pass(trial), copies=_copies(trial, chunks))


CHOICES: Choices = {"cache-craft": (_cachecraft, no_probe), "cache-craft-focused": (_focused, second_pass)}
