"""Pairs of prompts for a chat model: the same form, filled in by two users."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import count
from typing import Any

from transformers import AutoTokenizer

from delta_tree import Span, TokenIds, token_ids
from kvshare.replay.workloads import generate

_MANY = 200  # filled-in forms
_SHORTEST = 16  # tokens that are worth a copy
_ALIKE = 0.5  # share of the second prompt that both have in common


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """`common`: spans of the prompt, and where each begins in the edited one."""

    prompt: TokenIds
    edited: TokenIds
    common: Sequence[tuple[Span, int]]


def form_pairs(model: str, max_tokens: int, *, seed: int) -> Iterator[Pair]:
    """Of forms of at most so many tokens, without end."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    for number in count():
        rows = generate("template", num_requests=_MANY, seed=1000 * (seed + 1) + number)
        texts = (
            tokenizer.apply_chat_template(list(row.messages), add_generation_prompt=True, tokenize=False)
            for row in rows
        )
        prompts = (token_ids(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
        waiting = [prompt for prompt in prompts if len(prompt) <= max_tokens]
        while waiting:
            prompt = waiting.pop(0)
            for place, other in enumerate(waiting):
                common = common_spans(prompt, other)
                if sum(len(span) for span, _ in common) >= _ALIKE * len(other):
                    yield Pair(prompt, waiting.pop(place), common)
                    break


def common_spans(prompt: TokenIds, edited: TokenIds) -> list[tuple[Span, int]]:
    """Equal stretches, in the same order in both; never the last token, which vLLM computes."""
    matcher = SequenceMatcher(None, prompt.tolist(), edited.tolist(), autojunk=False)
    found = []
    for block in matcher.get_matching_blocks():
        length = min(block.size, len(edited) - 1 - block.b)
        if length >= _SHORTEST:
            found.append((Span(block.a, block.a + length), block.b))
    return found
