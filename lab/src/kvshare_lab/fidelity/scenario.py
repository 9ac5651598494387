"""
Stored prompts and a new one, as messages (`Draft`) and as tokens (`Scenario`).

A prompt's parts are its documents, messages and paragraphs; papers on retrieved text call them chunks. They
are found in the rendered text, at blank lines and ChatML's borders, so that a suite only writes messages.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from delta_tree import Span, TokenIds, token_ids
from kvshare.conversation.chat import Chat
from kvshare.embedded.tokenizer import PromptEncoder
from kvshare.logs.requests import Message

SEED = 20261122  # decides the halves and every scenario: with another one, old and new rows would be mixed
INSTRUMENT = 3  # version of suites, rules and measures: rows of different ones are not mixed
_SHORTEST_PART = 12  # tokens; a shorter part is joined to the next one
_BREAK = re.compile(r"\n\s*\n|<\|im_start\|>")

Messages = tuple[Message, ...]


def half_of(source: str) -> int:
    """The half of a document: rules are chosen on half 0; half 1 is opened once, for the result."""
    return hashlib.sha256(f"{SEED}:{source}".encode()).digest()[0] & 1


def chat_of(texts: Mapping[str, str], parts: Mapping[str, str | int]) -> Messages:
    """A system message and a user's: these texts, by role, with the parts filled in."""
    return tuple({"role": role, "content": texts[role].format_map(parts)} for role in ("system", "user"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """
    One scenario in words.

    `candidates`: answers to rank, the right one first; of an edited prompt, the second was right before the
    edit. `expected`: what an exact answer must contain. `reordered`: the prompt with its parts in another
    order, where the order does not change the meaning. `stages`: of chains, the prompts between the stored
    one and the new one, oldest first.
    """

    source: str  # the source document, by which the half is drawn
    stored: tuple[Messages, ...]
    prompt: Messages
    labels: Mapping[str, str | int] = field(default_factory=dict)  # what the report groups by
    candidates: tuple[str, ...] = ()
    expected: str | None = None
    reordered: Messages | None = None
    stages: tuple[Messages, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt's tokens and the parts that cover them, ascending."""

    token_ids: TokenIds  # (T,) int32
    parts: tuple[Span, ...]

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def contents(self) -> list[bytes]:
        """The tokens of each part; equal parts have equal contents."""
        return [self.token_ids[part.start : part.end].tobytes() for part in self.parts]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scenario:
    """One scenario in tokens; `Draft` describes the fields."""

    suite: str
    number: int
    source: str
    labels: Mapping[str, str | int]
    stored: tuple[Prompt, ...]
    prompt: Prompt
    candidates: tuple[TokenIds, ...]
    expected: str | None
    reordered: Prompt | None
    stages: tuple[Prompt, ...]


def tokenized(draft: Draft, encoder: PromptEncoder, *, suite: str, number: int) -> Scenario:
    """The scenario of a draft, as this tokenizer and chat template write it."""
    return Scenario(
        suite=suite,
        number=number,
        source=draft.source,
        labels=draft.labels,
        stored=tuple(tokenized_prompt(messages, encoder) for messages in draft.stored),
        prompt=tokenized_prompt(draft.prompt, encoder),
        candidates=tuple(
            token_ids(encoder.backend.encode(text, add_special_tokens=False).ids) for text in draft.candidates
        ),
        expected=draft.expected,
        reordered=None if draft.reordered is None else tokenized_prompt(draft.reordered, encoder),
        stages=tuple(tokenized_prompt(messages, encoder) for messages in draft.stages),
    )


def tokenized_prompt(messages: Messages, encoder: PromptEncoder) -> Prompt:
    """A prompt as this tokenizer and chat template write it; a short part is joined to what follows."""
    text = encoder.render_chat(Chat(tuple(messages)))
    encoding = encoder.backend.encode(text, add_special_tokens=False)
    breaks = (match.end() if match[0].isspace() else match.start() for match in _BREAK.finditer(text))
    starts, num_tokens = [0], len(encoding.ids)
    for first in np.searchsorted([start for start, _ in encoding.offsets], sorted(breaks)).tolist():
        if first - starts[-1] >= _SHORTEST_PART and first < num_tokens:
            starts.append(first)
    parts = tuple(Span(start, end) for start, end in pairwise([*starts, num_tokens]))
    return Prompt(token_ids(encoding.ids), parts)
