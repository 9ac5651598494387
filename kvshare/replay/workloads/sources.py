"""
What workloads are made of: source files -> texts, passages, chats; and made-up values.

Takes the published forms of the data sets that fit. Rows that a workload has no use for are passed over; what
is left is the caller's to judge.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvshare.replay.readers import ReadReport, Reason, read_file
from kvshare.replay.readers.files import raw_rows
from kvshare.replay.requests import Message

_TEXT_FIELDS = ("prompt", "text", "query", "question", "instruction", "section_text", "dialogue")
FIRST_NAMES = (
    "Aisha", "Bruno", "Chen", "Dalia", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jun", "Katya", "Liam",
    "Mina", "Noor", "Otto", "Priya", "Rosa", "Sven",
)  # fmt: skip
LAST_NAMES = (
    "Adler", "Baker", "Costa", "Diaz", "Evans", "Fischer", "Garcia", "Haas", "Ito", "Jensen", "Kaya",
    "Lopez", "Meyer", "Novak", "Okafor", "Peters",
)  # fmt: skip
PLACES = (
    "Lisbon", "Warsaw", "Nairobi", "Osaka", "Toronto", "Zagreb", "Lima", "Hanoi", "Utrecht", "Malaga",
    "Graz", "Tampere", "Cork", "Basel", "Porto",
)  # fmt: skip
PRODUCTS = (
    "travel kettle", "desk lamp", "rain jacket", "trail shoes", "office chair", "bike helmet", "water filter",
    "phone case", "baking tin", "wool blanket", "garden hose", "reading light", "tool box", "camping stove",
)  # fmt: skip
TOPICS = (
    "rising energy prices", "a community garden", "the history of tea", "remote teams", "night trains",
    "a small bakery", "urban cycling", "early music", "solar roofs", "school lunches", "used books",
    "wooden bridges", "sleep and shift work", "local news", "repairing phones",
)  # fmt: skip
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Draft:
    """A request before it has its number and its time."""

    conversation: str
    turn: int
    user: str
    messages: tuple[Message, ...]
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Passage:
    """A document, or a piece of one."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, the passages that came with it, and the first accepted answer."""

    text: str
    passages: tuple[Passage, ...]
    answer: str | None


def objects(paths: Sequence[Path]) -> Iterator[Mapping[str, Any]]:
    """Every readable JSON object of the files, in order."""
    for path in paths:
        for row in raw_rows(path):
            if not isinstance(row.value, Reason):
                yield row.value


def texts(paths: Sequence[Path]) -> list[str]:
    """The telling text of every row: a prompt, a document, a question, the first thing that a user said."""
    return [found for row in objects(paths) if (found := _text(row))]


def chats(paths: Sequence[Path]) -> list[tuple[Message, ...]]:
    """Every conversation with at least one question, in any format of logs."""
    report = ReadReport()
    rows = (row for path in paths for row in read_file(path, report))
    return [row.request.messages for row in rows if row.request.messages]


def questions(paths: Sequence[Path]) -> list[Question]:
    """Rows that ask something and bring passages along: as CacheBlend, MuSiQue and 2WikiMultihopQA do."""
    found = []
    for row in objects(paths):
        asked, passages = row.get("question"), tuple(_passages(row))
        if isinstance(asked, str) and asked.strip() and passages:
            found.append(Question(asked.strip(), passages, _answer(row)))
    return found


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
    for name in ("messages", "conversation", "conversations"):
        if isinstance(said := row.get(name), list):
            return _first_question(said)
    return None


def _first_question(said: Sequence[Any]) -> str | None:
    for message in said:
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
    return f"{draw.choice(FIRST_NAMES)} {draw.choice(LAST_NAMES)}"


def date(draw: random.Random) -> str:
    return f"{draw.randint(1, 28)} {draw.choice(MONTHS)} {draw.randint(2023, 2026)}"


def clock(draw: random.Random) -> str:
    return f"{draw.randint(0, 23):02}:{draw.randint(0, 59):02}:{draw.randint(0, 59):02}"


def value_for(slot: str, draw: random.Random) -> str:
    """Something that fits what the slot seems to ask for, by its name."""
    name = set(re.split(r"[^a-z]+", slot.lower()))
    if _any(name, ("date", "time", "day", "deadline", "datum")):
        return date(draw)
    if _any(name, ("number", "id", "amount", "price", "count", "age", "year", "size", "length", "nummer")):
        return str(draw.randint(10, 99_999))
    if _any(name, ("city", "country", "location", "place", "address", "ort")):
        return draw.choice(PLACES)
    if _any(name, ("product", "item", "order", "brand", "model")):
        return draw.choice(PRODUCTS)
    if _any(name, ("name", "author", "person", "customer", "client", "patient", "user")):
        return person(draw)
    return f"{draw.choice(TOPICS)} in {draw.choice(PLACES)}"


def _any(name: set[str], words: Sequence[str]) -> bool:
    return any(word in name for word in words)
