"""Rules that look at places alone, against positions found by hand."""

from functools import cache

import numpy as np
import pytest

from delta_tree import Span
from kvshare.sharing.repair_choice import highest, spans_where
from kvshare_lab.fidelity.rules import RULES, attention, cachecraft, deviation, structural
from kvshare_lab.fidelity.rules.base import chunks, cut, heads, pieces
from kvshare_lab.fidelity.rules.structural import server_windows
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
    placed_by_hand,
    places,
    prompt,
    replaced,
    scenario,
    text,
    trial,
    trial_of,
)

S, LA, LB, LC = len(SYSTEM), len(A), len(B), len(C)
# of "moved": system C A B question
C_AT, A_AT, B_AT, QUESTION_AT = S, S + LC, S + LC + LA, S + LC + LA + LB
# of "edited": system A B C question, three tokens replaced in A and in B
AFTER_ONE, AFTER_TWO = S + 20 + 3, S + LA + 30 + 3


def chosen(made: Trial, name: str, budget: float) -> list[int]:
    rows = RULES[name].choose(made, budget).rows
    assert rows.ndim == 1
    return places(rows)


def budget_of(made: Trial, count: int) -> float:
    return count / made.num_tokens


def test_heads_are_dealt_out_evenly() -> None:
    """One a stretch and turn; short stretches end early; ends are counted backwards."""
    spans = [Span(0, 2), Span(5, 10), Span(12, 20)]
    assert places(heads(spans, 20, 7)) == [0, 1, 5, 6, 7, 12, 13]
    assert places(heads(spans, 20, 8)) == [0, 1, 5, 6, 7, 12, 13, 14]
    assert places(heads(spans, 20, 7, from_end=True)) == [0, 1, 7, 8, 9, 18, 19]
    assert places(heads(spans, 20, 99)) == [0, 1, *range(5, 10), *range(12, 20)]
    assert places(heads([], 20, 5)) == []


def test_highest_are_the_allowed_ones_with_the_best_scores() -> None:
    """Of equals the first; nothing that is not allowed."""
    scores = np.array([3.0, 9.0, 3.0, 1.0, 3.0])
    allowed = np.array([True, False, True, True, True])
    assert places(highest(scores, allowed, 2)) == [0, 2]
    assert places(highest(scores, allowed, 9)) == [0, 2, 3, 4]


def test_runs_of_true_can_be_cut() -> None:
    """Cuts outside a run or at its edges change nothing."""
    mask = np.array([1, 1, 0, 1, 1, 1, 0, 1], np.bool_)
    assert spans_where(mask) == [Span(0, 2), Span(3, 6), Span(7, 8)]
    assert cut(mask, [5, 4, 3, 2, 0]) == [Span(0, 2), Span(3, 4), Span(4, 5), Span(5, 6), Span(7, 8)]
    assert spans_where(np.zeros(4, np.bool_)) == []


def test_pieces_come_from_one_place_and_chunks_from_one_part() -> None:
    """An edit separates pieces, a new document separates chunks."""
    made = trial("edited")
    end = made.num_tokens - TAIL
    assert pieces(made) == [Span(AFTER_ONE, AFTER_TWO - 3), Span(AFTER_TWO, end)]
    assert chunks(made) == [
        Span(AFTER_ONE, S + LA),
        Span(S + LA, AFTER_TWO - 3),
        Span(AFTER_TWO, S + LA + LB),
        Span(S + LA + LB, S + LA + LB + LC),
        Span(S + LA + LB + LC, end),
    ]
    other = trial("moved")
    assert pieces(other) == [Span(C_AT, A_AT), Span(A_AT, QUESTION_AT)]  # A B stand so in the first prompt
    assert chunks(other) == [Span(C_AT, A_AT), Span(A_AT, B_AT), Span(B_AT, QUESTION_AT)]


def test_epic_takes_the_heads_of_chunks() -> None:
    """Equally many of each of three; a first chunk that came from elsewhere is repaired last."""
    made = trial("moved")
    heads_of = [*range(C_AT, C_AT + 4), *range(A_AT, A_AT + 4), *range(B_AT, B_AT + 4)]
    assert chosen(made, "epic", budget_of(made, 12)) == heads_of
    other = trial("front")
    assert chosen(other, "epic", budget_of(other, 6)) == [*range(LB, LB + 3), *range(LB + LA, LB + LA + 3)]
    behind = range(LB, LB + LA + LC)
    assert chosen(other, "epic", budget_of(other, len(behind) + 5)) == [*range(5), *behind]


def test_edit_windows_stand_behind_edits() -> None:
    """Two edits, a contiguous window behind each."""
    made = trial("edited")
    windows = [*range(AFTER_ONE, AFTER_ONE + 11), *range(AFTER_TWO, AFTER_TWO + 11)]
    assert chosen(made, "edit-windows", budget_of(made, 22)) == windows


@cache
def long_trial() -> Trial:
    """600 tokens behind an edit."""
    long = text(20, 600)
    stored = prompt(SYSTEM, long, QUESTION)
    return trial_of(scenario([stored], prompt(SYSTEM, replaced(long, 0), QUESTION)), 2)


