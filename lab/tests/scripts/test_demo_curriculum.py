"""What the demo model is shown in training, and which tokens count."""

import random

import pytest
from transformers import PreTrainedTokenizerFast

from demo_curriculum import STAGES, Stage, converse, next_batch, noise, recite
from kvshare.demo import MODEL_PATH

tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL_PATH)


def test_noise_repeats_its_runs_in_another_order() -> None:
    """The second half has the tokens of the first, but no fixed distance leads to them."""
    one = noise(random.Random(1), tokenizer, length=96)
    first, second = one.ids[:48], one.ids[48:]
    assert sorted(first) == sorted(second)
    assert len({second.index(token) - first.index(token) for token in first}) > 1


def test_noise_counts_only_what_copying_predicts() -> None:
    """Within a learned span every token follows the same token as it did before."""
    one = noise(random.Random(2), tokenizer, length=96)
    for start, end in one.answers:
        for place in range(start, end):
            earlier = one.ids.index(one.ids[place])
            assert one.ids[earlier - 1] == one.ids[place - 1]


def test_recital_counts_the_second_values() -> None:
    """The learned spans are values that stand on an earlier line."""
    one = recite(random.Random(3), tokenizer, num_records=2)
    for start, end in one.answers:
        value = tokenizer.decode(one.ids[start:end])
        assert value in tokenizer.decode(one.ids[: one.answers[0][0]])


@pytest.mark.parametrize("whole_form", [True, False])
def test_conversation_marks_its_answers(whole_form: bool) -> None:
    """Each learned span is one answer with its end token, behind the assistant's token."""
    stage = Stage(1.0, 2048, num_questions=8)
    chat = converse(random.Random(4), tokenizer, stage, num_records=3, whole_form=whole_form)
    assistant = tokenizer.convert_tokens_to_ids("<|assistant|>")
    assert sum(token == assistant for token in chat.ids) == len(chat.answers)
    for start, end in chat.answers:
        assert chat.ids[start - 1] == assistant
        assert chat.ids[end - 1] == tokenizer.eos_token_id
        assert end - start <= 4


def test_batch_places_predict_the_answers() -> None:
    """The tokens after the answer places are the answers, each up to its end token."""
    batch = next_batch(random.Random(5), tokenizer, STAGES[-1])
    ids = batch.ids.flatten().tolist()
    assistant = tokenizer.convert_tokens_to_ids("<|assistant|>")
    expected = []
    for start in (index + 1 for index, token in enumerate(ids) if token == assistant):
        expected += ids[start : ids.index(tokenizer.eos_token_id, start) + 1]
    assert [ids[place + 1] for place in batch.answer_places.tolist()] == expected


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_fills_its_batches(stage: Stage) -> None:
    """A batch holds about as many tokens as its stage asks for."""
    batch = next_batch(random.Random(6), tokenizer, stage)
    assert 0.5 * stage.num_tokens <= batch.ids.numel() <= 1.1 * stage.num_tokens
