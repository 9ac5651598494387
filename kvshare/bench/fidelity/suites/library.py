"""
One half of the source documents of scenarios: from a folder of published data sets, or the project's samples.

A source is identified by its content, so that a document is in the same half in every suite and data set. A
passage is in the half of the questions that it supports; if they are in both halves, in half 0.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Generic, TypeVar

from kvshare.bench.fidelity.scenario import SEED, Draft, half_of
from kvshare.bench.fidelity.suites.conversations import Conversation, conversation_of, in_turns
from kvshare.bench.fidelity.suites.questions import Asked, MarkedQuestion, marked_questions
from kvshare.bench.fidelity.texts import texts_beside
from kvshare.replay.workloads import sources
from kvshare.replay.workloads.generate import SAMPLES
from kvshare.replay.workloads.sources import Passage

T = TypeVar("T")
_SAMPLES = texts_beside(__file__, "samples.yaml")


@dataclass(frozen=True, slots=True)
class Source(Generic[T]):
    """A document and the name by which its half is drawn."""

    name: str
    item: T


@lru_cache(maxsize=50_000)
def name_of(kind: str, text: str) -> str:
    """The name of a document with this text, whatever its case and white space."""
    return f"{kind}:{hashlib.sha256(' '.join(text.lower().split()).encode()).hexdigest()[:12]}"


class Library:
    """The documents of one half, each kind in an order that is drawn once."""

    def __init__(self, folder: Path | None, half: int, log: Path | None = None) -> None:
        """`log`: a file of requests, for the suite of that name."""
        self._folder, self.half, self.log = folder, half, log
        self.drafts_of_log: Sequence[Draft] | None = None

    @cached_property
    def texts(self) -> Sequence[Source[str]]:
        """Prompt templates with slots, and other texts of one piece."""
        paths = self._paths(["prompts_chat/prompts.jsonl.gz"], "templates.jsonl")
        return self._half("text", sources.texts(paths), str)

    @cached_property
    def marked(self) -> Sequence[Source[MarkedQuestion]]:
        """Questions whose supporting passages are known."""
        names = ["musique_200.jsonl.gz", "musique_train_100.jsonl.gz", "2wikimqa_200.jsonl.gz"]
        paths = self._paths([f"rag_full_context/{name}" for name in names])
        found = marked_questions(paths) if paths else _sample_questions()
        return self._half("question", found, lambda question: question.whole.text)

    @cached_property
    def passages(self) -> Sequence[Source[Passage]]:
        """Documents that came with no question."""
        paths = self._paths(["rag_full_context/2wikimqa_corpus.jsonl.gz"], "tool_results.jsonl")
        found = sources.bare_passages(paths) + ([] if self._folder else _sample_passages())
        return self._half("passage", found, lambda passage: passage.text)

    @cached_property
    def conversations(self) -> Sequence[Source[Conversation]]:
        """Conversations of several turns, each message cut to its first sentences."""
        paths = self._paths(["sharegpt_en_1k/sharegpt_en.jsonl.gz"], "chats.jsonl")
        found = sources.chats(paths)
        found += [] if self._folder else [in_turns(said) for said in _SAMPLES["chats"]]
        chats = self._half("chat", found, lambda chat: chat[0]["content"])
        return [Source(chat.name, conversation_of(chat.item)) for chat in chats]

    def owns(self, passage: Passage) -> bool:
        """
        Whether this half may have that passage of a question in a prompt; never both halves may.

        The project's twelve sample passages refer to each other and are not divided.
        """
        if self._folder is None:
            return True
        name = name_of("passage", passage.text)
        return self._halves_of_supporting.get(name, half_of(name)) == self.half

    def may_ask(self, asked: Asked) -> bool:
        """Whether neither the question nor a passage that supports it belongs to the other half."""
        return name_of("question", asked.text) not in self._taken and all(map(self.owns, asked.supporting))

    @cached_property
    def _halves_of_supporting(self) -> Mapping[str, int]:
        """By the passage's name; passages that support questions of both halves are in half 0."""
        found: dict[str, int] = {}
        for half in (0, 1):
            for asked in self._questions_of(half):
                for passage in asked.supporting:
                    found.setdefault(name_of("passage", passage.text), half)
        return found

    @cached_property
    def _taken(self) -> frozenset[str]:
        """Names of the questions that only half 0 may ask."""
        return frozenset(name_of("question", each.text) for each in self._questions_of(0) if self.half)

    def _questions_of(self, half: int) -> list[Asked]:
        """Whole questions and their steps."""
        marked = self.marked if half == self.half else Library(self._folder, half).marked
        return [asked for source in marked for asked in (source.item.whole, *source.item.steps)]

    def own(self, items: Sequence[Source[T]]) -> list[Source[T]]:
        """The documents that are in this half, in an order that is drawn once."""
        chosen = [item for item in items if half_of(item.name) == self.half]
        random.Random(f"{SEED}:{self.half}:{len(items)}").shuffle(chosen)
        return chosen

    def _paths(self, names: Sequence[str], sample: str | None = None) -> list[Path]:
        """These files of the folder; without one, this file of the project's samples, if one is named."""
        if self._folder:
            return [self._folder / name for name in names]
        return [SAMPLES / sample] if sample else []

    def _half(self, kind: str, items: Iterable[T], identity: Callable[[T], str]) -> list[Source[T]]:
        """The documents of this half; one that comes twice counts once."""
        found: dict[str, T] = {}
        for item in items:
            found.setdefault(name_of(kind, identity(item)), item)
        return self.own([Source(name, item) for name, item in found.items()])


def _sample_passages() -> list[Passage]:
    return [Passage(title, text) for title, text in _SAMPLES["passages"].items()]


def _sample_questions() -> list[MarkedQuestion]:
    """Each with all passages that do not support it."""
    texts = {passage.title: passage for passage in _sample_passages()}
    found = []
    for row in _SAMPLES["questions"]:
        whole = Asked(row["question"], row["answer"], tuple(texts[title] for title in row["supporting"]))
        steps = [Asked(step["question"], step["answer"], (texts[step["passage"]],)) for step in row["steps"]]
        others = (passage for passage in texts.values() if passage not in whole.supporting)
        found.append(MarkedQuestion(whole, tuple(steps), tuple(others)))
    return found
