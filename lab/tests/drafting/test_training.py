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
from kvshare_lab.drafting.training import NUM_DRAFTS, Limits, evaluated, train, words_of


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_what_it_has_learned_become_right(kind: str, llama: Any, learned: Sequence[Sample]) -> None:
    """A step gives at least its own token, and at most the drafts in addition."""
    torch.manual_seed(1)
    words = words_of(llama, learned, others=0, seed=1)
    head = head_of(kind, llama, words.numbers)
    before = evaluated(head, learned, words)
    rows = train(head, learned, learned, words, Limits(steps=60, peak_rate=1e-2))
    assert rows[-1]["step"] == 60
    assert rows[-1]["first_right"] > before["first_right"]
    assert 1 <= before["tokens_a_step"] < rows[-1]["tokens_a_step"] <= 1 + NUM_DRAFTS


def test_training_ends_by_the_clock(llama: Any, learned: Sequence[Sample]) -> None:
    words = words_of(llama, learned, others=0, seed=1)
    (row,) = train(head_of("eagle", llama, words.numbers), learned, learned[:1], words, Limits(10**6, 1e-9))
    assert row["step"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_head(kind: str, llama: Any, learned: Sequence[Sample]) -> None:
    words = words_of(llama, learned, others=5, seed=1)
    assert torch.equal(words.numbers, words_of(llama, learned, others=5, seed=1).numbers)
    weights = []
    for _ in range(2):
        torch.manual_seed(2)
        head = head_of(kind, llama, words.numbers)
        train(head, learned, learned[:1], words, Limits(3))
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
    words = words_of(llama, learned, others=0, seed=1).numbers
    write(kind, head_of(kind, llama, words), words, tmp_path / "llama", tmp_path / "head")
    weights = load_file(tmp_path / "head" / "model.safetensors")
    assert name in weights
    if kind == "eagle3":
        assert torch.equal(torch.arange(len(words)) + weights["d2t"], words)
        assert len(weights["lm_head.weight"]) == len(words)
