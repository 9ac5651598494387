"""Cache-Craft's quantities (SIGMOD'25, section 3) by hand, and its rules over hand-made prompts."""

import math

import numpy as np
import pytest
import torch

from kvshare_lab.fidelity.rules import RULES
from kvshare_lab.fidelity.rules.base import num_wanted
from kvshare_lab.fidelity.rules.cachecraft import (
    Variant,
    fix_overhead,
    focused_chunks,
    prefix_overlap,
    variant,
)
from kvshare_lab.fidelity.trial import Trial
from lab.tests.fidelity.scenes import (
    QUESTION,
    SYSTEM,
    TAIL,
    A,
    B,
    C,
    best,
    dense,
    places,
    prompt,
    scenario,
    text,
    trial,
    trial_of,
)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def stored(prefix: str, inter: list[float], *, impact: float = 0.5, tokens: bytes = b"X") -> Variant:
    """A variant behind one-letter chunks."""
    chunks = tuple(letter.encode() for letter in prefix)
    return Variant(tokens, chunks, np.array(inter), impact, np.zeros(1))


def behind(prefix: str) -> list[bytes]:
    return [letter.encode() for letter in prefix]


def test_what_is_recorded_of_a_chunk() -> None:
    """Chunks of 1, 2 and 2 tokens; the last one's inter, intra, CCI and tokens, by eq. 3, 4 and 9 to 11."""
    whole = prompt(text(1, 1), text(2, 2), text(3, 2))
    attention = np.array(
        [
            [1.0, 0.0, 0.0, 0.0, 0.0],
            [0.5, 0.5, 0.0, 0.0, 0.0],
            [0.2, 0.3, 0.5, 0.0, 0.0],
            [0.1, 0.2, 0.1, 0.6, 0.0],
            [0.3, 0.1, 0.1, 0.4, 0.1],
        ]
    )
    parts = [slice(0, 1), slice(1, 3), slice(3, 5)]
    to_parts = np.stack([attention[:, part].sum(axis=1) for part in parts], axis=1)
    found = variant(whole, to_parts, attention.diagonal(), 2)
    np.testing.assert_allclose(found.inter, [0.1 + 0.3, 0.2 + 0.1 + 0.1 + 0.1])
    outside = 0.4 / (2 * 1) + 0.5 / (2 * 2)
    inside = 0.4 / 2**2  # of the second token to the first: not to itself
    assert found.impact == pytest.approx(sigmoid(outside / inside))
    np.testing.assert_allclose(found.token_scores, [0.4, 0.5])
    assert found.tokens == whole.token_ids[3:5].tobytes()
    assert found.prefix == (whole.token_ids[:1].tobytes(), whole.token_ids[1:3].tobytes())
    first = variant(whole, to_parts, attention.diagonal(), 0)
    assert (first.prefix, len(first.inter), first.token_scores.tolist()) == ((), 0, [0.0])
    assert variant(whole, to_parts, attention.diagonal(), 1).impact == pytest.approx(sigmoid(0.35 / 0.075))


def test_prefix_overlap_counts_attention_that_finds_its_chunk_again() -> None:
    """Eq. 6: the share of attention to old chunks that are there again."""
    chunk = stored("ABC", [0.5, 0.3, 0.2])
    assert prefix_overlap(chunk, behind("ABC")) == pytest.approx(1.0)
    assert prefix_overlap(chunk, behind("AZ")) == pytest.approx(0.5)
    assert prefix_overlap(chunk, behind("ZBYC")) == pytest.approx(0.5)
    assert prefix_overlap(chunk, behind("Z")) == 0.0
    assert prefix_overlap(chunk, []) == 0.0


