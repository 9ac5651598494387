"""What a head learns from: the end of each prompt, its answer, and what the model computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from kvshare.demo import MODEL_PATH
from kvshare_lab.drafting.answers import Answered, Sample, answered, form_prompts, read_answers, write_answers
from lab.tests.drafting.conftest import NUM_ANSWER


def test_answers_are_greedy_ones_and_prompts_are_cut(llama: Any, learned: Sequence[Sample]) -> None:
    """Each word of an answer is the likeliest one after what is before it."""
    for sample in learned:
        assert sample.num_prompt == 6
        assert len(sample.token_ids) == 6 + NUM_ANSWER
        assert sample.aux.shape == (len(sample.token_ids), 3 * sample.hidden.shape[1])
        assert torch.equal(sample.best[5:-1], sample.token_ids[6:])


def test_prompts_of_a_batch_do_not_see_each_other(llama: Any) -> None:
    """Shorter ones are padded."""
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12, 13]]
    together = answered(llama, prompts, 5)
    assert together == [answered(llama, [each], 5)[0] for each in prompts]


def test_answers_are_read_as_they_were_written(tmp_path: Path) -> None:
    answers = [Answered((1, 2, 3), 2), Answered((4,), 1)]
    write_answers(answers, tmp_path / "answers")
    assert read_answers(tmp_path / "answers") == answers


def test_prompts_are_forms_that_fit() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    prompts = form_prompts(tokenizer, 3, longest=900, seed=1)
    assert [len(each) <= 900 for each in prompts] == [True] * 3
    assert prompts == form_prompts(tokenizer, 3, longest=900, seed=1)
    with pytest.raises(ValueError, match="0 forms have at most 10 tokens, 2 are wanted"):
        form_prompts(tokenizer, 2, longest=10, seed=1)
