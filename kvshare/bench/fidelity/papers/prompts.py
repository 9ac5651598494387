"""The prompts of the papers' tables: chunks in the user's message, each a paragraph of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from kvshare.bench.fidelity.papers.data import TEXTS, Asked, Pair
from kvshare.bench.fidelity.scenario import Draft, Messages, Scenario, tokenized
from kvshare.conversation.chat import Chat
from kvshare.engines.embedded.tokenizer import PromptEncoder

_FEWEST_PASSAGES = 2
_SHARE = 0.6  # of the passages that each of two earlier prompts had
EXAMPLES = 5
QUESTIONS, _PAIRS = TEXTS["questions"], TEXTS["pairs"]
SUMMARY: str = _PAIRS["summary"]  # a request with `{text}` in it


def translation(languages: str) -> str:
    """The request for a translation such as de-en, with `{text}` in it."""
    source, target = (TEXTS["languages"][code] for code in languages.split("-"))
    request: str = _PAIRS["translation"].format(source=source, target=target, text="{text}")
    return request


@dataclass(frozen=True, slots=True)
class Writer:
    """Puts prompts into words and cuts them to at most `longest` tokens."""

    encoder: PromptEncoder
    longest: int

    def passages(self, asked: Asked, most: int, draw: random.Random) -> list[str]:
        """The first passages, at most `most`, as many as fit with the longest question; shuffled."""
        chosen = list(asked.passages[:most])
        ending = QUESTIONS["statement"].format(question=asked.text, answer=asked.answers[0])
        while len(chosen) > _FEWEST_PASSAGES and self._length(with_passages(chosen, ending)) > self.longest:
            chosen.pop()
        draw.shuffle(chosen)
        return chosen

    def few_shot(self, pairs: Sequence[Pair], number: int, request: str) -> tuple[list[Messages], Messages]:
        """As many pairs before the number-th as fit, as examples, and the chat that asks for its result."""
        query = paragraphs(request.format(text=pairs[number].text))
        examples: list[Messages] = [
            (*paragraphs(request.format(text=pair.text)), {"role": "assistant", "content": pair.result})
            for pair in pairs[max(0, number - EXAMPLES) : number]
        ]
        while examples and self._length((*chain(*examples), *query)) > self.longest:
            examples.pop(0)
        return examples, (*chain(*examples), *query)

    def scenario(self, prompt: Messages, stored: Sequence[Messages], *, suite: str, number: int) -> Scenario:
        """The scenario of these prompts, in tokens."""
        draft = Draft(source=f"{suite}:{number}", stored=tuple(stored), prompt=prompt)
        return tokenized(draft, self.encoder, suite=suite, number=number)

    def _length(self, messages: Messages) -> int:
        return len(self.encoder.encode_chat(Chat(tuple(messages))).token_ids)


def paragraphs(*texts: str) -> Messages:
    """One message of the user."""
    return ({"role": "user", "content": "\n\n".join(texts)},)


def with_passages(passages: Sequence[str], ending: str) -> Messages:
    """The passages between the introduction and the question."""
    return paragraphs(QUESTIONS["intro"], *passages, ending)


def alone(passages: Sequence[str]) -> list[Messages]:
    """A prompt for each passage."""
    return [paragraphs(QUESTIONS["intro"], passage) for passage in passages]


def earlier(passages: Sequence[str], others: Sequence[Asked], draw: random.Random) -> list[Messages]:
    """
    Two prompts with other questions that together have all of these passages, in other places.

    Each has the larger half of them, and passages of its own question instead of the rest.
    """
    order = draw.sample(passages, len(passages))
    share = max(1, round(_SHARE * len(order)))
    found = []
    for part, other in zip((order[:share], order[-share:]), others, strict=True):
        own = [passage for passage in other.passages if passage not in passages]
        mixed = [*part, *own[: len(order) - share]]
        draw.shuffle(mixed)
        found.append(with_passages(mixed, QUESTIONS["short"].format(question=other.text)))
    return found
