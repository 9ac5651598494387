"""`rag`: questions over one collection; the same passages come back in another order and company."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvshare.replay.workloads.rows import Draft
from kvshare.replay.workloads.sources import Passage, Question, bare_passages, questions

SYSTEM = {
    "role": "system",
    "content": "You answer questions from the passages that the user gives. Answer with a few words only. "
    "If the passages do not say it, answer that you do not know.",
}
_USES = 8  # of a question's passages, on average
_NUM_OWN, _NUM_OTHERS = 6, 3
_LONGEST = 12_000  # characters of all passages
_NEIGHBOURS = 4  # questions whose passages are retrieved by mistake


def drafts(paths: Sequence[Path], num_requests: int, draw: random.Random) -> Iterator[Draft]:
    """Every request retrieves anew: some of the question's own passages, some of its neighbours'."""
    asked = questions(paths)
    if not asked:
        return
    used = draw.sample(asked, min(len(asked), max(4, num_requests // _USES)))
    strangers = bare_passages(paths)
    number = 0
    while True:
        place = draw.randrange(len(used))
        question = used[place]
        around = [used[(place + step) % len(used)] for step in range(1, 1 + _NEIGHBOURS)]
        others = [passage for each in around for passage in each.passages] + _some(strangers, 1, draw)
        retrieved = _retrieved(question, others, draw)
        messages = (SYSTEM, {"role": "user", "content": rag_prompt(question.text, retrieved)})
        user = f"u{draw.randrange(max(2, num_requests // 3))}"
        yield Draft(f"rag-c{number}", 0, user, messages, question.answer)
        number += 1


def _retrieved(question: Question, others: Sequence[Passage], draw: random.Random) -> list[Passage]:
    own = _some(question.passages, _NUM_OWN, draw)
    others = _some(others, _NUM_OTHERS, draw)
    chosen = list(dict.fromkeys([*own, *others]))
    draw.shuffle(chosen)
    while len(chosen) > 2 and sum(len(each.text) for each in chosen) > _LONGEST:  # the ones that fit
        chosen.pop()
    return chosen


def rag_prompt(question: str, passages: Sequence[Passage]) -> str:
    """The passages, then the question."""
    written = (f"Title: {each.title}\n{each.text}" if each.title else each.text for each in passages)
    return "Passages:\n\n" + "\n\n".join(written) + f"\n\nQuestion: {question}"


def _some(passages: Sequence[Passage], number: int, draw: random.Random) -> list[Passage]:
    return draw.sample(passages, min(len(passages), number))
