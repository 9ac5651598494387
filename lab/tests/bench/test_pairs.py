"""Pairs of prompts: what they are made of, and that answers are compared as they came over HTTP."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from kvshare.demo import MODEL_PATH
from kvshare.errors import ConfigError, EngineError
from kvshare_lab.bench.pair_texts import REORDERED, make_pairs
from kvshare_lab.bench.pairs import Answer, Compared, candidates_kl, run


def test_pairs_are_drawn_by_seed_and_differ() -> None:
    """The kinds of edit take turns; the same seed gives the same pairs."""
    pairs = make_pairs(None, edits=5, reordered=4, seed=3)
    assert pairs == make_pairs(None, edits=5, reordered=4, seed=3)
    assert pairs != make_pairs(None, edits=5, reordered=4, seed=4)
    assert all(pair.stored != pair.asked for pair in pairs)
    kinds = Counter(pair.kind for pair in pairs)
    assert len(kinds) == 7
    assert sum(kinds[kind] for kind in REORDERED) == 4


def test_reordered_passages_are_the_same_passages() -> None:
    """Only their order changes, and in every fourth pair the question."""
    pairs = make_pairs(None, edits=0, reordered=4, seed=1)
    for pair in pairs:
        stored, asked = (
            messages[-1]["content"].split("\n\nQuestion:") for messages in (pair.stored, pair.asked)
        )
        assert sorted(stored[0].split("\n\n")) == sorted(asked[0].split("\n\n"))
        assert stored[0] != asked[0]
        assert (stored[1] == asked[1]) == (pair.kind == REORDERED[0])
    assert [pair.kind for pair in pairs] == [REORDERED[0]] * 3 + [REORDERED[1]]


def test_too_few_texts_are_said() -> None:
    with pytest.raises(ConfigError, match=r"--data: .*own samples suffice for \d+ pairs; .* 500 \+ 0"):
        make_pairs(None, edits=500, reordered=0, seed=0)


FULL = Answer((b"a", b"b", b"c"), ({b"a": -0.1}, {b"b": -0.5, b"x": -1.5}, {b"c": -0.1}), 100, 0, "off")


def test_answers_are_compared_up_to_the_first_difference() -> None:
    """And there it is said how much more the full prefill liked its own token."""
    same = Compared("values", replace(FULL, decision="approx"), FULL)
    other = Compared("values", replace(FULL, tokens=(b"a", b"x", b"c"), decision="approx"), FULL)
    assert (same.is_equal, same.agreement(16), same.lead) == (True, 1.0, None)
    assert (other.is_equal, other.num_equal) == (False, 1)
    assert other.agreement(16) == pytest.approx(1 / 3)
    assert other.agreement(1) == 1
    assert other.lead == pytest.approx(1.0)
    assert FULL.closest == pytest.approx(1.0)
    shorter = Compared("values", replace(FULL, tokens=(b"a", b"b")), FULL)
    assert (shorter.is_equal, shorter.lead) == (False, None)


def test_divergence_of_listed_candidates() -> None:
    """By hand: two candidates and the rest as a third; what only one of them lists belongs to the rest."""
    full = {b"a": math.log(0.5), b"b": math.log(0.3), b"c": math.log(0.1)}
    shared = {b"a": math.log(0.4), b"b": math.log(0.4), b"d": math.log(0.1)}
    expected = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4) + 0.2 * math.log(0.2 / 0.2)
    assert candidates_kl(full, shared) == pytest.approx(expected)
    assert candidates_kl(full, full) == pytest.approx(0)


async def test_a_model_that_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    """The benchmark does not wait for a server that will never be ready."""
    with pytest.raises(EngineError, match="the server did not start"):
        await run(model=str(tmp_path / "nothing"), edits=1, reordered=0)


@pytest.mark.skipif(not MODEL_PATH.exists(), reason="the demo model has not been built")
async def test_pairs_are_asked_over_http() -> None:
    """Shares are counted, every kind has its figures, and without deviation answers are equal."""
    found = await run(model="demo", edits=2, reordered=1, answer_tokens=4)
    assert found["all_edits"]["pairs"] == 2
    assert found["all_reordered"]["pairs"] == 1
    assert set(found["by_kind"]) == {"values", "header", "reordered"}
    exact = await run(model="demo", edits=2, reordered=1, answer_tokens=4, max_deviation=0.0)
    for figures in (exact["all_edits"], exact["all_reordered"]):
        assert (figures["approximate"], figures["equal"]) == (0, 1)
