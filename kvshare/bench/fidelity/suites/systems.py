"""
Suites with instructions, tools or answers to compare: `header`, `toolcall` and `judge`.

A suite makes the draft of a number, from one source document of the library's half. The same number is the
same draft each time.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from kvshare.bench.fidelity.scenario import Draft, Messages
from kvshare.bench.fidelity.suites.conversations import in_turns
from kvshare.bench.fidelity.suites.drawing import four_answers, fresh, in_turn, shuffled, source_for
from kvshare.bench.fidelity.suites.library import Library
from kvshare.bench.fidelity.suites.own_forms import FORMS, NEUTRAL, TOOLS, Form, Tool, Values
from kvshare.bench.fidelity.texts import texts_beside
from kvshare.replay.requests import Message
from kvshare.replay.workloads import sources

WORDS = texts_beside(__file__, "systems.yaml")
CHANGES = ("nonce", "clock", "effort", "tools", "user")
NUM_ANSWERS = (3, 4, 5)  # to judge

_SYSTEM_PROMPT = (1500, 4000)  # bytes: some 350 to 1,000 tokens
_NUM_NEUTRAL = 4
_NUM_OTHER_TOOLS = 3
_NUM_NOTES = 3  # of some 50 tokens each, behind the calls of the other tools
_NUM_FACTS = 3
_SENTENCE = re.compile(r"(?<=[.!?]) ")


@dataclass(frozen=True, slots=True)
class _Body:
    """A system prompt below the header, a question about it, and its answers, the right one first."""

    text: str
    reordered: str | None
    ask: str
    answers: tuple[str, ...]


def header(library: Library, number: int, draw: random.Random) -> Draft | None:
    """
    One line above a long system prompt changes. Label `asks`: the question is about that line (`header`,
    never about the nonce) or about the text below (`body`), whose answer does not change.
    """
    kind = in_turn(CHANGES, number)
    source, body = _body(library, number, draw)
    asks = "body" if kind == "nonce" else draw.choice(("header", "body"))
    old = _header_values(draw)
    new = {**old, kind: _changed(kind, old, draw)}
    ask, candidates = body.ask, body.answers
    if asks == "header":
        ask, candidates = WORDS["header_asks"][kind], _header_answers(kind, new, old, draw)
    return Draft(
        source=source,
        stored=(_with_header(old, body.text, ask),),
        prompt=_with_header(new, body.text, ask),
        labels={"kind": kind, "asks": asks},
        candidates=candidates,
        reordered=None if body.reordered is None else _with_header(new, body.reordered, ask),
    )


def _body(library: Library, number: int, draw: random.Random) -> tuple[str, _Body]:
    """Every second one is a published system prompt; the others are made of our own forms."""
    shortest, longest = _SYSTEM_PROMPT
    found = [text for text in library.texts if shortest <= len(text.item.encode()) <= longest]
    if found and number % 2:
        source = source_for(found, number // 2)
        return source.name, _Body(source.item, None, draw.choice(WORDS["header_questions"]), ())
    own = source_for(library.own(FORMS), number // 2)
    form, values = own.item, own.item.values(draw)
    name = draw.choice(sorted(form.slots))
    paragraphs = shuffled([*form.paragraphs, *draw.sample(NEUTRAL, _NUM_NEUTRAL)], draw)
    text, reordered = (
        WORDS["header_body"].format(text="\n\n".join([form.title, *order]).format_map(values))
        for order in (paragraphs, shuffled(paragraphs, draw))
    )
    answers = form.answers(name, values, form.refilled(values, [name], draw), draw)
    return own.name, _Body(text, reordered, form.slots[name].ask, answers)


def _header_values(draw: random.Random) -> dict[str, Any]:
    return {
        "nonce": f"{draw.getrandbits(64):016x}",
        "clock": f"{sources.date(draw)}, {sources.clock(draw)}",
        "effort": draw.choice(WORDS["efforts"]),
        "user": sources.person(draw),
        "tools": tuple(draw.sample(sorted(sources.WORDS["tools"]), draw.randint(3, 5))),
    }


def _changed(kind: str, values: Mapping[str, Any], draw: random.Random) -> Any:
    """Another value; of tools, one more, one fewer or another one in front."""
    if kind == "tools":
        tools: tuple[str, ...] = values["tools"]
        front = draw.choice(sorted(set(sources.WORDS["tools"]) - set(tools)))
        return draw.choice(((front, *tools), tools[1:], (front, *tools[1:])))
    return fresh(lambda: _header_values(draw)[kind], [values[kind]], whole=kind != "user")


def _header_answers(
    kind: str, new: Mapping[str, Any], old: Mapping[str, Any], draw: random.Random
) -> tuple[str, ...]:
    if kind == "tools":
        first = [new["tools"][0], old["tools"][0]]
        return (*first, *draw.sample(sorted({*sources.WORDS["tools"]} - {*new["tools"], *old["tools"]}), 2))

    def another(found: Sequence[str]) -> str:
        return fresh(lambda: _header_values(draw)[kind], found, whole=kind != "user")

    return four_answers(new[kind], old[kind], another)


def _with_header(values: Mapping[str, Any], body: str, ask: str) -> Messages:
    described = sources.WORDS["tools"]
    tools = [json.dumps({"name": name, "description": described[name]}) for name in values["tools"]]
    top = WORDS["header"].format_map({**values, "tools": "\n".join(tools)})
    return {"role": "system", "content": f"{top}\n\n{body}"}, {"role": "user", "content": ask}


def toolcall(library: Library, number: int, draw: random.Random) -> Draft | None:
    """
    A call whose arguments the user named some turns ago; one of them differs from the stored prompt.

    The turns in between, three other calls and some notes, are equal in both and half of the prompt.
    """
    own = library.own(TOOLS)
    source = source_for(own, number)
    tool = source.item
    others = draw.sample([other.item for other in own if other is not source], _NUM_OTHER_TOOLS)
    done = [(other, other.values(draw)) for other in others]
    tools = shuffled([tool, *others], draw)
    edited, wrong = draw.sample(sorted(tool.arguments), 2)
    taken = [value for _, values in done for value in values.values()]
    old = tool.values(draw, taken)
    new = tool.changed(old, edited, draw, taken=taken)
    notes = draw.sample(NEUTRAL, _NUM_NOTES)
    transcript = [_transcript(done, notes, tool.request.format_map(values)) for values in (old, new)]
    return Draft(
        source=source.name,
        stored=(_with_tools(tools, transcript[0]),),
        prompt=_with_tools(tools, transcript[1]),
        labels={"argument": tool.arguments[edited].kind},
        candidates=(
            tool.call(new),
            tool.call(old),
            tool.call(tool.changed(new, wrong, draw)),
            others[0].call(done[0][1]),
        ),
        expected=tool.call(new),
        reordered=_with_tools(shuffled(tools, draw), transcript[1]),
    )


def _transcript(done: Sequence[tuple[Tool, Values]], notes: Sequence[str], request: str) -> Messages:
    """The user's request, other calls that are made before it, notes, and the order to make the call now."""
    requests = [tool.request.format_map(values) for tool, values in done]
    said = [WORDS["toolcall_later"].format(request=request, first=requests[0])]
    following = [*requests[1:], WORDS["toolcall_notes"].format(notes="\n\n".join(notes))]
    for (tool, values), then in zip(done, following, strict=True):
        said += [tool.call(values), WORDS["toolcall_next"].format(result=tool.result, request=then)]
    said += [WORDS["toolcall_confirm"], WORDS["toolcall_go"]]
    return in_turns(said)


