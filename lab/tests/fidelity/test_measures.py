"""How far apart two answers are, by hand."""

import math

import numpy as np
import pytest
import torch

from delta_tree import Span, token_ids
from kvshare.kv.attention import PartialPass
from kvshare_lab.fidelity.layered import greedy_answers
from kvshare_lab.fidelity.measures import (
    agreement,
    divergence,
    jaccard,
    margin,
    rouge_l,
    rounded,
    text_scores,
    token_f1,
)
from kvshare_lab.fidelity.rules import RULES
from lab.tests.fidelity.scenes import llama, text, trial


def test_divergence_of_two_distributions() -> None:
    """KL(full || arm) in nats, mean over positions and of the first; the share of equal first choices."""
    truth = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    found = torch.tensor([[0.25, 0.625, 0.125], [0.1, 0.8, 0.1]]).log()
    first = 0.5 * math.log(2) + 0.25 * math.log(0.4) + 0.25 * math.log(2)
    difference = divergence(truth, found)
    assert difference.kl == pytest.approx(first / 2)
    assert difference.kl_first == pytest.approx(first)
    assert difference.top1 == 0.5
    assert difference.as_document() == {"kl": rounded(first / 2), "kl_first": rounded(first), "top1": 0.5}
    same = divergence(truth, truth)
    assert (same.kl, same.kl_first, same.top1) == (0.0, 0.0, 1.0)
    # it is no distance: the other way round is another figure
    skewed = torch.tensor([[0.9, 0.05, 0.05]]).log()
    assert divergence(truth[:1], skewed).kl != pytest.approx(divergence(skewed, truth[:1]).kl, rel=0.1)


def test_the_margin_is_over_the_best_wrong_candidate() -> None:
    """Positive where the right one, the first, leads."""
    assert margin([-1.0, -3.0, -1.5]) == pytest.approx(0.5)
    assert margin([-2.0, -3.0, -1.5]) == pytest.approx(-0.5)


def test_figures_have_five_digits() -> None:
    """Small ones too."""
    assert rounded(0.000012345678) == 0.000012346
    assert rounded(123456.0) == 123460.0


def test_agreement_is_place_by_place() -> None:
    """The share of equal tokens of the longer answer, and where the two part."""
    assert agreement(token_ids([1, 2, 3, 4]), token_ids([1, 2, 9, 4])) == {
        "agree": 0.75,
        "first": 2,
        "equal": 0,
    }
    assert agreement(token_ids([1, 2]), token_ids([1, 2])) == {"agree": 1.0, "first": 2, "equal": 1}
    assert agreement(token_ids([1, 2, 3, 4]), token_ids([1, 2])) == {"agree": 0.5, "first": 2, "equal": 0}
    assert agreement(token_ids([5]), token_ids([6])) == {"agree": 0.0, "first": 0, "equal": 0}


def test_words_in_common() -> None:
    """F1 counts a word as often as it comes, Jaccard once; neither cares for case."""
    assert token_f1("the red red house", "The red car") == pytest.approx(
        2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4)
    )
    assert token_f1("a b", "c") == 0.0
    assert (token_f1("", ""), token_f1("a", ""), token_f1("", "a")) == (1.0, 0.0, 0.0)
    assert jaccard("the red red house", "The red car") == pytest.approx(2 / 4)
    assert (jaccard("", ""), jaccard("a", "")) == (1.0, 0.0)


def test_scores_of_texts_are_between_nothing_and_one() -> None:
    """BLEU and ROUGE-L beside the words in common, by hand; equal answers score 1 however short."""
    for same in ("one two three four", "one two", "yes"):
        assert text_scores(same, same) == {"bleu": 1.0, "rouge_l": 1.0, "f1": 1.0, "jaccard": 1.0}
    found = text_scores("one two three four", "two one three")
    assert found["rouge_l"] == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4), abs=1e-5)
    assert found["f1"] == pytest.approx(2 * 1.0 * (3 / 4) / (1.0 + 3 / 4), abs=1e-5)
    assert 0 < found["bleu"] < 1
    # of five words four are right in a row, and so are 3 of 4 pairs, 2 of 3 triples, 1 of 2 fours
    expected = (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
    assert text_scores("a b c d e", "a b c d x")["bleu"] == pytest.approx(expected, abs=1e-5)
    assert rouge_l("alpha", "beta") == 0.0


def test_a_free_answer_is_the_engines_greedy_one() -> None:
    """Token by token, each a pass of the product; the sequence it starts from is not changed."""
    model, tokens, size = llama(), text(70, 60), 60
    kv = model.model.new_sequence(size + 12)
    last = model.model.compute(PartialPass(kv, (Span(0, size),)), tokens)
    kv.k[:, size:] = 0.0
    before = kv.k.clone()
    start = (kv, torch.log_softmax(last, dim=-1))
    (found,) = greedy_answers(model, [start], num_tokens=size, limit=12)
    assert torch.equal(kv.k, before)
    expected = []
    for place in range(size, size + 12):
        expected.append(int(last.argmax()))
        last = model.model.compute(PartialPass(kv, (Span(place, place + 1),)), token_ids(expected[-1:]))
    assert found.tolist() == expected


def test_an_arm_answers_from_its_own_kv() -> None:
    """Behind repairs at 100 % as full prefill does, behind none it parts from it."""
    made = trial("front")
    start = (made.full.kv, made.full.first)
    (full,) = greedy_answers(made.model, [start], num_tokens=made.num_tokens, limit=24)
    assert np.array_equal(full[: len(made.answer)], made.answer)
    for name, budget, is_equal in (("epic", 1.0, 1), ("placeholders", 0.0, 0)):
        done = made.run(RULES[name].choose(made, budget))
        start = (done.kv, done.log_probabilities[0])
        (found,) = greedy_answers(made.model, [start], num_tokens=made.num_tokens, limit=24)
        assert agreement(full, found)["equal"] == is_equal