def test_another_order_is_penalised() -> None:
    """Eq. 7 and 8: the share of pairs that stand the other way round (Kendall)."""
    chunk = stored("ABC", [0.5, 0.3, 0.2])
    assert prefix_overlap(chunk, behind("ACB")) == pytest.approx(1 - 1 / 3)
    assert prefix_overlap(chunk, behind("CAB")) == pytest.approx(1 - 2 / 3)
    assert prefix_overlap(chunk, behind("CBA")) == pytest.approx(0.0)
    assert prefix_overlap(chunk, behind("CZA")) == pytest.approx(0.7 * 0.0)
    assert prefix_overlap(chunk, behind("ZA")) == pytest.approx(0.5)  # one alone has no order


def test_a_chunk_without_a_prefix() -> None:
    """It saw nothing before it: behind nothing it is right, behind something it is not."""
    assert prefix_overlap(stored("", []), []) == 1.0
    assert prefix_overlap(stored("", []), behind("A")) == 0.0


def test_overhead_is_impact_times_mismatch() -> None:
    """Eq. 12 without alpha; never quite 0, or 100 % could not mean every token."""
    chunk = stored("AB", [0.6, 0.2], impact=0.8)
    assert fix_overhead(chunk, behind("A")) == pytest.approx(0.8 * (1 - 0.75))
    assert fix_overhead(chunk, behind("Z")) == pytest.approx(0.8)
    assert 0 < fix_overhead(chunk, behind("AB")) <= 1e-6


def settled(sums: list[float]) -> set[int]:
    """Lines 4 to 9 of algorithm 1, as printed, for one layer."""
    order = sorted(range(len(sums)), key=lambda chunk: -sums[chunk])
    ordered = [sums[chunk] for chunk in order]
    diff = [ordered[i] - ordered[i + 1] for i in range(len(sums) - 1)]
    p = [each / sum(diff) for each in diff]
    h = [-sum(p[j] * math.log(p[j]) for j in range(i + 1) if p[j] > 0) for i in range(len(p))]
    gains = [h[i + 1] - h[i] for i in range(len(h) - 1)]
    return set(order[: gains.index(max(gains)) + 1])


ATTENTION = np.array(  # of the question to five chunks
    [
        [0.30, 0.05, 0.20, 0.04, 0.10],
        [0.10, 0.04, 0.40, 0.30, 0.05],
        [0.05, 0.03, 0.35, 0.45, 0.02],
        [0.05, 0.02, 0.40, 0.40, 0.03],
        [0.04, 0.02, 0.41, 0.42, 0.02],
        [0.03, 0.02, 0.40, 0.43, 0.02],
    ]
)


def test_focused_chunks_of_a_hand_made_attention() -> None:
    """Cumulated over layers; settled when three layers in a row say the same."""
    by_layer = [settled(sums.tolist()) for sums in np.cumsum(ATTENTION, axis=0)]
    focused, last = focused_chunks(ATTENTION, confidence=3)
    expected = next(
        layer for layer in range(3, 7) if by_layer[layer - 3] == by_layer[layer - 2] == by_layer[layer - 1]
    )
    assert last == expected
    assert focused == by_layer[last - 1]
    assert len({frozenset(each) for each in by_layer}) > 1  # it does change on the way
    assert last < len(ATTENTION)


def test_chunks_that_never_settle_are_all_recomputed() -> None:
    """And so are fewer than three, among which there is no change point."""
    turning = np.array([[8.0, 1.0, 0.0], [0.0, 20.0, 9.0], [60.0, 0.0, 9.0]])
    sets = [settled(sums.tolist()) for sums in np.cumsum(turning, axis=0)]
    assert sets[0] != sets[1] != sets[2]
    assert focused_chunks(turning, confidence=2) == (frozenset({0, 1, 2}), 3)
    assert focused_chunks(np.ones((6, 2)), confidence=1) == (frozenset({0, 1}), 6)


