"""Rules that look at attention, against the written-out decoder's and by hand."""

import numpy as np
import pytest
import torch

from kvshare.sharing.repair_choice import blocks
from kvshare_lab.fidelity.arms import make_trial
from kvshare_lab.fidelity.measures import divergence
from kvshare_lab.fidelity.rules import RULES
from kvshare_lab.fidelity.rules.attention import question
from kvshare_lab.fidelity.rules.base import num_wanted
from kvshare_lab.fidelity.trial import Trial
from lab.tests.fidelity.scenes import (
    QUESTION,
    SETTINGS,
    SYSTEM,
    TAIL,
    A,
    B,
    C,
    best,
    dense,
    llama,
    placed_by_hand,
    places,
    prompt,
    scenario,
    scenes,
    text,
    trial,
    trial_of,
)

BUDGET = 0.15


def asked(made: Trial) -> np.ndarray:
    """(L, N, T) attention of the tokens computed anyway, mean over heads, over the copies."""
    k, v = placed_by_hand(made)
    rows = torch.from_numpy(made.base.nonzero()[0])
    attention = dense(made.model, made.scenario.prompt.token_ids, k, v, rows).attention
    return torch.stack(attention).mean(dim=1).numpy()


@scenes
def test_the_query_asks_with_its_last_rows(scene: str) -> None:
    """The question's computed tokens, all layers; or every token that is computed anyway."""
    made = trial(scene)
    attention, count = asked(made), num_wanted(made, BUDGET)
    asking = question(made)[made.base]
    for name, rows in (("query", attention[:, asking]), ("query-all", attention)):
        expected = best(rows.sum(axis=(0, 1)), made.copied, count)
        assert places(RULES[name].choose(made, BUDGET).rows) == expected
    assert {*places(question(made))} >= {*range(made.num_tokens - TAIL, made.num_tokens)}
    assert {*places(question(made))} <= {*places(made.base)}


def test_windows_have_the_highest_means() -> None:
    """Eight positions from a multiple of eight; what is not allowed neither counts nor is taken."""
    scores, allowed = np.zeros(32), np.ones(32, np.bool_)
    scores[3] = 4.0  # one high token of eight: mean 0.5
    scores[8:16] = 0.6
    scores[20], allowed[16:20] = 2.6, False  # mean 0.65 of the four that are allowed
    scores[17] = 99.0
    scores[24:32] = 0.1
    assert places(blocks(scores, allowed, 4, 8)) == [20, 21, 22, 23]
    assert places(blocks(scores, allowed, 12, 8)) == [*range(8, 16), *range(20, 24)]
    assert places(blocks(scores, allowed, 15, 8)) == [0, 1, 2, *range(8, 16), *range(20, 24)]
    assert places(blocks(scores[:13], allowed[:13], 13, 8)) == list(range(13))


def test_query_windows_are_windows_of_what_the_query_asks() -> None:
    """Taken whole but for the last one."""
    made = trial("moved")
    rows = RULES["query-windows"].choose(made, BUDGET).rows
    scores = asked(made)[:, question(made)[made.base]].sum(axis=(0, 1))
    means = {
        first: scores[own].mean()
        for first in range(0, made.num_tokens, 8)
        if len(own := [place for place in range(first, first + 8) if place in places(made.copied)])
    }
    left, expected = num_wanted(made, BUDGET), []
    for first in sorted(means, key=lambda first: -means[first]):
        own = [place for place in range(first, first + 8) if place in places(made.copied)][:left]
        expected += own
        left -= len(own)
    assert places(rows) == sorted(expected)


def test_most_attended_takes_the_same_share_of_each_chunk() -> None:
    """Those that the chunk's own tokens attended to most when the stored prompt was computed."""
    made = trial("moved")
    rows = RULES["most-attended"].choose(made, BUDGET).rows
    new, (one, two) = made.scenario.prompt, made.scenario.stored
    spent = 0
    for part, (stored, source) in {1: (two, 2), 2: (one, 1), 3: (one, 2)}.items():
        span, origin = new.parts[part], stored.parts[source]
        assert new.token_ids[span.start : span.end].tolist() == (
            stored.token_ids[origin.start : origin.end].tolist()
        )
        empty = torch.zeros(made.num_layers, len(stored), 2, 16)
        attention = dense(made.model, stored.token_ids, empty, empty, torch.arange(len(stored))).attention
        inside = torch.stack(attention).mean(dim=(0, 1))[origin.start : origin.end, origin.start : origin.end]
        found = [place - span.start for place in places(rows) if span.start <= place < span.end]
        assert found == best(inside.sum(dim=0).numpy(), np.ones(len(span), np.bool_), len(found))
        assert abs(len(found) - num_wanted(made, BUDGET) * len(span) / made.copied.sum()) <= 1
        spent += len(found)
    assert spent == num_wanted(made, BUDGET)


def test_set_cache_takes_the_longest_beginning_in_any_order() -> None:
    """Of two stored prompts: system B C loses to system A B, whose third document is not in the new one."""
    made = trial("moved")
    chosen = RULES["set-cache"].choose(made, 0.0)
    parts = made.scenario.prompt.parts
    assert chosen.copies is not None
    reused = {place for copy in chosen.copies for place in range(copy.target.start, copy.target.end)}
    assert reused == {*range(parts[0].start, parts[0].end), *range(parts[2].start, parts[3].end)}
    assert set(places(~chosen.rows)) == reused
    k, _ = placed_by_hand(made)
    moved_there = slice(parts[2].start, parts[3].end)
    placed = made.place(chosen.copies).k[:, moved_there]
    torch.testing.assert_close(placed, k[:, moved_there], atol=2e-5, rtol=0)
    found = made.run(chosen)
    assert found.charged == pytest.approx(1 - len(reused) / made.num_tokens)


def test_set_cache_stops_at_the_first_document_that_is_missing() -> None:
    """Behind a document that the new prompt has not, nothing is reused, and then it is a full prefill."""
    stored = prompt(SYSTEM, text(13, 30), A, B, QUESTION)
    made = make_trial(scenario([stored], prompt(SYSTEM, B, A, QUESTION)), llama(), SETTINGS)
    assert made is not None
    chosen = RULES["set-cache"].choose(made, 0.0)
    assert places(~chosen.rows) == list(range(len(SYSTEM)))
    assert divergence(made.truth, made.run(chosen).log_probabilities).kl <= 1e-6


def test_set_cache_reuses_a_beginning_in_another_order() -> None:
    """All of system A B C for system A C B: nothing but the question is computed."""
    stored = prompt(SYSTEM, A, B, C, text(14, 20))
    made = trial_of(scenario([stored, prompt(SYSTEM, C, A, text(15, 20))], prompt(SYSTEM, A, C, B, QUESTION)))
    chosen = RULES["set-cache"].choose(made, 0.0)
    assert places(~chosen.rows) == list(range(len(SYSTEM) + len(A) + len(B) + len(C)))
