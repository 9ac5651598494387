"""`rag`, `reorder` and `agent`: the same documents again, in another order, among others, or refetched."""

import random
import re
from collections.abc import Sequence

from kvshare.replay.workloads import documents as workload
from kvshare.replay.workloads.documents import some
from kvshare.replay.workloads.sources import Passage
from kvshare_lab.fidelity.scenario import Draft, Messages
from kvshare_lab.fidelity.suites import library as source_texts
from kvshare_lab.fidelity.suites.library import Asked, Library, MarkedQuestion, Source, in_turn, shuffled

_MOST_SUPPORTING = 1700  # characters of the passages that an answer needs; questions with more are left out
_MOST_RETRIEVED = 2700  # characters of all passages
_LONGEST_OTHER = 700  # characters
_FEWEST = 4  # passages
_OWN, _NEIGHBOURS = 5, 2  # passages that came with the question, and of each of its neighbours
_OPENED = 3  # results before the appended one
_AROUND = 8  # words before and after a figure that is asked for
_YEAR, _NUMBER = re.compile(r"\d{4}"), re.compile(r"[\d.,]+( \w+)?")

Case = Source[MarkedQuestion]  # asked as a whole, with the passages of this half that came with it


def rag(library: Library, number: int, draw: random.Random) -> Draft | None:
    """
    Passages in another order and among others than in two or three stored prompts with other questions.

    The stored prompts together have all passages but one, and always the supporting ones. Questions of one
    and of two hops take turns.
    """
    case = _case(library, number)
    neighbours = [] if case is None else _neighbours(library, case.item.whole, draw)
    if case is None or len(neighbours) < 2:
        return None
    needed, others = case.item.whole.supporting, some(case.item.others, _OWN, draw)
    others += [each for other in neighbours for each in some(_all(other, library), _NEIGHBOURS, draw)]
    passages = _retrieved(needed, others, draw)
    if len(passages) < _FEWEST:
        return None
    asked_before = neighbours[: draw.randint(2, 3)]
    left_out = draw.choice([passage for passage in passages if passage not in needed])
    dealt = [passage for passage in shuffled(passages, draw) if passage != left_out]
    stored = []
    for start, other in enumerate(asked_before):
        own = [*dealt[start :: len(asked_before)], *other.whole.supporting]
        around = some(other.others, _NEIGHBOURS, draw)
        stored.append(_prompt(other.whole, _retrieved(own, around, draw)))
    return _draft(case, passages, stored, library, draw)


def reorder(library: Library, number: int, draw: random.Random) -> Draft | None:
    """The same passages and the same question as in the one stored prompt, in another order."""
    if (case := _case(library, number)) is None:
        return None
    passages = _retrieved(case.item.whole.supporting, case.item.others, draw)
    if len(passages) < _FEWEST:
        return None
    return _draft(case, passages, [_prompt(case.item.whole, shuffled(passages, draw))], library, draw)


def agent(library: Library, number: int, draw: random.Random) -> Draft | None:
    """
    A transcript in which a figure of an earlier result has changed, with one more step appended.

    The passages that the task needs are not changed; one of them is the appended result. Label `asks`: the
    `task`, or in every third draft the changed `figure`. Label `refetched`: the changed result (`one`) or
    `all` results have a new time.
    """
    cases = [case for case in _cases(library, 2) if len(_changing(case.item)) >= _OPENED - 1]
    if not cases:
        return None
    case = in_turn(cases, number)
    task = case.item.whole
    first, last = shuffled(task.supporting, draw)
    changing = draw.sample(_changing(case.item), _OPENED - 1)
    opened = shuffled([first, *changing], draw)
    refetched, asks = in_turn(("one", "all"), number), in_turn(("task", "task", "figure"), number)
    results = [workload.tool_result(document, draw) for document in opened]
    changed, again, ending = _refigured(changing[0], draw), list(results), workload.tool_result(last, draw)
    for place, document in enumerate(opened):
        if document == changing[0]:
            again[place] = workload.tool_result(changed, draw)
        elif refetched == "all":
            again[place] = workload.tool_result(document, draw)
    if asks == "figure":
        ask, answers = _about_the_figure(changed, changing[0], draw)
        ending = f"{ending}\n\n{ask}"
    else:
        answers = _answers(task, library, draw)
    return Draft(
        source=case.name,
        stored=(_transcript(task, opened, results),),
        prompt=_transcript(task, [*opened, last], [*again, ending]),
        labels={"refetched": refetched, "asks": asks},
        candidates=tuple(f"Done: {answer}." for answer in answers),
    )


def _about_the_figure(new: Passage, old: Passage, draw: random.Random) -> tuple[str, tuple[str, ...]]:
    """A question with the words around the changed figure; its answers: now, before, and two never true."""
    words = new.text.split()
    pairs = enumerate(zip(words, old.text.split(), strict=True))
    place, *both = next((place, now, before) for place, (now, before) in pairs if now != before)
    figures = zip(*(re.findall(r"\d+", word) for word in both), strict=True)
    now, before = next(pair for pair in figures if pair[0] != pair[1])
    words[place] = words[place].replace(now, "___", 1)
    around = " ".join(words[max(0, place - _AROUND) : place + _AROUND + 1])
    never = [str(int(now) + more) for more in draw.sample(range(10, 40), 2)]
    return source_texts.TEXTS["agent_figure"].format(title=new.title, words=around), (now, before, *never)


