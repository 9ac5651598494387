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
        names = ["prompts_chat/prompts.jsonl.gz"]
        return self._half("text", sources.texts, names, "templates.jsonl", str)

    @cached_property
    def questions(self) -> Sequence[Source[Question]]:
        """Questions with their passages and answers: MuSiQue and 2WikiMultihopQA."""
        names = ["rag_cacheblend/musique_s.jsonl.gz", "rag_cacheblend/wikimqa_s_clean.jsonl.gz"]
        names += ["rag_full_context/musique_200.jsonl.gz", "rag_full_context/2wikimqa_200.jsonl.gz"]
        return self._half("question", sources.questions, names, "questions.jsonl", lambda found: found.text)

    @cached_property
    def passages(self) -> Sequence[Source[Passage]]:
        """Documents of no question."""
        names = ["rag_full_context/2wikimqa_corpus.jsonl.gz"]
        return self._half(
            "passage", sources.bare_passages, names, "tool_results.jsonl", lambda found: found.text
        )

    @cached_property
    def chats(self) -> Sequence[Source[tuple[Message, ...]]]:
        """Conversations of several turns."""
        names = ["sharegpt_en_1k/sharegpt_en.jsonl.gz"]
        return self._half("chat", sources.chats, names, "chats.jsonl", lambda found: found[0]["content"])

    def own(self, items: Sequence[Source[T]]) -> list[Source[T]]:
        """Those of these documents that are in this half, in an order drawn once."""
        chosen = [item for item in items if half_of(item.name) == self.half]
        random.Random(f"{SEED}:{self.half}:{len(items)}").shuffle(chosen)
        return chosen

    def _half(
        self,
        kind: str,
        read: Callable[[Sequence[Path]], Iterable[T]],
        names: Sequence[str],
        sample: str,
        identity: Callable[[T], str],
    ) -> list[Source[T]]:
        """What is read from the data sets or the sample; a document that comes twice is one."""
        paths = [self._folder / name for name in names] if self._folder else [SAMPLES / sample]
        found: dict[str, T] = {}
        for item in read(paths):
            digest = hashlib.sha256(" ".join(identity(item).lower().split()).encode()).hexdigest()
            found.setdefault(f"{kind}:{digest[:12]}", item)
        return self.own([Source(name, item) for name, item in found.items()])
