"""
Training batches as tensors, and the running score of the answers in them.

Owns padding and the choice of the positions that are learned from. A batch holds about the
same number of tokens whatever the length of its rows.
"""

import random
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvshare.demo.curriculum import Conversation, Stage, converse, noise, recite

NOISE_LENGTHS = (24, 48, 96)
TEXT_PLACES_PER_ROW = 24


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """
    Token ids and the places whose next token is learned.

    Shapes:  ids (B, T) int64; places are flat indices into B * T, and `answer_places` holds
             the answers of `spans` one after the other
    """

    ids: Tensor
    answer_places: Tensor
    text_places: Tensor
    spans: tuple[tuple[str, int], ...]
    """Kind and number of tokens of each answer."""


class Scores:
    """Losses and exact answers, added up until they are taken."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = defaultdict(list)

    def add(self, batch: Batch, right: Tensor, answer_loss: float, text_loss: float) -> None:
        """Count a batch; `right` says for each answer token whether it was predicted."""
        self._sums["loss"].append(answer_loss)
        self._sums["text_loss"].append(text_loss)
        start = 0
        for kind, length in batch.spans:
            self._sums[kind].append(float(right[start : start + length].all()))
            start += length

    def take(self) -> dict[str, float]:
        """The means since the last call."""
        means = {name: sum(values) / len(values) for name, values in self._sums.items()}
        self._sums.clear()
        return means


def next_batch(
    rng: random.Random,
    tokenizer: PreTrainedTokenizerFast,
    stage: Stage,
    *,
    num_records: int | None = None,
) -> Batch:
    """A batch of that stage; rows have the same number of records, so that little is padded."""
    kind = rng.random()
    is_noise = kind < stage.noise
    is_recital = kind < stage.noise + stage.recitals
    whole = rng.random() < stage.whole_forms
    length = rng.choice(NOISE_LENGTHS)
    # The larger of two draws: sheets with many records are the harder ones.
    records = num_records or max(rng.randint(stage.min_records, stage.max_records) for _ in range(2))
    rows: list[Conversation] = []
    while not rows or (len(rows) + 1) * max(len(row.ids) for row in rows) <= stage.num_tokens:
        if is_noise:
            row = noise(rng, tokenizer, length=length)
        elif is_recital:
            row = recite(rng, tokenizer, num_records=records)
        else:
            row = converse(rng, tokenizer, stage, num_records=records, whole_form=whole)
        rows.append(row)
    return _pack(rng, rows, int(tokenizer.pad_token_id))


def _pack(rng: random.Random, rows: list[Conversation], pad: int) -> Batch:
    width = max(len(row.ids) for row in rows)
    answers: list[int] = []
    text: list[int] = []
    spans: list[tuple[str, int]] = []
    for index, row in enumerate(rows):
        base = index * width - 1  # the place before a token predicts it
        for kind, start, end in row.answers:
            answers.extend(range(base + start, base + end))
            spans.append((kind, end - start))
        if not row.is_noise:
            text.extend(base + rng.randrange(1, len(row.ids)) for _ in range(TEXT_PLACES_PER_ROW))
    ids = torch.tensor([row.ids + [pad] * (width - len(row.ids)) for row in rows])
    return Batch(ids, torch.tensor(answers), torch.tensor(text, dtype=torch.int64), tuple(spans))