def _changing(question: MarkedQuestion) -> list[Passage]:
    """Passages that support nothing and have a figure: shortened, one for each title."""
    supporting = {each.title for each in question.whole.supporting}
    short = [
        Passage(each.title, source_texts.shortened(each.text, _LONGEST_OTHER)) for each in question.others
    ]
    by_title = {each.title: each for each in short if _refigured(each, random.Random(0)) != each}
    return [each for title, each in by_title.items() if title not in supporting]


def _refigured(document: Passage, draw: random.Random) -> Passage:
    return Passage(document.title, workload.refigured(document.text, draw, most=1))


def _draft(
    case: Case, passages: Sequence[Passage], stored: Sequence[Messages], library: Library, draw: random.Random
) -> Draft:
    asked = case.item.whole
    return Draft(
        source=case.name,
        stored=tuple(stored),
        prompt=_prompt(asked, passages),
        labels={"hops": len(asked.supporting)},
        candidates=_answers(asked, library, draw),
        reordered=_prompt(asked, shuffled(passages, draw)),
    )


def _prompt(asked: Asked, passages: Sequence[Passage]) -> Messages:
    question = {"role": "user", "content": workload.rag_prompt(asked.text, passages)}
    return workload.RAG_SYSTEM, question


def _transcript(task: Asked, opened: Sequence[Passage], results: Sequence[str]) -> Messages:
    said = [workload.AGENT_SYSTEM, {"role": "user", "content": f"Task: Find out: {task.text}"}]
    for document, result in zip(opened, results, strict=True):
        said.append({"role": "assistant", "content": workload.tool_call(document)})
        said.append({"role": "user", "content": result})
    return tuple(said)


def _case(library: Library, number: int) -> Case | None:
    """One hop, two hops, one hop, ...; cases of one hop from the list's end, so that few sources repeat."""
    hops = 1 + number % 2
    found = _cases(library, hops)[:: -1 if hops == 1 else 1]
    return in_turn(found, number // 2) if found else None


def _cases(library: Library, hops: int) -> list[Case]:
    """
    What this half may ask that needs this many passages.

    A part of a question is asked among all passages of the whole one; it is a source of its own.
    """
    found: dict[str, Case] = {}
    for question in (source.item for source in library.marked):
        for asked in question.steps if hops == 1 else (question.whole,):
            if len(asked.supporting) == hops and _may_ask(library, asked):
                others = tuple(each for each in _all(question, library) if each not in asked.supporting)
                found.setdefault(asked.name, Source(asked.name, MarkedQuestion(asked, (), others)))
    return list(found.values())


def _may_ask(library: Library, asked: Asked) -> bool:
    """Whether the supporting passages are short enough, and all of it belongs to this half."""
    return sum(len(each.text) for each in asked.supporting) <= _MOST_SUPPORTING and library.may_ask(asked)


def _neighbours(library: Library, asked: Asked, draw: random.Random) -> list[MarkedQuestion]:
    """Up to three other questions of the half; not the one of which this one is a part."""
    found = [
        MarkedQuestion(other.whole, (), tuple(filter(library.owns, other.others)))
        for other in (source.item for source in library.marked)
        if asked not in other.all_asked and _may_ask(library, other.whole)
    ]
    return some(found, 3, draw)


def _all(question: MarkedQuestion, library: Library) -> tuple[Passage, ...]:
    """The question's passages that belong to this half."""
    return tuple(filter(library.owns, (*question.whole.supporting, *question.others)))


def _retrieved(needed: Sequence[Passage], others: Sequence[Passage], draw: random.Random) -> list[Passage]:
    """The needed passages and as many others as fit, shuffled."""
    chosen = list(dict.fromkeys(needed))
    for passage in shuffled(others, draw):
        length = sum(len(each.text) for each in chosen) + len(passage.text)
        fits = len(passage.text) <= _LONGEST_OTHER and length <= _MOST_RETRIEVED
        if fits and passage not in chosen:
            chosen.append(passage)
    draw.shuffle(chosen)
    return chosen


def _answers(asked: Asked, library: Library, draw: random.Random) -> tuple[str, ...]:
    """The answer and three of other questions, if possible of its kind; for yes and no, the opposite."""
    right = asked.answer
    if asked.is_yes_or_no:
        return right, {"yes": "no", "no": "yes"}[right.lower()]
    known = {each.answer.lower(): each for source in library.marked for each in source.item.all_asked}
    others = [each.answer for key, each in known.items() if key != right.lower() and not each.is_yes_or_no]
    draw.shuffle(others)
    others.sort(key=lambda other: _kind(other) != _kind(right))
    return right, *others[:3]


def _kind(answer: str) -> str:
    """A year, a number, a date, or text of one, two or more words."""
    if _YEAR.fullmatch(answer):
        return "year"
    if _NUMBER.fullmatch(answer):
        return "number"
    words = re.findall(r"\w+", answer)
    return "date" if any(map(_YEAR.fullmatch, words)) else f"{min(3, len(words))} words"
