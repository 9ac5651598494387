"""
The demo model's training data, as batches of token ids in stages from easy to real.

Repeated noise teaches copying. Slot lines repeated in another order teach to find a value by its label and
field. Questions about slot lines, then about whole forms, teach the task. Many questions follow one form as
turns of a conversation, so that the form is read once for many answers.
"""

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from kvshare_lab.demo_model.pairs import KINDS, ask, queries
from kvshare_lab.demo_model.sheets import MAX_RECORDS, REMARK, make_sheet, to_messages

NOISE_LENGTHS = (24, 48, 96)
TEXT_PLACES_PER_ROW = 24


@dataclass(frozen=True, slots=True)
class Stage:
    """The data of one stage of training, and when the next stage begins."""

    enough: float  # share of answer tokens that must be right before the next stage begins
    num_tokens: int  # of a batch, about; many small steps teach the first stages faster
    kind_weights: tuple[float, float, float] = (0.5, 0.3, 0.2)  # of the questions, in the order of KINDS
    noise: float = 0.0  # share of batches that are repeated random tokens
    recitals: float = 0.0  # share of batches that are slot lines written twice, in two orders
    whole_forms: float = 0.0  # share of the other batches with complete forms; the rest have only slot lines
    min_records: int = 1
    max_records: int = MAX_RECORDS
    num_questions: int = 20


STAGES = (
    Stage(0.85, 2048, noise=1.0),
    Stage(0.75, 4096, noise=0.3, recitals=0.7, max_records=2),
    Stage(0.85, 2048, (1.0, 0.0, 0.0), noise=0.05, recitals=0.1, max_records=1, num_questions=16),
    Stage(0.85, 4096, (0.6, 0.15, 0.25), recitals=0.05, max_records=3),
    Stage(0.93, 6144, (0.35, 0.45, 0.2), whole_forms=0.3, min_records=2, num_questions=24),
    Stage(1.0, 6144, (0.25, 0.45, 0.3), whole_forms=0.6),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids of one text, and the half-open spans of the answers that are learned in it."""

    ids: list[int]
    answers: list[tuple[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """
    Token ids and the places whose next token is learned.

    Shapes:  ids (B, T) int64; places are flat indices into B * T
    """

    ids: Tensor
    answer_places: Tensor
    text_places: Tensor


@cache
def slot_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """The tokens that slot lines are made of."""
    rng = random.Random("slot-tokens")
    sheets = [make_sheet(rng, num_records=MAX_RECORDS) for _ in range(200)]
    lines = {sheet.line(slot) for sheet in sheets for slot in sheet.slots if slot.field != REMARK}
    return tuple(sorted({token for line in lines for token in tokenizer.encode(line)}))


def noise(rng: random.Random, tokenizer: PreTrainedTokenizerFast, *, length: int) -> Row:
    """
    Short runs of random tokens, then the same runs in another order.

    The rest of a run can be predicted only by finding the earlier run and copying it. The order must
    change: at a fixed distance the model would learn the distance instead.
    """
    tokens = rng.sample(slot_tokens(tokenizer), length // 2)
    ids, answers, runs = list(tokens), [], []
    while tokens:
        size = min(len(tokens), rng.randint(3, 8))
        runs.append(tokens[:size])
        del tokens[:size]
    for run in rng.sample(runs, len(runs)):
        if len(run) > 1:  # nothing predicts the first token of a run
            answers.append((len(ids) + 1, len(ids) + len(run)))
        ids += run
    return Row(ids, answers)


def recite(rng: random.Random, tokenizer: PreTrainedTokenizerFast, *, num_records: int) -> Row:
    """The slot lines of a sheet, then again in another order: the second values are learned."""
    sheet = make_sheet(rng, num_records=num_records)
    slots = [slot for slot in sheet.slots if slot.field != REMARK]
    ids = [int(tokenizer.bos_token_id)]
    answers: list[tuple[int, int]] = []
    for again in (False, True):
        for slot in rng.sample(slots, len(slots)):
            value = f" {sheet.value(slot)}"
            before, _, after = sheet.line(slot).partition(value)
            ids += tokenizer.encode(before)
            start = len(ids)
            ids += tokenizer.encode(value)
            if again:
                answers.append((start, len(ids)))
            ids += tokenizer.encode(f"{after}\n")
    return Row(ids, answers)


def converse(
    rng: random.Random,
    tokenizer: PreTrainedTokenizerFast,
    stage: Stage,
    *,
    num_records: int,
    whole_form: bool,
) -> Row:
    """A form and a chain of different questions about it; each answer is learned with its end token."""
    sheet = make_sheet(rng, num_records=num_records)
    questions = {}
    for _ in range(stage.num_questions):
        kind = rng.choices(KINDS, stage.kind_weights)[0]
        question = ask(rng, sheet, kind=kind if queries(sheet, kind) else "lookup")
        questions[question.query] = question
    first, *others = questions.values()
    messages = to_messages(sheet, first.text)
    if not whole_form:  # slot lines only, shuffled, so that records differ by their labels alone
        lines = [sheet.line(slot) for slot in sheet.slots if slot.field != REMARK]
        rng.shuffle(lines)
        messages[1]["content"] = "\n".join([*lines, "", first.text])
    messages.append({"role": "assistant", "content": first.answer})
    for question in others:
        messages.append({"role": "user", "content": question.text})
        messages.append({"role": "assistant", "content": question.answer})
    ids: Any = tokenizer.apply_chat_template(messages, return_dict=False)  # a list of int
    assistant = tokenizer.convert_tokens_to_ids("<|assistant|>")
    starts = [index + 1 for index, token in enumerate(ids) if token == assistant]
    return Row(ids, [(start, ids.index(tokenizer.eos_token_id, start) + 1) for start in starts])


def next_batch(rng: random.Random, tokenizer: PreTrainedTokenizerFast, stage: Stage) -> Batch:
    """A batch of that stage; rows have the same number of records, so that little is padded."""
    kind = rng.random()
    whole = rng.random() < stage.whole_forms
    length = rng.choice(NOISE_LENGTHS)
    # The larger of two draws: sheets with many records are the harder ones.
    records = max(rng.randint(stage.min_records, stage.max_records) for _ in range(2))
    rows: list[Row] = []
    while not rows or (len(rows) + 1) * max(len(row.ids) for row in rows) <= stage.num_tokens:
        if kind < stage.noise:
            row = noise(rng, tokenizer, length=length)
        elif kind < stage.noise + stage.recitals:
            row = recite(rng, tokenizer, num_records=records)
        else:
            row = converse(rng, tokenizer, stage, num_records=records, whole_form=whole)
        rows.append(row)
    num_text_places = 0 if kind < stage.noise else TEXT_PLACES_PER_ROW
    return _pack(rng, rows, int(tokenizer.pad_token_id), num_text_places)


def _pack(rng: random.Random, rows: list[Row], pad: int, num_text_places: int) -> Batch:
    """The rows, padded to one width; `num_text_places` random positions of each are learned, too."""
    ids = pad_sequence([torch.tensor(row.ids) for row in rows], batch_first=True, padding_value=pad)
    answers: list[int] = []
    text: list[int] = []
    for index, row in enumerate(rows):
        base = index * ids.shape[1] - 1  # the place before a token predicts it
        answers.extend(base + place for start, end in row.answers for place in range(start, end))
        text.extend(base + rng.randrange(1, len(row.ids)) for _ in range(num_text_places))
    return Batch(ids, torch.tensor(answers), torch.tensor(text, dtype=torch.int64))
