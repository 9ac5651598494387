"""
Published data sets in the formats they are published in. What a format lacks is made by rule, as stated here.

    wmt19/newstest2019.XX-YY      pairs of segments, in the order of their documents
    rag_cacheblend/*              CacheBlend's questions with chunks of 512 tokens, none marked as supporting
    rag_full_context/*            questions with passages, supporting ones marked

All lie in one folder as NAME.jsonl.gz; a data set whose file is missing has no rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvshare.bench.fidelity.papers.scores import plain
from kvshare.bench.fidelity.texts import texts_beside
from kvshare.errors import ConfigError
from kvshare.replay.workloads.sources import objects

TEXTS = texts_beside(__file__, "texts.yaml")
_MARKED = 2  # pieces of unmarked chunks that count as supporting
_SHORT_WORD = 4


class Asked(NamedTuple):
    """A question, its passages with the supporting ones first, and every accepted answer."""

    text: str
    passages: tuple[str, ...]
    answers: tuple[str, ...]


class Pair(NamedTuple):
    """A text and what it becomes: its translation or its summary."""

    text: str
    result: str


def wmt19(folder: Path, languages: str) -> list[Pair]:
    """newstest2019 of one direction such as de-en."""
    rows = _rows(folder, f"wmt19/newstest2019.{languages}")
    return [Pair(_line(row["src"]), _line(row["ref"])) for row in rows if row.get("src") and row.get("ref")]


def samsum(path: Path) -> list[Pair]:
    """
    SAMSum as published: a JSON list of `id`, `dialogue`, `summary`.

    Raises:  ConfigError for another file
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return [
            Pair(re.sub(r"\s*\n\s*", "\n", row["dialogue"]).strip(), _line(row["summary"]))
            for row in rows
            if row["dialogue"].strip() and row["summary"].strip()
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as exc:
        expected = f"expected a JSON list of id, dialogue and summary in {path.name}"
        raise ConfigError("--samsum", f"{expected}, got {type(exc).__name__}: {exc}") from exc


def cacheblend(folder: Path, name: str, *, piece_words: int) -> list[Asked]:
    """
    CacheBlend's own file, its chunks cut into pieces of at most so many words.

    Two pieces count as supporting: first those with the answer, then those that share most words with the
    question.
    """
    found = []
    for row in _rows(folder, f"rag_cacheblend/{name}"):
        question, answers = row["question"], tuple(_flat(row["answers"]))
        texts = [_line(item["text"]) for item in row["ctxs"] if item.get("text")]
        pieces = [piece for text in texts for piece in _pieces(text, piece_words)]
        if answers and len(pieces) > _MARKED:
            supporting = sorted(pieces, key=lambda piece: _relevance(piece, question, answers))[:_MARKED]
            others = [piece for piece in pieces if piece not in supporting]
            found.append(Asked(_line(question), (*supporting, *others), answers))
    return found


def two_wiki(folder: Path) -> list[Asked]:
    """2WikiMultihopQA's rows that have their articles."""
    found = []
    for row in _rows(folder, "rag_full_context/2wikimqa_200"):
        titles = {title for title, _ in row.get("supporting_facts") or ()}
        passages = [
            (title in titles, f"{title}: {_line(' '.join(said))}") for title, said in row.get("context") or ()
        ]
        found.append(_asked(row["question"], passages, [row["answer"]]))
    return [asked for asked in found if asked.passages]


def musique(folder: Path) -> list[Asked]:
    """MuSiQue's questions of two hops and more."""
    return [
        _asked(
            row["question"],
            [(item["is_supporting"], _passage(item)) for item in row["paragraphs"]],
            [row["answer"], *row.get("answer_aliases", ())],
        )
        for row in _rows(folder, "rag_full_context/musique_200")
    ]


def single_hop(folder: Path) -> list[Asked]:
    """The first step of each MuSiQue question, which depends on no other step; each asked once."""
    found: dict[str, Asked] = {}
    for row in _rows(folder, "rag_full_context/musique_200"):
        step = row["question_decomposition"][0]
        text, is_relation, relation = step["question"].partition(" >> ")
        if is_relation:
            text = TEXTS["questions"]["relation"].format(subject=text, relation=relation)
        passages = [
            (item["idx"] == step["paragraph_support_idx"], _passage(item)) for item in row["paragraphs"]
        ]
        single = _asked(text, passages, [step["answer"]])
        found.setdefault(single.text, single)
    return list(found.values())


def wrong_answer(asked: Asked, others: Sequence[Asked]) -> str | None:
    """No for yes, yes for no; else another question's answer that is not accepted here, if there is one."""
    right = {plain(answer) for answer in asked.answers}
    for answer, opposite in (("yes", "no"), ("no", "yes")):
        if answer in right:
            return opposite
    answers = (other.answers[0] for other in others)
    return next((each for each in answers if plain(each) not in {*right, "yes", "no"}), None)


def _rows(folder: Path, name: str) -> Iterable[Mapping[str, Any]]:
    path = folder / f"{name}.jsonl.gz"
    return objects([path]) if path.exists() else ()


def _asked(question: str, passages: Sequence[tuple[bool, str]], answers: Sequence[str]) -> Asked:
    """`passages`: whether each supports the answer, and its text."""
    first = sorted(passages, key=lambda each: not each[0])
    return Asked(_line(question), tuple(text for _, text in first), tuple(answers))


def _passage(item: Mapping[str, Any]) -> str:
    return f"{item['title']}: {_line(item['paragraph_text'])}"


def _pieces(text: str, num_words: int) -> Iterator[str]:
    words = text.split()
    parts = -(-len(words) // num_words)
    size = -(-len(words) // max(1, parts))
    for start in range(0, len(words), max(1, size)):
        yield " ".join(words[start : start + size])


def _relevance(piece: str, question: str, answers: Sequence[str]) -> tuple[bool, int]:
    """Sorts the most relevant piece first."""
    lower = piece.lower()
    asked = {word for word in re.findall(r"\w+", question.lower()) if len(word) >= _SHORT_WORD}
    has_answer = any(answer.lower() in lower for answer in answers)
    return not has_answer, -len(asked & set(re.findall(r"\w+", lower)))


def _flat(answers: Any) -> Iterator[str]:
    """Some files have lists of lists."""
    if isinstance(answers, str):
        yield answers
    else:
        for answer in answers:
            yield from _flat(answer)


def _line(text: str) -> str:
    return " ".join(text.split())
