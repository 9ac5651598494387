"""
What the papers' tables ask: published data sets in the formats they are published in, and the prompts made of
them. What a format lacks is made by rule, as stated here.

    wmt19/newstest2019.XX-YY      pairs of segments, in the order of their documents
    rag_cacheblend/*              CacheBlend's questions with chunks of 512 tokens, none marked as supporting
    rag_full_context/*            questions with passages, supporting ones marked

All lie in one folder as NAME.jsonl.gz; a data set whose file is missing has no rows. Chunks are paragraphs of
the user's message.
"""

import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from kvshare.conversation.chat import Chat
from kvshare.embedded.tokenizer import PromptEncoder
from kvshare.errors import ConfigError
from kvshare.replay.workloads.sources import Passage, objects
from kvshare_lab.fidelity.measures import plain
from kvshare_lab.fidelity.scenario import Draft, Messages, Scenario, tokenized
from kvshare_lab.fidelity.suites.library import marked_question

TEXTS = yaml.safe_load(Path(__file__).with_name("texts.yaml").read_text(encoding="utf-8"))
_MARKED = 2  # pieces of unmarked chunks that count as supporting
_SHORT_WORD = 4
_FEWEST_PASSAGES = 2
_SHARE = 0.6  # of the passages that each of two earlier prompts had
EXAMPLES = 5
QUESTIONS: Mapping[str, str] = TEXTS["questions"]
REQUESTS: Mapping[str, str] = TEXTS["requests"]  # with `{text}` in them


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

    Two count as supporting: first those with the answer, then those that share most words with the question.
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


def marked(folder: Path, name: str) -> list[Asked]:
    """Questions of several hops, with every passage that came with them."""
    found = []
    for row in _rows(folder, f"rag_full_context/{name}_200"):
        if question := marked_question(row):
            passages = tuple(map(_passage, (*question.whole.supporting, *question.others)))
            answers = (question.whole.answer, *row.get("answer_aliases", ()))
            found.append(Asked(_line(question.whole.text), passages, answers))
    return [asked for asked in found if asked.passages]


def single_hop(folder: Path, name: str) -> list[Asked]:
    """The first step of each MuSiQue question, which depends on no other step; each asked once."""
    found: dict[str, Asked] = {}
    for row in _rows(folder, f"rag_full_context/{name}_200"):
        step = row["question_decomposition"][0]
        text, is_relation, relation = step["question"].partition(" >> ")
        if is_relation:
            text = TEXTS["questions"]["relation"].format(subject=text, relation=relation)
        items = sorted(row["paragraphs"], key=lambda item: item["idx"] != step["paragraph_support_idx"])
        passages = tuple(_passage(Passage(item["title"], item["paragraph_text"])) for item in items)
        found.setdefault(_line(text), Asked(_line(text), passages, (step["answer"],)))
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


def _passage(passage: Passage) -> str:
    return f"{passage.title}: {_line(passage.text)}"


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
        draft = Draft(source=f"{suite}:{number}", stored=tuple(stored), prompt=prompt)
        return tokenized(draft, self.encoder, suite=suite, number=number)

    def _length(self, messages: Messages) -> int:
        return len(self.encoder.encode_chat(Chat(tuple(messages))).token_ids)


def paragraphs(*texts: str) -> Messages:
    """One message of the user."""
    return ({"role": "user", "content": "\n\n".join(texts)},)


def with_passages(passages: Sequence[str], ending: str) -> Messages:
    """The passages between the introduction and the question, or what stands in its place."""
    return paragraphs(QUESTIONS["intro"], *passages, ending)


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
