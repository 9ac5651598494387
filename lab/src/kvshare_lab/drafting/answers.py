"""A model's greedy answers to filled-in forms, and what a head learns from them."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from kvshare.replay.workloads import generate

log = logging.getLogger(__name__)

_BATCH = 16
_MANY = 6  # forms for each prompt that is wanted, as some are too long


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt's tokens with those of its answer, and how many of them are the prompt's."""

    token_ids: tuple[int, ...]
    num_prompt: int


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """
    What a head learns from: the end of a prompt, and its answer.

    Shapes:  token_ids (T,); hidden (T, E) what the model returns; aux (T, 3E) of three of its layers, or
             (T, 0); best (T,) the likeliest next word
    """

    token_ids: Tensor
    hidden: Tensor
    aux: Tensor
    best: Tensor
    num_prompt: int


def form_prompts(tokenizer: Any, number: int, *, longest: int, seed: int) -> list[list[int]]:
    """Filled-in forms of at most `longest` tokens. Raises ValueError if there are too few."""
    rows = generate("template", num_requests=_MANY * number, seed=seed)
    texts = (
        tokenizer.apply_chat_template(list(row.messages), add_generation_prompt=True, tokenize=False)
        for row in rows
    )
    each = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    short = [tokens for tokens in each if len(tokens) <= longest][:number]
    if len(short) < number:
        raise ValueError(f"{len(short)} forms have at most {longest} tokens, {number} are wanted")
    return short


@torch.no_grad()
def answered(model: Any, prompts: Sequence[list[int]], num_tokens: int) -> list[Answered]:
    """The greedy answers, which go on after the model would end them, as those of benchmarks do."""
    found = []
    ordered = sorted(prompts, key=len)
    settings = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    for first in range(0, len(ordered), _BATCH):
        batch = ordered[first : first + _BATCH]
        longest = max(map(len, batch))
        ids = torch.tensor([[0] * (longest - len(each)) + each for each in batch])
        mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in batch])
        whole = model.generate(ids, attention_mask=mask, generation_config=settings)
        for row, prompt in zip(whole.tolist(), batch, strict=True):
            found.append(Answered(tuple(row[longest - len(prompt) :]), len(prompt)))
        log.info("%d of %d prompts are answered", len(found), len(ordered))
    return found


@torch.no_grad()
def samples(
    model: Any, answers: Sequence[Answered], *, context: int, aux_layers: Sequence[int] = ()
) -> list[Sample]:
    """
    What the model computes for each, without all but the last `context` tokens of the prompt.

    `aux_layers`: the numbers of layers before which hidden states are taken
    """
    found = []
    for each in answers:
        tokens = torch.tensor(each.token_ids)
        output = model.model(tokens[None], output_hidden_states=bool(aux_layers))
        hidden = output.last_hidden_state[0]
        begin = max(0, each.num_prompt - context)
        states = [output.hidden_states[layer][0, begin:] for layer in aux_layers]
        found.append(
            Sample(
                tokens[begin:],
                hidden[begin:].clone(),
                torch.cat(states, dim=-1) if states else hidden.new_zeros(len(tokens) - begin, 0),
                model.lm_head(hidden[begin:]).argmax(dim=-1),
                each.num_prompt - begin,
            )
        )
    return found


def write_answers(answers: Sequence[Answered], path: Path) -> None:
    lines = (json.dumps({"prompt": each.num_prompt, "tokens": each.token_ids}) for each in answers)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_answers(path: Path) -> list[Answered]:
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [Answered(tuple(row["tokens"]), row["prompt"]) for row in rows]
