"""
One half of the source documents of scenarios: from a folder of published data sets, or the project's samples.

A source is identified by its content, so that a document is in the same half in every suite and data set. A
passage is in the half of the questions that it supports; if they are in both halves, in half 0. Documents are
used in turn, so that a number always gets the same one.
"""

import hashlib
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import cycle, dropwhile
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import yaml

from kvshare.logs.requests import Message
from kvshare.replay.workloads import SAMPLES, sources
from kvshare.replay.workloads.sources import Passage, objects
from kvshare_lab.fidelity.scenario import SEED, half_of

T = TypeVar("T")


def texts(name: str) -> Any:
    """What the YAML file of this name has, in the folder of the suites."""
    return yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text(encoding="utf-8"))


_SAMPLES = {kind: texts(f"samples/{kind}") for kind in ("passages", "questions", "chats")}
TEXTS = texts("conversations")
_RELATION = " >> "  # "Ulm >> country": how MuSiQue writes a question without words
_LONGEST = {"user": 320, "assistant": 700}  # characters of a message; a token has about four
_BREAK = re.compile(r"(?<=[.!?:;])\s+|\n+")
_SENTENCES = 3  # of a piece of news

Conversation = tuple[Message, ...]  # a user's message, the assistant's, and so on


@dataclass(frozen=True, slots=True)
class Source(Generic[T]):
    """A document and the name by which its half is drawn."""

    name: str
    item: T


class Asked(NamedTuple):
    """A question, its answer, and the passages that the answer follows from."""

    text: str
    answer: str
    supporting: tuple[Passage, ...]

    @property
    def name(self) -> str:
        return name_of("question", self.text)

    @property
    def is_answerable(self) -> bool:
        """Whether the answer is in one of the passages, or is yes or no."""
        answer = self.answer.lower()
        found = any(answer in f"{each.title}\n{each.text}".lower() for each in self.supporting)
        return bool(answer) and (found or self.is_yes_or_no)

    @property
    def is_yes_or_no(self) -> bool:
        return self.answer.lower() in ("yes", "no")


class MarkedQuestion(NamedTuple):
    """
    A question whose supporting passages are known.

    `steps`: the parts that can be asked alone, each with the one passage that answers it. `others`: passages
    that came with the question and support no answer.
    """

    whole: Asked
    steps: tuple[Asked, ...]
    others: tuple[Passage, ...]

    @property
    def all_asked(self) -> tuple[Asked, ...]:
        return self.whole, *self.steps


@lru_cache(maxsize=50_000)
def name_of(kind: str, text: str) -> str:
    """The name of a document with this text, whatever its case and white space."""
    return f"{kind}:{hashlib.sha256(' '.join(text.lower().split()).encode()).hexdigest()[:12]}"


def in_turn(items: Sequence[T], number: int) -> T:
    """Each as often as the others, in their order."""
    return items[number % len(items)]


def source_for(items: Sequence[T], number: int) -> T:
    """Each as often as the others, in another order each time round: labels do not depend on sources."""
    times_round, place = divmod(number, len(items))
    return random.Random(f"{SEED}:{times_round}").sample(items, len(items))[place]


def shuffled(items: Sequence[T], draw: random.Random) -> list[T]:
    """In another order, if there is one."""
    order = list(items)
    while order == list(items) and any(item != items[0] for item in items):
        draw.shuffle(order)
    return order


class Library:
    """The documents of one half, each kind in an order that is drawn once."""

    def __init__(self, folder: Path | None, half: int, log: Path | None = None) -> None:
        """`log`: a file of requests, for the suite of that name."""
        self._folder, self.half, self.log = folder, half, log

    @cached_property
    def texts(self) -> Sequence[Source[str]]:
        """Prompt templates with slots, and other texts of one piece."""
        paths = self._paths(["prompts_chat/prompts.jsonl.gz"], "templates.jsonl")
        return self._half("text", sources.texts(paths), str)

    @cached_property
    def marked(self) -> Sequence[Source[MarkedQuestion]]:
        """Questions that can be answered from their supporting passages."""
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

    @cached_property
    def foreign(self) -> Mapping[str, Sequence[Source[str]]]:
        """Pieces of news by language, of some sentences each; none without a folder."""
        if self._folder is None:
            return {}
        found = {}
        for language in ("de", "zh"):
            lines = [
                row["src"] for row in objects(self._paths([f"wmt19/newstest2019.{language}-en.jsonl.gz"]))
            ]
            pieces = [" ".join(lines[at : at + _SENTENCES]) for at in range(0, len(lines), _SENTENCES)]
            found[language] = self._half(language, pieces, str)
        return found

    def owns(self, passage: Passage) -> bool:
        """
        Whether this half may have that passage of a question in a prompt; never both halves may.

        The project's twelve sample passages refer to each other and are not divided.
        """
        if self._folder is None:
            return True
        name = name_of("passage", passage.text)
        return self._owners.get(name, half_of(name)) == self.half

    def may_ask(self, asked: Asked) -> bool:
        """Whether neither the question nor a passage that supports it belongs to the other half."""
        return self._owners.get(asked.name) == self.half and all(map(self.owns, asked.supporting))

    @cached_property
    def _owners(self) -> Mapping[str, int]:
        """The half of each question, step and supporting passage, by name; half 0 if it is in both."""
        found: dict[str, int] = {}
        for half in (0, 1):
            marked = self.marked if half == self.half else Library(self._folder, half).marked
            for asked in (asked for source in marked for asked in source.item.all_asked):
                for name in (asked.name, *(name_of("passage", each.text) for each in asked.supporting)):
                    found.setdefault(name, half)
        return found

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


