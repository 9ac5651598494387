"""What the papers' prompts look like here: chunks in the user's message, each a paragraph of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from kvshare.bench.fidelity.papers.data import TEXTS, Asked, Pair
from kvshare.bench.fidelity.scenario import Draft, Messages, Scenario, tokenized
from kvshare.conversation.chat import Chat
from kvshare.engines.embedded.tokenizer import PromptEncoder
from kvshare.replay.requests import Message

_FEWEST_PASSAGES = 2
_SHARE = 0.6  # of the passages that each of two earlier prompts had
EXAMPLES = 5
QUESTIONS, PAIRS = TEXTS["questions"], TEXTS["pairs"]


@dataclass(frozen=True, slots=True)
class Wording:
    """How a pair is asked for, with `{text}` in it."""

    request: str

    @classmethod
    def of_translation(cls, languages: str) -> Wording:
        """Such as de-en."""
        source, target = (TEXTS["languages"][code] for code in languages.split("-"))
        return cls(PAIRS["translation"].format(source=source, target=target, text="{text}"))

    @classmethod
    def of_summary(cls) -> Wording:
        return cls(PAIRS["summary"])

    def turns(self, pair: Pair) -> Messages:
        """The request and its result."""
        return (self.asked(pair), {"role": "assistant", "content": pair.result})

    def asked(self, pair: Pair) -> Message:
        return {"role": "user", "content": self.request.format(text=pair.text)}


@dataclass(frozen=True, slots=True)
class Writer:
    """Puts prompts into words and cuts them to at most `longest` tokens."""

    encoder: PromptEncoder
    longest: int

    def passages(self, asked: Asked, most: int, draw: random.Random) -> list[str]:
        """At most so many as fit beside the longest question, the supporting ones first; then shuffled."""
        kept = list(asked.passages[:most])
        ending = QUESTIONS["statement"].format(question=asked.text, answer=asked.answers[0])
        while len(kept) > _FEWEST_PASSAGES and self._length(with_passages(kept, ending)) > self.longest:
            kept.pop()
        draw.shuffle(kept)
        return kept

    def few_shot(
        self, pairs: Sequence[Pair], number: int, wording: Wording
    ) -> tuple[list[Messages], Messages]:
        """The examples before the number-th pair, as many as fit, and the chat that asks for its result."""
        query = wording.asked(pairs[number])
        examples = [wording.turns(pair) for pair in pairs[max(0, number - EXAMPLES) : number]]
        while examples and self._length((*chain(*examples), query)) > self.longest:
            examples.pop(0)
        return examples, (*chain(*examples), query)

    def scenario(self, prompt: Messages, stored: Sequence[Messages], *, suite: str, number: int) -> Scenario:
        """In tokens."""
        draft = Draft(source=f"{suite}:{number}", stored=tuple(stored), prompt=prompt)
        return tokenized(draft, self.encoder, suite=suite, number=number)

    def _length(self, messages: Messages) -> int:
        return len(self.encoder.encode_chat(Chat(tuple(messages))).token_ids)


def paragraphs(*texts: str) -> Messages:
    """One message of the user."""
    return ({"role": "user", "content": "\n\n".join(texts)},)


def with_passages(passages: Sequence[str], ending: str) -> Messages:
    return paragraphs(QUESTIONS["intro"], *passages, ending)


def alone(passages: Sequence[str]) -> list[Messages]:
    """Each passage a prompt of its own."""
    return [paragraphs(QUESTIONS["intro"], passage) for passage in passages]


def earlier(passages: Sequence[str], others: Sequence[Asked], draw: random.Random) -> list[Messages]:
    """
    Two prompts with other questions that have these passages between them, in other places and company.

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
