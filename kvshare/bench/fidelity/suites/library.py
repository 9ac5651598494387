"""
The source documents that scenarios are made of, one half of them: from a folder of published data sets, or
the project's own samples.

Sources are known by their content, so that a document is in the same half in every suite and data set.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

from kvshare.bench.fidelity.scenario import SEED, half_of
from kvshare.bench.fidelity.suites import samples
from kvshare.bench.fidelity.suites.questions import MarkedQuestion, marked_questions
from kvshare.bench.fidelity.suites.talks import Talk, talk_of
from kvshare.replay.requests import Message
from kvshare.replay.workloads import sources
from kvshare.replay.workloads.generate import SAMPLES
from kvshare.replay.workloads.sources import Passage, Question

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Source(Generic[T]):
    """A document and what halves know it by."""

    name: str
    item: T


class Library:
    """The documents of one half, each kind in an order drawn once."""

    def __init__(self, folder: Path | None, half: int) -> None:
        self._folder, self.half = folder, half

    @cached_property
    def texts(self) -> Sequence[Source[str]]:
        """Prompt templates with slots, and other texts of one piece."""
        paths = self._paths(["prompts_chat/prompts.jsonl.gz"], "templates.jsonl")
        return self._half("text", sources.texts(paths), str)

    @cached_property
    def questions(self) -> Sequence[Source[Question]]:
        """Questions with their passages and answers: MuSiQue and 2WikiMultihopQA."""
        names = ["rag_cacheblend/musique_s.jsonl.gz", "rag_cacheblend/wikimqa_s_clean.jsonl.gz"]
        names += ["rag_full_context/musique_200.jsonl.gz", "rag_full_context/2wikimqa_200.jsonl.gz"]
        found = sources.questions(self._paths(names, "questions.jsonl"))
        return self._half("question", found, lambda question: question.text)

    @cached_property
    def marked(self) -> Sequence[Source[MarkedQuestion]]:
        """Questions whose supporting passages are known."""
        names = ["musique_200.jsonl.gz", "musique_train_100.jsonl.gz", "2wikimqa_200.jsonl.gz"]
        paths = self._paths([f"rag_full_context/{name}" for name in names])
        found = marked_questions(paths) if paths else samples.marked_questions()
        return self._half("question", found, lambda question: question.whole.text)

    @cached_property
    def passages(self) -> Sequence[Source[Passage]]:
        """Documents of no question."""
        paths = self._paths(["rag_full_context/2wikimqa_corpus.jsonl.gz"], "tool_results.jsonl")
        found = sources.bare_passages(paths) + ([] if self._folder else samples.passages())
        return self._half("passage", found, lambda passage: passage.text)

    @cached_property
    def chats(self) -> Sequence[Source[tuple[Message, ...]]]:
        """Conversations of several turns."""
        paths = self._paths(["sharegpt_en_1k/sharegpt_en.jsonl.gz"], "chats.jsonl")
        found = sources.chats(paths) + ([] if self._folder else samples.chats())
        return self._half("chat", found, lambda chat: chat[0]["content"])

    @cached_property
    def talks(self) -> Sequence[Source[Talk]]:
        """The same conversations, each message cut to its first sentences."""
        return [Source(chat.name, talk_of(chat.item)) for chat in self.chats]

    def own(self, items: Sequence[Source[T]]) -> list[Source[T]]:
        """Those of these documents that are in this half, in an order drawn once."""
        chosen = [item for item in items if half_of(item.name) == self.half]
        random.Random(f"{SEED}:{self.half}:{len(items)}").shuffle(chosen)
        return chosen

    def _paths(self, names: Sequence[str], sample: str | None = None) -> list[Path]:
        """These files of the folder; without one, this file of the project's samples, if any is named."""
        if self._folder:
            return [self._folder / name for name in names]
        return [SAMPLES / sample] if sample else []

    def _half(self, kind: str, items: Iterable[T], identity: Callable[[T], str]) -> list[Source[T]]:
        """Those of this half; a document that comes twice is one."""
        found: dict[str, T] = {}
        for item in items:
            digest = hashlib.sha256(" ".join(identity(item).lower().split()).encode()).hexdigest()
            found.setdefault(f"{kind}:{digest[:12]}", item)
        return self.own([Source(name, item) for name, item in found.items()])