def test_block_ends_are_the_last_tokens_of_256() -> None:
    """Blocks are counted from where a copy begins; the last one ends where the prompt's own end begins."""
    made = long_trial()
    start, end = S + 3, made.num_tokens - TAIL
    assert pieces(made) == [Span(start, end)]
    ends = [start + 256, start + 512, end]
    assert chosen(made, "block-ends", budget_of(made, 12)) == [
        place for block in ends for place in range(block - 4, block)
    ]


def test_vlcache_takes_the_first_ones_of_each_layer() -> None:
    """In proportion to the relative deviation of V from this layer on; the sum is the budget's."""
    made = trial("moved")
    _, placed = placed_by_hand(made)
    true = made.full.kv.v[:, : made.num_tokens]
    known = ~made.placeholders
    relative = [
        float((found - copied)[known].norm() / copied.norm())
        for found, copied in zip(true, placed, strict=True)
    ]
    left = np.array([sum(relative[layer:]) for layer in range(made.num_layers)])
    rows = RULES["vlcache"].choose(made, 0.1).rows
    count = round(0.1 * made.num_tokens)
    expected = left / left.sum() * count * made.num_layers
    found = rows.sum(axis=1)
    assert found.sum() == count * made.num_layers
    np.testing.assert_allclose(found, expected, atol=1.01)
    assert found[-1] < found[0]
    for layer, number in enumerate(found):
        assert places(rows[layer]) == places(heads(pieces(made), made.num_tokens, number))


def test_vlcache_spends_what_full_layers_leave() -> None:
    """No layer can have more than what is copied; the others get the rest."""
    made = trial("edited")
    budget = 0.9 * made.copied.sum() / made.num_tokens
    counts = RULES["vlcache"].choose(made, budget).rows.sum(axis=1)
    assert counts[0] == made.copied.sum()
    assert counts.sum() == round(budget * made.num_tokens) * made.num_layers
    assert list(counts) == sorted(counts, reverse=True)


def test_the_default_is_the_servers_repair_set() -> None:
    """24 tokens behind an edit in place, 16 at the head of what moved by more than a tenth."""
    made = trial("edited")
    window, head = SETTINGS.repair.edit_window, SETTINGS.repair.relocated_head
    allowed = SETTINGS.repair.max_budget * made.num_tokens
    assert 2 * window <= allowed
    expected = [*range(AFTER_ONE, AFTER_ONE + window), *range(AFTER_TWO, AFTER_TWO + window)]
    assert chosen(made, "default", 0.0) == expected
    assert chosen(made, "default-512", 0.0) == expected
    other = trial("moved")
    assert min(LC, LB) > other.num_tokens // 10
    heads_of = [*range(C_AT, C_AT + head), *range(A_AT, A_AT + head)]  # B goes on behind A
    assert chosen(other, "default", 0.0) == heads_of
    # C, moved by less than 512, counts as edited; A follows text of another prompt
    assert chosen(other, "default-512", 0.0) == [*range(C_AT, C_AT + window), *range(A_AT, A_AT + head)]
    assert places(server_windows(other, max_small_shift=0).rows) == heads_of


def test_arms_without_a_budget() -> None:
    """Nothing, everything, everything behind the exact prefix, and the parts that were edited."""
    made = trial("edited")
    assert chosen(made, "placeholders", 0.0) == []
    assert chosen(made, "prefix", 0.0) == places(made.copied)
    full = RULES["full"].choose(made, 0.0)
    assert full.rows.all()
    assert full.copies == ()
    edited = [part for part in made.scenario.prompt.parts if part.start < AFTER_ONE <= part.end]
    edited += [part for part in made.scenario.prompt.parts if part.start < AFTER_TWO <= part.end]
    whole = {place for part in edited for place in range(part.start, part.end)}
    assert chosen(made, "full-reuse", 0.0) == sorted(whole & {*places(made.copied)})


def test_random_is_drawn_once_for_a_plan_and_a_budget() -> None:
    """The same again, and no rule of place."""
    made = trial("moved")
    found = chosen(made, "random", 0.1)
    assert found == chosen(made, "random", 0.1)
    assert set(found) <= set(places(made.copied))
    assert not set(found) <= set(chosen(made, "random", 0.2))
    thirds = np.array_split(places(made.copied), 3)
    assert all(set(third) & set(found) for third in thirds)


@pytest.mark.parametrize("name", sorted(RULES))
def test_rules_say_what_they_are(name: str) -> None:
    """Each has a title; what is our reading of a description ("after ...") has its source."""
    rule = RULES[name]
    assert rule.name == name
    assert rule.title
    assert rule.source or not rule.title.startswith("after ")


def test_rules_yaml_names_every_way_to_choose() -> None:
    """A function without a row would never run."""
    modules = (structural, deviation, attention, cachecraft)
    assert set(RULES) == {name for module in modules for name in module.CHOICES}


def test_best_of_the_tests_is_highest() -> None:
    """The tests' own way to choose agrees on scores without ties."""
    scores = np.random.default_rng(0).random(30)
    allowed = scores > 0.2
    assert best(scores, allowed, 7) == places(highest(scores, allowed, 7))
