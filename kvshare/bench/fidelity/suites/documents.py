"""`rag`, `reorder` and `agent`: the same documents again, in another order or company, or refetched."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from kvshare.bench.fidelity.scenario import Draft, Messages
from kvshare.bench.fidelity.suites.library import Library, name_of
from kvshare.bench.fidelity.suites.questions import Asked, MarkedQuestion, is_yes_or_no
from kvshare.bench.fidelity.suites.talks import shortened
from kvshare.replay.workloads.documents import (
    AGENT_SYSTEM,
    RAG_SYSTEM,
    rag_prompt,
    refigured,
    tool_call,
    tool_result,
)
from kvshare.replay.workloads.sources import Passage

_TEXTS: Mapping[str, str] = yaml.safe_load(
    Path(__file__).with_name("conversations.yaml").read_text(encoding="utf-8")
)
_MOST_SUPPORTING = 1700  # characters of the passages that an answer needs; questions with more are left out
_MOST_RETRIEVED = 2700  # characters of all passages
_LONGEST_OTHER = 700  # characters
_FEWEST = 4  # passages
_OWN, _NEIGHBOURS = 5, 2  # passages that came with the question, and of each of its neighbours
_OPENED = 3  # results before the appended one
_AROUND = 8  # words before and behind a figure that is asked for
_YEAR, _NUMBER = re.compile(r"\d{4}"), re.compile(r"[\d.,]+( \w+)?")


@dataclass(frozen=True, slots=True)
class _Case:
    """What is asked, and the passages that came with it without supporting it."""

    source: str
    asked: Asked
    others: tuple[Passage, ...]

    @property
    def hops(self) -> int:
        return len(self.asked.supporting)


def rag(library: Library, number: int, draw: random.Random) -> Draft | None:
    """
    Passages in another order and company than in two or three stored prompts, which asked something else.

    The stored prompts together hold all passages but one, the supporting ones always. Single-hop questions
    and those of two hops take turns.
    """
    case = _case(library, number)
    neighbours = [] if case is None else _neighbours(library, case, draw)
    if case is None or len(neighbours) < 2:
        return None
    company = [*_some(case.others, _OWN, draw)]
    company += [each for other in neighbours for each in _some(_all(other, library), _NEIGHBOURS, draw)]
    passages = _retrieved(case.asked.supporting, company, draw)
    if len(passages) < _FEWEST:
        return None
    asked_before = neighbours[: draw.randint(2, 3)]
    groups = _dealt(passages, case.asked.supporting, len(asked_before), draw)
    stored = [_asked_before(other, group, draw) for other, group in zip(asked_before, groups, strict=True)]
    return _draft(case, passages, tuple(stored), library, draw)


def reorder(library: Library, number: int, draw: random.Random) -> Draft | None:
    """The same passages and the same question as in the one stored prompt, in another order."""
    case = _case(library, number)
    if case is None:
        return None
    passages = _retrieved(case.asked.supporting, case.others, draw)
    if len(passages) < _FEWEST:
        return None
    return _draft(case, passages, (_prompt(case.asked, _permuted(passages, draw)),), library, draw)


def agent(library: Library, number: int, draw: random.Random) -> Draft | None:
    """
    A transcript in which a figure of an earlier result has changed, with one more step appended.

    The passages that the task's answer needs are not changed; one of them is the appended result.

    Label `asks`: for the `task`, or, every third draft, in the end for the changed `figure`. Label
    `refetched`: `one`, only the changed result has a new time, or `all` have.
    """
    cases = [case for case in _cases(library, 2) if len(_changing(case)) >= _OPENED - 1]
    if not cases:
        return None
    case = cases[number % len(cases)]
    first, last = _permuted(case.asked.supporting, draw)
    changing = draw.sample(_changing(case), _OPENED - 1)
    opened = _permuted([first, *changing], draw)
    refetched = ("one", "all")[number % 2]
    asks = ("task", "task", "figure")[number % 3]
    results = [tool_result(document, draw) for document in opened]
    changed, again, ending = _refigured(changing[0], draw), list(results), tool_result(last, draw)
    for place, document in enumerate(opened):
        if document == changing[0]:
            again[place] = tool_result(changed, draw)
        elif refetched == "all":
            again[place] = tool_result(document, draw)
    if asks == "figure":
        ask, answers = _about_the_figure(changed, changing[0], draw)
        ending = f"{ending}\n\n{ask}"
    else:
        answers = _answers(case.asked.answer, library, draw)
    return Draft(
        source=case.source,
        stored=(_transcript(case, opened, results),),
        prompt=_transcript(case, [*opened, last], [*again, ending]),
        labels={"refetched": refetched, "asks": asks},
        candidates=tuple(f"Done: {answer}." for answer in answers),
    )


def _about_the_figure(new: Passage, old: Passage, draw: random.Random) -> tuple[str, tuple[str, ...]]:
    """A question with the words around the changed figure, and its answers: now, before, never."""
    words = new.text.split()
    pairs = enumerate(zip(words, old.text.split(), strict=True))
    place, *both = next((place, now, before) for place, (now, before) in pairs if now != before)
    figures = zip(*(re.findall(r"\d+", word) for word in both), strict=True)
    now, before = next(pair for pair in figures if pair[0] != pair[1])
    words[place] = words[place].replace(now, "___", 1)
    around = " ".join(words[max(0, place - _AROUND) : place + _AROUND + 1])
    never = [str(int(now) + more) for more in draw.sample(range(10, 40), 2)]
    return _TEXTS["agent_figure"].format(title=new.title, words=around), (now, before, *never)


def _changing(case: _Case) -> list[Passage]:
    """Passages that support nothing and have a figure; cut, and one of each title."""
    supporting = {each.title for each in case.asked.supporting}
    short = [Passage(each.title, shortened(each.text, _LONGEST_OTHER)) for each in case.others]
    by_title = {each.title: each for each in short if _refigured(each, random.Random(0)) != each}
    return [each for title, each in by_title.items() if title not in supporting]


def _refigured(document: Passage, draw: random.Random) -> Passage:
    return Passage(document.title, refigured(document.text, draw, most=1))


def _draft(
    case: _Case,
    passages: Sequence[Passage],
    stored: tuple[Messages, ...],
    library: Library,
    draw: random.Random,
) -> Draft:
    return Draft(
        source=case.source,
        stored=stored,
        prompt=_prompt(case.asked, passages),
        labels={"hops": case.hops},
        candidates=_answers(case.asked.answer, library, draw),
        reordered=_prompt(case.asked, _permuted(passages, draw)),
    )


def _prompt(asked: Asked, passages: Sequence[Passage]) -> Messages:
    return RAG_SYSTEM, {"role": "user", "content": rag_prompt(asked.text, passages)}


def _transcript(case: _Case, opened: Sequence[Passage], results: Sequence[str]) -> Messages:
    said = [AGENT_SYSTEM, {"role": "user", "content": f"Task: Find out: {case.asked.text}"}]
    for document, result in zip(opened, results, strict=True):
        said.append({"role": "assistant", "content": tool_call(document)})
        said.append({"role": "user", "content": result})
    return tuple(said)


def _case(library: Library, number: int) -> _Case | None:
    """One hop, two hops, one hop, ...; those of one from the list's end, so that few sources come twice."""
    hops = 1 + number % 2
    found = _cases(library, hops)[:: -1 if hops == 1 else 1]
    return found[number // 2 % len(found)] if found else None


def _cases(library: Library, hops: int) -> list[_Case]:
    """
    What can be asked with this many supporting passages, none of it the other half's.

    A part of a question is asked among the passages of the whole one, those of its other parts included;
    it is a source of its own.
    """
    found: dict[str, _Case] = {}
    for source in library.marked:
        question = source.item
        for asked in question.steps if hops == 1 else (question.whole,):
            if len(asked.supporting) == hops and _is_short(asked) and library.may_ask(asked):
                name = name_of("question", asked.text)
                others = tuple(each for each in _all(question, library) if each not in asked.supporting)
                found.setdefault(name, _Case(name, asked, others))
    return list(found.values())


def _is_short(asked: Asked) -> bool:
    return sum(len(each.text) for each in asked.supporting) <= _MOST_SUPPORTING


def _neighbours(library: Library, case: _Case, draw: random.Random) -> list[MarkedQuestion]:
    """Up to three other questions of the half; not the one that this one is a part of."""
    found = [
        MarkedQuestion(other.whole, (), tuple(filter(library.owns, other.others)))
        for other in (source.item for source in library.marked)
        if case.asked not in (other.whole, *other.steps)
        and _is_short(other.whole)
        and library.may_ask(other.whole)
    ]
    return draw.sample(found, min(3, len(found)))


def _all(question: MarkedQuestion, library: Library) -> tuple[Passage, ...]:
    """The passages that came with it and are this half's."""
    return tuple(filter(library.owns, (*question.whole.supporting, *question.others)))


def _retrieved(needed: Sequence[Passage], company: Sequence[Passage], draw: random.Random) -> list[Passage]:
    """The passages that are needed and as many others as fit, shuffled."""
    chosen = list(dict.fromkeys(needed))
    for passage in _permuted(company, draw):
        length = sum(len(each.text) for each in chosen) + len(passage.text)
        fits = len(passage.text) <= _LONGEST_OTHER and length <= _MOST_RETRIEVED
        if fits and passage not in chosen:
            chosen.append(passage)
    draw.shuffle(chosen)
    return chosen


def _dealt(
    passages: Sequence[Passage], needed: Sequence[Passage], number: int, draw: random.Random
) -> list[list[Passage]]:
    """The passages in so many groups, in turn; one that is not needed is left out."""
    left_out = draw.choice([passage for passage in passages if passage not in needed])
    dealt = [passage for passage in _permuted(passages, draw) if passage != left_out]
    return [dealt[start::number] for start in range(number)]


def _asked_before(other: MarkedQuestion, group: Sequence[Passage], draw: random.Random) -> Messages:
    needed = [*group, *other.whole.supporting]
    return _prompt(other.whole, _retrieved(needed, _some(other.others, _NEIGHBOURS, draw), draw))


def _some(passages: Sequence[Passage], number: int, draw: random.Random) -> list[Passage]:
    return draw.sample(passages, min(number, len(passages)))


def _permuted(passages: Sequence[Passage], draw: random.Random) -> list[Passage]:
    """In another order, where there is one."""
    order = list(passages)
    while len(set(passages)) > 1 and order == list(passages):
        draw.shuffle(order)
    return order


def _answers(answer: str, library: Library, draw: random.Random) -> tuple[str, ...]:
    """The answer and three of other questions, of its kind as far as there are; to yes, only no."""
    if is_yes_or_no(answer):
        return answer, {"yes": "no", "no": "yes"}[answer.lower()]
    marked = [source.item for source in library.marked]
    known = {asked.answer.lower(): asked.answer for each in marked for asked in (each.whole, *each.steps)}
    others = [
        other for other in known.values() if other.lower() != answer.lower() and not is_yes_or_no(other)
    ]
    draw.shuffle(others)
    others.sort(key=lambda other: _kind(other) != _kind(answer))
    return answer, *others[:3]


def _kind(answer: str) -> str:
    """A year, a number, a date, or text of one, two or more words."""
    if _YEAR.fullmatch(answer):
        return "year"
    if _NUMBER.fullmatch(answer):
        return "number"
    if any(_YEAR.fullmatch(word) for word in _words(answer)):
        return "date"
    return f"{min(3, len(_words(answer)))} words"


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)
