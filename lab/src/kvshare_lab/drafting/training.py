"""
Trains a head until its time or its steps are over.

A row of a later draft reads what the head itself returned for the row before. So each sample is gone over
several times in a row, and every time but the first reads what the time before returned.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, smooth_l1_loss

from kvshare_lab.drafting.answers import Sample
from kvshare_lab.drafting.networks import Eagle3Head, Head

log = logging.getLogger(__name__)

NUM_DRAFTS = 3
_TIMES = 2  # that a sample is gone over
_BATCH = 4  # samples in a step
_WARM_STEPS = 20
_EVERY = 25  # steps between two rows of the log
_REGRESSION = 0.5  # weight of the loss of hidden states, of heads that imitate them
_PROMPT = 0.3  # weight of the loss over the prompt: what the model would have said there
_NOISE = 0.1  # added to hidden states, as a share of their deviation


@dataclass(frozen=True, slots=True)
class Limits:
    """
    `seconds`: of training; without them the same seed gives the same head. The rate falls to nothing by the
    end of whichever limit comes first.
    """

    steps: int
    seconds: float = math.inf
    peak_rate: float = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """
    The words that a head learns to tell apart.

    Shapes:  numbers (W,) ascending; rows (W, E) the model's; embeddings (V, E); weights (W,) for how many of
             the model's words each stands, as a logarithm
    """

    numbers: Tensor
    rows: Tensor
    embeddings: Tensor
    weights: Tensor | None = None

    def places(self, words: Tensor) -> Tensor:
        """Where each of these words stands among them; all must be there."""
        return torch.searchsorted(self.numbers, words)


class Vocabulary:
    """
    The words of a model. `used`: (U,) those that are among the likeliest ones, or in the text.

    A head that drafts with all of the model's words must learn not to say the others. A training step has
    some of them, drawn for it, which stand for all. (With the same 1,024 in each step, 57 % of the first
    drafts were right among these, and 27 % among all.)
    """

    def __init__(self, model: Any, samples: Sequence[Sample]) -> None:
        self.rows: Tensor = model.lm_head.weight.detach().float()
        self.embeddings: Tensor = model.model.embed_tokens.weight.detach().float()
        texts = [words for each in samples for words in (each.best, each.token_ids)]
        self.used: Tensor = torch.unique(torch.cat(texts))
        unused = torch.ones(len(self.rows), dtype=torch.bool)
        unused[self.used] = False
        self._unused = unused.nonzero().flatten()

    def words(self, others: int | None) -> Words:
        """Those that are used, with so many others; None: all."""
        count = len(self._unused)
        drawn = torch.randperm(count)[:others]
        numbers, order = torch.cat([self.used, self._unused[drawn]]).sort()
        weight = math.log(count / len(drawn)) if len(drawn) else 0.0
        weights = torch.cat([torch.zeros(len(self.used)), torch.full((len(drawn),), weight)])[order]
        return Words(numbers, self.rows[numbers], self.embeddings, weights)


def train(
    head: Head | Eagle3Head,
    samples: Sequence[Sample],
    held_out: Sequence[Sample],
    vocabulary: Vocabulary,
    limits: Limits,
    *,
    others: int,
) -> list[dict[str, float]]:
    """
    Returns rows of the log. `tokens_a_step` is what a step gives, by the held-out answers.

    `others`: words of a step besides those that are used; 0: the head has words of its own, the used ones
    """
    all_words = vocabulary.words(None if others else 0)
    optimizer = torch.optim.AdamW(head.parameters(), lr=limits.peak_rate, weight_decay=0.01)
    began, rows, step, losses = time.monotonic(), list[dict[str, float]](), 0, list[float]()
    while (share := max(step / limits.steps, (time.monotonic() - began) / limits.seconds)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = limits.peak_rate * min(1.0, (step + 1) / _WARM_STEPS) * (1 - share)
        optimizer.zero_grad()
        words = vocabulary.words(others)
        for number in torch.randint(len(samples), (_BATCH,)).tolist():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(head, samples[number], words) / _BATCH
            loss.backward()  # type: ignore[no-untyped-call]  # torch
            losses.append(_BATCH * float(loss.detach()))
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % _EVERY == 0:
            rows.append({"step": step, "loss": _mean(losses), **evaluated(head, held_out, all_words)})
            log.info("%s, after %.0f s", rows[-1], time.monotonic() - began)
            losses = []
    return [*rows, {"step": step, **evaluated(head, held_out, all_words)}]


def loss_of(head: Head | Eagle3Head, sample: Sample, words: Words) -> Tensor:
    """Of the drafts of all places, those of the prompt with less weight than those of the answer."""
    first, losses = sample.num_prompt - 1, list[Tensor]()
    targets, following = words.places(sample.best[1:]), sample.hidden[1:].float()
    weights = torch.full((len(targets),), _PROMPT)
    weights[first:] = 1.0
    for predicted in _passes(head, sample, words, _TIMES, noise=_NOISE):
        logits = head.logits(predicted, words.rows).float()
        if words.weights is not None:
            logits = logits + words.weights
        loss = cross_entropy(logits, targets, reduction="none")
        if isinstance(head, Head):
            loss = loss + _REGRESSION * smooth_l1_loss(predicted.float(), following, reduction="none").mean(
                dim=-1
            )
        losses.append((loss * weights).sum() / weights.sum())
    return torch.stack(losses).mean()


@torch.no_grad()
def evaluated(head: Head | Eagle3Head, held_out: Sequence[Sample], words: Words) -> dict[str, float]:
    """How many first drafts are right, and the tokens of a step: those accepted in a row, and one more."""
    first_right, in_a_row = list[float](), list[float]()
    for sample in held_out:
        begin = sample.num_prompt - 1
        best = sample.best[begin + 1 :]
        right = []
        for predicted in _passes(head, sample, words, NUM_DRAFTS):
            drafts = words.numbers[head.logits(predicted[begin:].float(), words.rows).argmax(dim=-1)]
            right.append((drafts == best).float())
        length = len(best) - NUM_DRAFTS + 1
        chain, total = torch.ones(length), torch.ones(length)
        for number, each in enumerate(right):
            chain = chain * each[number : number + length]
            total = total + chain
        first_right.append(float(right[0].mean()))
        in_a_row.append(float(total.mean()))
    return {"first_right": _mean(first_right), "tokens_a_step": _mean(in_a_row)}


def _passes(
    head: Head | Eagle3Head, sample: Sample, words: Words, times: int, *, noise: float = 0.0
) -> Iterator[Tensor]:
    """(T - 1, E) for each time: what words are predicted from, in the rows of all but the last token."""
    embedded = words.embeddings[sample.token_ids[1:]]
    read = [rows[:-1].float() for rows in (sample.hidden, sample.aux)]
    if noise:
        read = [rows + noise * rows.std() * torch.randn_like(rows) if rows.numel() else rows for rows in read]
    states = head.first_states(*read)
    for _ in range(times):
        predicted, returned = head(embedded, states)
        yield predicted
        states = torch.cat([states[:1], returned[:-1]])


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / max(1, len(values)), 3)