def marked_questions(paths: Sequence[Path]) -> Iterator[MarkedQuestion]:
    """The rows with marked passages, without those that cannot be answered from them."""
    for row in objects(paths):
        if (found := marked_question(row)) and found.whole.is_answerable:
            yield found


def marked_question(row: Mapping[str, Any]) -> MarkedQuestion | None:
    """A row as MuSiQue or 2WikiMultihopQA publish it; None if it has no passages."""
    if "paragraphs" in row:
        passages = {each["idx"]: Passage(each["title"], each["paragraph_text"]) for each in row["paragraphs"]}
        marks = {each["idx"] for each in row["paragraphs"] if each["is_supporting"]}
    elif "context" in row:
        texts = (Passage(title, " ".join(sentences)) for title, sentences in row["context"])
        passages = dict(enumerate(texts))
        titles = {title for title, _ in row["supporting_facts"]}
        marks = {idx for idx, passage in passages.items() if passage.title in titles}
    else:
        return None
    parts = (
        Asked(_as_question(part["question"]), part["answer"], (passages[part["paragraph_support_idx"]],))
        for part in row.get("question_decomposition", ())
        if "#" not in part["question"] and part["paragraph_support_idx"] in passages
    )
    return MarkedQuestion(
        Asked(row["question"], row["answer"], tuple(passages[idx] for idx in sorted(marks))),
        tuple(part for part in parts if part.is_answerable),
        tuple(passage for idx, passage in passages.items() if idx not in marks),
    )


def _as_question(text: str) -> str:
    """`Ulm >> country` is asked as `Ulm: country?`; others get a capital and a question mark."""
    text = text.strip().replace(_RELATION, ": ")
    return f"{text[:1].upper()}{text[1:].rstrip('? ')}?"


def _sample_passages() -> list[Passage]:
    return [Passage(title, text) for title, text in _SAMPLES["passages"].items()]


def _sample_questions() -> Iterator[MarkedQuestion]:
    """Each with all passages that do not support it."""
    texts = {passage.title: passage for passage in _sample_passages()}
    for row in _SAMPLES["questions"]:
        whole = Asked(row["question"], row["answer"], tuple(texts[title] for title in row["supporting"]))
        steps = (Asked(step["question"], step["answer"], (texts[step["passage"]],)) for step in row["steps"])
        others = (passage for passage in texts.values() if passage not in whole.supporting)
        yield MarkedQuestion(whole, tuple(steps), tuple(others))


def in_turns(texts: Iterable[str]) -> Conversation:
    """Messages of the user and of the assistant in turns."""
    both = zip(cycle(_LONGEST), texts, strict=False)
    return tuple({"role": role, "content": text} for role, text in both)


def conversation_of(chat: Sequence[Message]) -> Conversation:
    """The chat from its first question until one role speaks twice in a row or a message is empty."""
    spoken = (message for message in chat if message["role"] != "system")
    said = dropwhile(lambda message: message["role"] != "user", spoken)
    texts = []
    for (role, longest), message in zip(cycle(_LONGEST.items()), said, strict=False):
        text = shortened(message["content"], longest)
        if message["role"] != role or not text:
            break
        texts.append(text)
    return in_turns(texts)


def shortened(text: str, longest: int) -> str:
    """As many whole sentences or lines as fit, or words where the first sentence is too long."""
    text = text.strip()
    if len(text) <= longest:
        return text
    ends = [match.start() for match in _BREAK.finditer(text, longest // 3, longest + 1)]
    if ends:
        return text[: ends[-1]].rstrip()
    return text[: longest + 1].rsplit(None, 1)[0][:longest]


def sentences(text: str) -> list[str]:
    """The text's sentences and lines of at least 20 characters."""
    return [part.strip() for part in _BREAK.split(text) if len(part.strip()) >= 20]
