"""A head of each kind learns the answers of a tiny Llama."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvshare_lab.drafting.answers import Sample
from kvshare_lab.drafting.checkpoints import write
from kvshare_lab.drafting.networks import KINDS, head_of
from kvshare_lab.drafting.training import NUM_DRAFTS, Limits, Vocabulary, evaluated, train


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_what_it_has_learned_become_right(kind: str, llama: Any, learned: Sequence[Sample]) -> None:
    """A step gives at least its own token, and at most the drafts in addition."""
    torch.manual_seed(1)
    vocabulary, others = Vocabulary(llama, learned), 0 if kind == "eagle3" else 8
    head = head_of(kind, llama, vocabulary.used)
    before = evaluated(head, learned, vocabulary.words(None if others else 0))
    rows = train(head, learned, learned, vocabulary, Limits(steps=120, peak_rate=1e-2), others=others)
    assert rows[-1]["step"] == 120
    assert rows[-1]["first_right"] > before["first_right"]
    assert 1 <= before["tokens_a_step"] < rows[-1]["tokens_a_step"] <= 1 + NUM_DRAFTS


def test_training_ends_by_the_clock(llama: Any, learned: Sequence[Sample]) -> None:
    vocabulary = Vocabulary(llama, learned)
    head, limits = head_of("eagle", llama, vocabulary.used), Limits(10**6, 1e-9)
    (row,) = train(head, learned, learned[:1], vocabulary, limits, others=0)
    assert row["step"] == 0


def test_drawn_words_stand_for_all_that_are_not_used(llama: Any, learned: Sequence[Sample]) -> None:
    vocabulary = Vocabulary(llama, learned)
    num_used, num_all = len(vocabulary.used), len(vocabulary.rows)
    some, every = vocabulary.words(5), vocabulary.words(None)
    assert some.weights is not None
    assert len(some.numbers) == num_used + 5
    assert torch.equal(some.numbers[some.places(vocabulary.used)], vocabulary.used)
    assert float(some.weights.exp().sum()) == pytest.approx(num_all)
    assert torch.equal(every.numbers, torch.arange(num_all))
    assert every.weights is not None
    assert not every.weights.any()


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_head(kind: str, llama: Any, learned: Sequence[Sample]) -> None:
    vocabulary, weights = Vocabulary(llama, learned), []
    for _ in range(2):
        torch.manual_seed(2)
        head = head_of(kind, llama, vocabulary.used)
        train(head, learned, learned[:1], vocabulary, Limits(3), others=0 if kind == "eagle3" else 5)
        weights.append(head.weights())
    assert all(torch.equal(rows, weights[1][name]) for name, rows in weights[0].items())


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("eagle", "fc.weight"),
        ("eagle3", "midlayer.hidden_norm.weight"),
        ("mtp", "model.mtp_block.0.input_layernorm.weight"),
    ],
)
def test_a_head_is_written_for_vllm(
    kind: str, name: str, llama: Any, learned: Sequence[Sample], tmp_path: Path
) -> None:
    """An EAGLE3 head drafts some words only, and says which."""
    llama.save_pretrained(tmp_path / "llama")
    words = Vocabulary(llama, learned).used
    write(kind, head_of(kind, llama, words), words, tmp_path / "llama", tmp_path / "head")
    weights = load_file(tmp_path / "head" / "model.safetensors")
    assert name in weights
    if kind == "eagle3":
        assert torch.equal(torch.arange(len(words)) + weights["d2t"], words)
        assert len(weights["lm_head.weight"]) == len(words)
