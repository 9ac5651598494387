"""
The material of workloads: texts, passages and chats from source files, and random values from words.yaml.

It reads the published forms of the data sets and skips rows that do not fit.
"""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvshare.logs import ReadReport, RowFault, read_file
from kvshare.logs.files import raw_rows
from kvshare.logs.requests import Message
from kvshare.tables import read_table

_TEXT_FIELDS = ("prompt", "text", "query", "question", "instruction", "section_text", "dialogue")
_T = TypeVar("_T")
WORDS: Mapping[str, Any] = read_table(Path(__file__).with_name("words.yaml"))
PLACES: Sequence[str] = WORDS["places"]
PRODUCTS: Sequence[str] = WORDS["products"]
TOPICS: Sequence[str] = WORDS["topics"]


@dataclass(frozen=True, slots=True)
class WorkloadRow:
    """One line of the file; `id` and `timestamp` are set last, by `generate`."""

    id: str = field(default="", kw_only=True)  # unique in the file
    conversation: str  # equal in all requests of a conversation
    turn: int  # counts up within the conversation; later ones need not extend earlier ones
    user: str
    timestamp: float = field(default=0.0, kw_only=True)  # seconds since the first could have come; never less
    messages: tuple[Message, ...]  # the whole body of a chat completion request
    answer: str | None = None  # where the source has one

    def to_json(self) -> str:
        """The fields are the keys, in their order."""
        document = {name: value for name, value in asdict(self).items() if value or name != "answer"}
        return json.dumps(document, ensure_ascii=False)


class Passage(NamedTuple):
    """A document, or a piece of one."""

    title: str
    text: str


class Question(NamedTuple):
    """A question, its passages, and the first accepted answer."""

    text: str
    passages: tuple[Passage, ...]
    answer: str | None = None


def objects(paths: Sequence[Path]) -> Iterator[Mapping[str, Any]]:
    """Yield every readable JSON object of the files, in order."""
    for path in paths:
        for _, row in raw_rows(path):
            if not isinstance(row, RowFault):
                yield row


def texts(paths: Sequence[Path]) -> list[str]:
    """Return the main text of every row: a prompt, a document, a question, or a user's first message."""
    return [found for row in objects(paths) if (found := _text(row))]


def chats(paths: Sequence[Path]) -> list[tuple[Message, ...]]:
    """Return every conversation with at least one question, in any format of logs."""
    report = ReadReport()
    rows = (row for path in paths for row in read_file(path, report))
    return [row.request.messages for row in rows if row.request.messages]


def questions(paths: Sequence[Path]) -> list[Question]:
    """Rows with a question and passages, as in CacheBlend, MuSiQue and 2WikiMultihopQA."""
    questions = []
    for row in objects(paths):
        asked, passages = row.get("question"), tuple(_passages(row))
        if isinstance(asked, str) and asked.strip() and passages:
            questions.append(Question(asked.strip(), passages, _answer(row)))
    return questions


def bare_passages(paths: Sequence[Path]) -> list[Passage]:
    """Rows that are one document each: `title` and `text`."""
    return [
        Passage(str(row.get("title") or ""), row["text"].strip())
        for row in objects(paths)
        if isinstance(row.get("text"), str) and row["text"].strip() and "question" not in row
    ]


def _text(row: Mapping[str, Any]) -> str | None:
    for name in _TEXT_FIELDS:
        if isinstance(value := row.get(name), str) and value.strip():
            return value.strip()
    logged = (row.get(name) for name in ("messages", "conversation", "conversations"))
    for message in next((said for said in logged if isinstance(said, list)), ()):
        if isinstance(message, Mapping) and message.get("role", message.get("from")) in ("user", "human"):
            content = message.get("content", message.get("value"))
            return content.strip() if isinstance(content, str) and content.strip() else None
    return None


def _passages(row: Mapping[str, Any]) -> Iterator[Passage]:
    for item in row.get("ctxs") or row.get("paragraphs") or row.get("context") or ():
        if isinstance(item, Mapping):
            text = item.get("text") or item.get("paragraph_text")
            title = item.get("title") or ""
        elif isinstance(item, Sequence) and len(item) == 2:
            title, sentences = item
            text = " ".join(map(str, sentences)) if isinstance(sentences, list) else sentences
        else:
            continue
        if isinstance(text, str) and text.strip():
            yield Passage(str(title), text.strip())


def _answer(row: Mapping[str, Any]) -> str | None:
    answer = row.get("answer") or row.get("answers")
    while isinstance(answer, list) and answer:  # some files have lists of lists
        answer = answer[0]
    return answer if isinstance(answer, str) and answer else None


def person(draw: random.Random) -> str:
    return f"{draw.choice(WORDS['first_names'])} {draw.choice(WORDS['last_names'])}"


def date(draw: random.Random) -> str:
    return f"{draw.randint(1, 28)} {draw.choice(WORDS['months'])} {draw.randint(2023, 2026)}"


def clock(draw: random.Random) -> str:
    return f"{draw.randint(0, 23):02}:{draw.randint(0, 59):02}:{draw.randint(0, 59):02}"


def value_for(slot: str, draw: random.Random) -> str:
    """Return a value that fits the slot's name."""
    words = set(re.split(r"[^a-z]+", slot.lower()))
    kind = next((kind for kind, names in WORDS["slots"].items() if words & set(names)), "other")
    if kind in ("date", "person"):
        return date(draw) if kind == "date" else person(draw)
    if kind == "number":
        return str(draw.randint(10, 99_999))
    if kind == "other":
        return f"{draw.choice(TOPICS)} in {draw.choice(PLACES)}"
    return str(draw.choice(WORDS[kind]))


def endless(items: Sequence[_T], draw: random.Random) -> Iterator[_T]:
    """Yield all items, again and again, each time in another order; nothing if there are none."""
    while items:
        yield from draw.sample(items, len(items))
