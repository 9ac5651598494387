"""What the demo model is shown in training, and which tokens count."""

import random

import pytest

from kvshare.demo import MODEL_PATH
from kvshare.demo.batches import Scores, next_batch
from kvshare.demo.curriculum import STAGES, Stage, converse, noise, recite
from kvshare.demo.tokenizer import load_tokenizer

tokenizer = load_tokenizer(MODEL_PATH)


def test_noise_repeats_its_runs_in_another_order() -> None:
    """The second half has the tokens of the first, but no fixed distance leads to them."""
    one = noise(random.Random(1), tokenizer, length=96)
    first, second = one.ids[:48], one.ids[48:]
    assert sorted(first) == sorted(second)
    assert len({second.index(token) - first.index(token) for token in first}) > 1


def test_noise_counts_only_what_copying_predicts() -> None:
    """Within a learned span every token follows the same token as it did before."""
    one = noise(random.Random(2), tokenizer, length=96)
    for _, start, end in one.answers:
        for place in range(start, end):
            earlier = one.ids.index(one.ids[place])
            assert one.ids[earlier - 1] == one.ids[place - 1]


def test_recital_counts_the_second_values() -> None:
    """The learned spans are values that stand on an earlier line."""
    one = recite(random.Random(3), tokenizer, num_records=2)
    for _, start, end in one.answers:
        value = tokenizer.decode(one.ids[start:end])
        assert value in tokenizer.decode(one.ids[: one.answers[0][1]])


@pytest.mark.parametrize("whole_form", [True, False])
def test_conversation_marks_its_answers(whole_form: bool) -> None:
    """Each learned span is one answer with its end token, behind the assistant's token."""
    stage = Stage(enough=1.0, num_questions=8)
    chat = converse(random.Random(4), tokenizer, stage, num_records=3, whole_form=whole_form)
    assistant = tokenizer.convert_tokens_to_ids("<|assistant|>")
    assert sum(token == assistant for token in chat.ids) == len(chat.answers)
    for _, start, end in chat.answers:
        assert chat.ids[start - 1] == assistant
        assert chat.ids[end - 1] == tokenizer.eos_token_id
        assert end - start <= 4


def test_batch_places_predict_the_answers() -> None:
    """The token after each answer place is the answer, row by row."""
    batch = next_batch(random.Random(5), tokenizer, STAGES[-1])
    targets = batch.ids.flatten()[batch.answer_places + 1].tolist()
    assert sum(length for _, length in batch.spans) == len(targets)
    start = 0
    for _, length in batch.spans:
        assert targets[start + length - 1] == tokenizer.eos_token_id
        start += length


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_fills_its_batches(stage: Stage) -> None:
    """A batch holds about as many tokens as its stage asks for."""
    batch = next_batch(random.Random(6), tokenizer, stage)
    assert 0.5 * stage.num_tokens <= batch.ids.numel() <= 1.1 * stage.num_tokens


def test_scores_count_an_answer_only_when_all_of_it_is_right() -> None:
    """One wrong token makes the answer wrong."""
    batch = next_batch(random.Random(7), tokenizer, STAGES[2])
    right = batch.answer_places >= 0
    right[0] = False
    scores = Scores()
    scores.add(batch, right, 1.0, 2.0)
    figures = scores.take()
    kind, wrong_share = batch.spans[0][0], 1 / sum(k == batch.spans[0][0] for k, _ in batch.spans)
    assert figures[kind] == pytest.approx(1 - wrong_share)
    assert scores.take() == {}
