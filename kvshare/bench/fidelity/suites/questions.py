"""Questions whose supporting passages are known: rows as MuSiQue and 2WikiMultihopQA publish them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvshare.replay.workloads.sources import Passage, objects

_RELATION = " >> "  # "Ulm >> country": how MuSiQue writes a question without words


class Asked(NamedTuple):
    """A question, its answer, and the passages that the answer follows from."""

    text: str
    answer: str
    supporting: tuple[Passage, ...]

    @property
    def is_answerable(self) -> bool:
        """Whether the answer is in one of the passages, or is yes or no."""
        answer = self.answer.lower()
        found = any(answer in f"{each.title}\n{each.text}".lower() for each in self.supporting)
        return bool(answer) and (found or is_yes_or_no(answer))


class MarkedQuestion(NamedTuple):
    """
    A question that needs several passages.

    `steps`: the parts that can be asked alone, each with the one passage that answers it. `others`: passages
    that came with the question and support no answer.
    """

    whole: Asked
    steps: tuple[Asked, ...]
    others: tuple[Passage, ...]


def is_yes_or_no(answer: str) -> bool:
    return answer.lower() in ("yes", "no")


def marked_questions(paths: Sequence[Path]) -> Iterable[MarkedQuestion]:
    """The rows with marked passages, without those that cannot be answered from them."""
    for row in objects(paths):
        found = _musique(row) if "paragraphs" in row else _two_wiki(row) if "context" in row else None
        if found and found.whole.is_answerable:
            yield found


def _musique(row: Mapping[str, Any]) -> MarkedQuestion:
    paragraphs = {each["idx"]: each for each in row["paragraphs"]}
    passages = {idx: Passage(each["title"], each["paragraph_text"]) for idx, each in paragraphs.items()}
    marks = {idx for idx, each in paragraphs.items() if each["is_supporting"]}
    parts = (
        Asked(_as_question(part["question"]), part["answer"], (passages[part["paragraph_support_idx"]],))
        for part in row["question_decomposition"]
        if "#" not in part["question"] and part["paragraph_support_idx"] in passages
    )
    return MarkedQuestion(
        Asked(row["question"], row["answer"], tuple(passages[idx] for idx in sorted(marks))),
        tuple(part for part in parts if part.is_answerable),
        tuple(passage for idx, passage in passages.items() if idx not in marks),
    )


def _two_wiki(row: Mapping[str, Any]) -> MarkedQuestion:
    marks = {fact[0] for fact in row["supporting_facts"]}
    passages = [Passage(title, " ".join(sentences)) for title, sentences in row["context"]]
    supporting = tuple(passage for passage in passages if passage.title in marks)
    others = tuple(passage for passage in passages if passage.title not in marks)
    return MarkedQuestion(Asked(row["question"], row["answer"], supporting), (), others)


def _as_question(text: str) -> str:
    """`Ulm >> country` is asked as `Ulm: country?`; others get a capital and a question mark."""
    text = text.strip().replace(_RELATION, ": ")
    return f"{text[:1].upper()}{text[1:].rstrip('? ')}?"