def _with_tools(tools: Sequence[Tool], transcript: Messages) -> Messages:
    text = WORDS["toolcall_system"].format(tools="\n".join(tool.definition for tool in tools))
    system: Message = {"role": "system", "content": text}
    return (system, *transcript)


def judge(library: Library, number: int, draw: random.Random) -> Draft | None:
    """
    Answers to one question about a form, one of them right in every value, in another order than before.

    A letter moves with its answer, so that the right letter stays the same.
    """
    num_answers = in_turn(NUM_ANSWERS, number)
    source = source_for(library.own(FORMS), number)
    form = source.item
    facts = draw.sample(_facts(form), _NUM_FACTS)
    values = form.values(draw)
    letters = shuffled(ascii_uppercase[:num_answers], draw)
    answers = _answers(form, facts, values, letters, draw)
    orders, neutral = _orders(answers, draw), draw.choice(NEUTRAL)
    stored, prompt, reordered = (_judged(form, facts, values, order, neutral) for order in orders)
    return Draft(
        source=source.name,
        stored=(stored,),
        prompt=prompt,
        labels={"num_candidates": num_answers},
        candidates=tuple(letters),
        reordered=reordered,
    )


def _facts(form: Form) -> list[str]:
    """The sentences with slots."""
    text = " ".join([*form.sections, form.figure.text])
    return [sentence for sentence in _SENTENCE.split(text) if "{" in sentence]


def _slots_of(form: Form, facts: Sequence[str]) -> list[str]:
    return [name for name in form.slots if any(f"{{{name}}}" in fact for fact in facts)]


def _answers(
    form: Form, facts: Sequence[str], values: Values, letters: Sequence[str], draw: random.Random
) -> list[str]:
    """One for each letter, the first one right, the others wrong in one to three values."""
    slots = _slots_of(form, facts)
    made: list[str] = []
    openings = draw.sample(WORDS["judge_openings"], len(letters))
    for letter, opening in zip(letters, openings, strict=True):
        wrong = draw.sample(slots, draw.randint(1, _NUM_FACTS)) if made else []
        said = " ".join(facts).format_map(form.refilled(values, wrong, draw))
        made.append(WORDS["judge_answer"].format(letter=letter, opening=opening, facts=said))
    return made


def _orders(answers: Sequence[str], draw: random.Random) -> list[list[str]]:
    """Three different ones; the first two begin with different answers."""
    first = shuffled(answers, draw)
    found = [first]
    while len(found) < 3:
        order = shuffled(answers, draw)
        if order not in found and order[0] != first[0]:
            found.append(order)
    return found


def _judged(form: Form, facts: Sequence[str], values: Values, order: Sequence[str], neutral: str) -> Messages:
    """The paragraphs with the facts and a neutral one, the question and the answers."""
    paragraphs = [*(part for part in form.paragraphs if any(fact in part for fact in facts)), neutral]
    asked_for = _slots_of(form, facts)
    prompt = WORDS["judge_prompt"].format(
        text="\n\n".join([form.title, *paragraphs]).format_map(values),
        topics=", ".join(name.replace("_", " ") for name in asked_for),
        answers="\n\n".join(order),
    )
    return {"role": "system", "content": WORDS["judge_system"]}, {"role": "user", "content": prompt}
