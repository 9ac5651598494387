"""Greedy answers behind the KV of a prompt, a token of each answer in every pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from delta_tree import TokenIds, token_ids
from kvshare.bench.fidelity.layered import LayeredModel, Pass
from kvshare.kv.sequence import SequenceKV

Start = tuple[SequenceKV, torch.Tensor]
"""KV (L, >= T, H, D) of a prompt of T tokens, and log-probabilities (V,) of the answer's first token."""


def greedy_answers(
    model: LayeredModel, starts: Sequence[Start], *, num_tokens: int, limit: int
) -> list[TokenIds]:
    """
    An answer of at most `limit` tokens behind each start, all of prompts of `num_tokens` tokens.

        slots  [start 0: prompt, answer][start 1: prompt, answer] ...   a row sees the slots of its own start

    An end token is part of its answer. A pass mostly costs reading the weights, so a few answers together
    take less time than one after another. The given KV is not changed.
    """
    room = num_tokens + limit
    kv = model.model.new_sequence(len(starts) * room)
    for own in (kv.k, kv.v):
        own.zero_()  # slots that no row sees must be numbers all the same
    for number, (given, _) in enumerate(starts):
        prompt = slice(number * room, number * room + num_tokens)
        kv.k[:, prompt], kv.v[:, prompt] = given.k[:, :num_tokens], given.v[:, :num_tokens]
    answers = [[int(first.argmax())] for _, first in starts]
    eos, slots = model.model.eos_token_ids(None), np.arange(kv.capacity)[None, :]
    for length in range(1, limit):
        going = [number for number, answer in enumerate(answers) if answer[-1] not in eos]
        if not going:
            break
        begins = np.array(going) * room
        last = begins + num_tokens + length - 1
        current = Pass(
            token_ids([answers[number][-1] for number in going]),
            last,
            positions=last - begins,
            visible=(begins[:, None] <= slots) & (slots <= last[:, None]),
        )
        rows = model.run(kv, current, logits_of=np.arange(len(going)))
        for number, token in zip(going, rows.argmax(dim=-1).tolist(), strict=True):
            answers[number].append(token)
    return [token_ids(answer) for answer in answers]


def greedy_answer(
    model: LayeredModel, kv: SequenceKV, first: torch.Tensor, *, num_tokens: int, limit: int
) -> TokenIds:
    """The same behind a single prompt."""
    return greedy_answers(model, [(kv, first)], num_tokens=num_tokens, limit=limit)[0]