def recorded(made: Trial, number: int, part: int) -> Variant:
    """Of a part of a stored prompt, from the written-out decoder's attention."""
    whole = made.scenario.stored[number]
    empty = torch.zeros(made.num_layers, len(whole), 2, 16)
    attention = dense(made.model, whole.token_ids, empty, empty, torch.arange(len(whole))).attention
    mean = torch.stack(attention).mean(dim=(0, 1)).numpy()
    to_parts = np.stack([mean[:, part.start : part.end].sum(axis=1) for part in whole.parts], axis=1)
    return variant(whole, to_parts, mean.diagonal(), part)


def test_tokens_are_taken_by_overhead_and_by_what_they_saw() -> None:
    """N in proportion to CFO x |C|, up to one a chunk; of each chunk the tokens that saw most before it."""
    made = trial("moved")  # system C A B question
    new = made.scenario.prompt
    contents = [new.token_ids[part.start : part.end].tobytes() for part in new.parts]
    chunks = {}
    for number, origins in {1: [(1, 2)], 2: [(0, 1)], 3: [(0, 2), (1, 1)]}.items():
        options = [recorded(made, *origin) for origin in origins]
        chunks[number] = min(options, key=lambda found: fix_overhead(found, contents[:number]))
    wanted = num_wanted(made, 0.2)
    weights = {n: fix_overhead(each, contents[:n]) * len(new.parts[n]) for n, each in chunks.items()}
    chosen = RULES["cache-craft"].choose(made, 0.2)
    counts = {}
    for number, each in chunks.items():
        span = new.parts[number]
        found = [place - span.start for place in places(chosen.rows) if span.start <= place < span.end]
        assert found == best(each.token_scores, np.ones(len(span), np.bool_), len(found))
        counts[number] = len(found)
    assert sum(counts.values()) == wanted
    for number, count in counts.items():
        assert count == pytest.approx(wanted * weights[number] / sum(weights.values()), abs=2)


def test_a_chunk_is_copied_from_the_variant_that_fits() -> None:
    """C is stored twice; behind A it is taken from the prompt where it stood behind A."""
    far, near = prompt(SYSTEM, B, C, text(30, 20)), prompt(SYSTEM, A, C, text(31, 20))
    for prompts in ([far, near], [near, far]):
        made = trial_of(scenario(prompts, prompt(SYSTEM, A, text(32, 30), C, QUESTION)))
        copies = RULES["cache-craft"].choose(made, 0.1).copies
        assert copies is not None
        start = made.scenario.prompt.parts[3].start
        placed = made.place(copies).v[:, start : start + len(C)]
        done = next(done for done in made.stored.prefills.values() if done.prompt is near)
        origin = near.parts[2].start
        assert torch.equal(placed, done.kv.v[:, origin : origin + len(C)])


def test_unfocused_chunks_leave_behind_the_cut_off_layer() -> None:
    """The same tokens up to L*, then those of the focused chunks alone; b stays within the budget."""
    documents = [text(seed, 40) for seed in range(50, 54)]
    old = [prompt(SYSTEM, each, text(60 + number, 20)) for number, each in enumerate(documents)]
    made = trial_of(scenario(old, prompt(SYSTEM, *documents, QUESTION)), 6)
    rows = RULES["cache-craft-focused"].choose(made, 0.2).rows
    spans = [part for part in made.scenario.prompt.parts[1:] if made.copied[part.start : part.end].any()]
    asked = made.base_pass[0][:, -TAIL:].mean(axis=1)
    by_chunk = np.array([[layer[span.start : span.end].sum() for span in spans] for layer in asked])
    focused, last = focused_chunks(by_chunk, confidence=3)
    assert 0 < last < made.num_layers
    for layer in range(made.num_layers):
        for number, span in enumerate(spans):
            own = rows[layer, span.start : span.end]
            expected = rows[0, span.start : span.end] if number in focused or layer < last else False
            assert np.array_equal(own, np.broadcast_to(expected, own.shape))
    assert rows[0].sum() > rows[-1].sum() > 0
    assert rows.sum() <= num_wanted(made, 0.2) * made.num_layers
    assert rows.sum() > (num_wanted(made, 0.2) - 1) * made.num_layers
