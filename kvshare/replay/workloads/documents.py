"""`rag`, `agent` and `revise`: the same documents again, among others or a little changed."""

import random
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, count
from pathlib import Path
from typing import TypeVar

from kvshare.logs.requests import Message
from kvshare.replay.stream import take_turns
from kvshare.replay.workloads import sources
from kvshare.replay.workloads.chats import reworded
from kvshare.replay.workloads.sources import WORDS, Passage, Question, WorkloadRow, bare_passages, questions

T = TypeVar("T")
RAG_SYSTEM = {"role": "system", "content": WORDS["rag_system"]}
_USES = 8  # of a question's passages, on average
_NUM_OWN, _NUM_OTHERS = 6, 3
_MOST_RETRIEVED = 12_000  # characters of all passages
_NEIGHBOURS = 4  # questions whose passages are retrieved by mistake
AGENT_SYSTEM = {"role": "system", "content": WORDS["agent_system"]}
_STEPS = 5
_RUNS = 6  # of a task, on average
_NUM_OPEN = 4
_NUM_USERS = 7
_LONGEST = 2500  # characters of a result
_NUMBER = re.compile(r"(?<![\w.,])\d{2,6}(?![\w.,])")
_CHANGES = 0.3  # of the results, from one run to the next
_REVISIONS = 40
_LONGEST_DRAFT = 6_000  # characters


def rag(paths: Sequence[Path], num_requests: int, draw: random.Random) -> Iterator[WorkloadRow]:
    """
    Questions over one collection; the same passages come back in another order and among others.

    Every request retrieves some of the question's own passages and some of its neighbours'.
    """
    asked = questions(paths)
    if not asked:
        return
    used = draw.sample(asked, min(len(asked), max(4, num_requests // _USES)))
    unrelated = bare_passages(paths)
    for number in count():
        place = draw.randrange(len(used))
        question = used[place]
        around = [used[(place + step) % len(used)] for step in range(1, 1 + _NEIGHBOURS)]
        others = [passage for each in around for passage in each.passages] + some(unrelated, 1, draw)
        retrieved = _retrieved(question, others, draw)
        messages = (RAG_SYSTEM, {"role": "user", "content": rag_prompt(question.text, retrieved)})
        user = f"u{draw.randrange(max(2, num_requests // 3))}"
        yield WorkloadRow(f"rag-c{number}", 0, user, messages, question.answer)


def _retrieved(question: Question, others: Sequence[Passage], draw: random.Random) -> list[Passage]:
    own = some(question.passages, _NUM_OWN, draw)
    others = some(others, _NUM_OTHERS, draw)
    chosen = list(dict.fromkeys([*own, *others]))
    draw.shuffle(chosen)
    while len(chosen) > 2 and sum(len(each.text) for each in chosen) > _MOST_RETRIEVED:  # the ones that fit
        chosen.pop()
    return chosen


def rag_prompt(question: str, passages: Sequence[Passage]) -> str:
    written = (f"Title: {each.title}\n{each.text}" if each.title else each.text for each in passages)
    return "Passages:\n\n" + "\n\n".join(written) + f"\n\nQuestion: {question}"


def some(items: Sequence[T], number: int, draw: random.Random) -> list[T]:
    """As many as are wanted, or all where there are fewer."""
    return draw.sample(items, min(len(items), number))


def agent(paths: Sequence[Path], num_requests: int, draw: random.Random) -> Iterator[WorkloadRow]:
    """
    Yield runs of the same tasks; each step appends a tool's result, and results change a little.

    A request is the whole transcript so far. Runs of one task have the same steps in the same order, but
    every result has the time and duration of its fetch, and in some of them a number has changed. A few runs
    at a time, each from its first step to its last.
    """
    tasks = _tasks(paths, draw)
    if not tasks:
        return
    used = draw.sample(tasks, min(len(tasks), max(2, num_requests // (_RUNS * _STEPS))))
    runs = (_run(draw.choice(used), f"agent-c{n}", f"u{n % _NUM_USERS}", draw) for n in count())
    yield from take_turns(runs, _NUM_OPEN, draw)


def _run(task: Question, conversation: str, user: str, draw: random.Random) -> Iterator[WorkloadRow]:
    messages: list[Message] = [AGENT_SYSTEM, {"role": "user", "content": f"Task: {task.text}"}]
    for turn, document in enumerate(task.passages):
        call, text = tool_call(document), document.text[:_LONGEST]
        yield WorkloadRow(conversation, turn, user, tuple(messages), call)
        if draw.random() < _CHANGES:
            text = refigured(text, draw, most=2)
        result = tool_result(Passage(_name(document), text), draw)
        messages += [{"role": "assistant", "content": call}, {"role": "user", "content": result}]
    yield WorkloadRow(conversation, len(task.passages), user, tuple(messages))


def revise(paths: Sequence[Path], num_requests: int, draw: random.Random) -> Iterator[WorkloadRow]:
    """
    A text is changed in one place and asked about again, forty times, each change on top of the last one.

    One text after the other; the place of each change is random.
    """
    for number, question in enumerate(sources.endless(questions(paths), draw)):
        draft = _shortened(question.passages)
        for turn in range(1 + _REVISIONS):
            if turn:
                place = draw.randrange(len(draft))
                draft[place] = draft[place]._replace(text=reworded(draft[place].text, draw))
            messages = (RAG_SYSTEM, {"role": "user", "content": rag_prompt(question.text, draft)})
            yield WorkloadRow(f"revise-c{number}", turn, f"u{number}", messages)


def _shortened(passages: Sequence[Passage]) -> list[Passage]:
    ends = accumulate(len(each.text) for each in passages)
    return [each for each, end in zip(passages, ends, strict=True) if end <= _LONGEST_DRAFT] or [passages[0]]


def tool_call(document: Passage) -> str:
    return f"I do not know enough yet, so I look at the next source.\nopen({_name(document)!r})"


def tool_result(document: Passage, draw: random.Random) -> str:
    """Return the document as the tool returns it: the time and duration of the fetch, and the text."""
    fetched = f"{sources.date(draw)} {sources.clock(draw)}"
    took = draw.randint(3, 900)
    return f"Result of open({_name(document)!r}), fetched {fetched} in {took} ms:\n\n{document.text}"


def refigured(text: str, draw: random.Random, *, most: int) -> str:
    """Return the text with its first `most` numbers of two to six digits a little larger."""
    return _NUMBER.sub(lambda match: str(int(match.group()) + draw.randint(1, 9)), text, count=most)


def _name(document: Passage) -> str:
    return document.title or " ".join(document.text.split()[:6])


def _tasks(paths: Sequence[Path], draw: random.Random) -> list[Question]:
    """A question with passages is a task; so are any five bare passages."""
    tasks = [Question(f"Find out: {each.text}", each.passages[:_STEPS]) for each in questions(paths)]
    passages = bare_passages(paths)
    draw.shuffle(passages)
    for start in range(0, len(passages) - _STEPS + 1, _STEPS):
        dealt = tuple(passages[start : start + _STEPS])
        titles = ", ".join(map(_name, dealt[:2]))
        asked = f"Write one paragraph on what these have in common, beginning with {titles}."
        tasks.append(Question(asked, dealt))
    return tasks
