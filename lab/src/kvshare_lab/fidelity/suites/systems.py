"""Suites with instructions, tools or answers to compare: `header`, `toolcall` and `judge`."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any, NamedTuple

from kvshare.replay.workloads import sources
from kvshare_lab.fidelity.scenario import Draft, Messages, chat_of
from kvshare_lab.fidelity.suites.library import Library, in_turn, in_turns, shuffled, source_for
from kvshare_lab.fidelity.suites.slots import FORMS, NEUTRAL, TOOLS, Tool, Values, four_answers, fresh
from kvshare_lab.fidelity.suites.slots import SYSTEMS as WORDS

CHANGES = ("nonce", "clock", "effort", "tools", "user")
NUM_ANSWERS = (3, 4, 5)  # to judge

_SYSTEM_PROMPT = (1500, 4000)  # bytes: some 350 to 1,000 tokens
_NUM_NEUTRAL = 4
_NUM_OTHER_TOOLS = 3
_NUM_NOTES = 3  # of some 50 tokens each, behind the calls of the other tools
_NUM_FACTS = 3
_DESCRIBED: Mapping[str, str] = sources.WORDS["tools"]
_SENTENCE = re.compile(r"(?<=[.!?]) ")


class _Body(NamedTuple):
    """A system prompt below the header, a question about it, and its answers, the right one first."""

    source: str
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
    body = _body(library, number, draw)
    asks = "body" if kind == "nonce" else draw.choice(("header", "body"))
    old = _header_values(draw)
    new = {**old, kind: _changed(kind, old, draw)}
    ask, candidates = body.ask, body.answers
    if asks == "header":
        ask, candidates = WORDS["header_asks"][kind], _header_answers(kind, new, old, draw)
    return Draft(
        source=body.source,
        stored=(_with_header(old, body.text, ask),),
        prompt=_with_header(new, body.text, ask),
        labels={"kind": kind, "asks": asks},
        candidates=candidates,
        reordered=None if body.reordered is None else _with_header(new, body.reordered, ask),
    )


def _body(library: Library, number: int, draw: random.Random) -> _Body:
    """Every second one is a published system prompt; the others are made of our own forms."""
    shortest, longest = _SYSTEM_PROMPT
    found = [text for text in library.texts if shortest <= len(text.item.encode()) <= longest]
    if found and number % 2:
        source = source_for(found, number // 2)
        return _Body(source.name, source.item, None, draw.choice(WORDS["header_questions"]), ())
    own = source_for(library.own(FORMS), number // 2)
    form, values = own.item, own.item.values(draw)
    name = draw.choice(sorted(form.slots))
    paragraphs = shuffled([*form.paragraphs, *draw.sample(NEUTRAL, _NUM_NEUTRAL)], draw)
    text, reordered = (
        WORDS["header_body"].format(text="\n\n".join([form.title, *order]).format_map(values))
        for order in (paragraphs, shuffled(paragraphs, draw))
    )
    answers = form.answers(name, values, form.refilled(values, [name], draw), draw)
    return _Body(own.name, text, reordered, form.slots[name].ask, answers)


def _header_values(draw: random.Random) -> dict[str, Any]:
    return {
        "nonce": f"{draw.getrandbits(64):016x}",
        "clock": f"{sources.date(draw)}, {sources.clock(draw)}",
        "effort": draw.choice(WORDS["efforts"]),
        "user": sources.person(draw),
        "tools": tuple(draw.sample(sorted(_DESCRIBED), draw.randint(3, 5))),
    }


def _changed(kind: str, values: Mapping[str, Any], draw: random.Random) -> Any:
    """Another value; of tools, one more, one fewer or another one in front."""
    if kind != "tools":
        return _another(kind, [values[kind]], draw)
    tools: tuple[str, ...] = values["tools"]
    front = draw.choice(sorted({*_DESCRIBED} - {*tools}))
    return draw.choice(((front, *tools), tools[1:], (front, *tools[1:])))


def _another(kind: str, taken: Sequence[str], draw: random.Random) -> str:
    return fresh(lambda: _header_values(draw)[kind], taken, whole=kind != "user")


def _header_answers(
    kind: str, new: Mapping[str, Any], old: Mapping[str, Any], draw: random.Random
) -> tuple[str, ...]:
    if kind == "tools":
        others = sorted({*_DESCRIBED} - {*new["tools"], *old["tools"]})
        return (new["tools"][0], old["tools"][0], *draw.sample(others, 2))
    return four_answers(new[kind], old[kind], lambda found: _another(kind, found, draw))


def _with_header(values: Mapping[str, Any], body: str, ask: str) -> Messages:
    tools = [json.dumps({"name": name, "description": _DESCRIBED[name]}) for name in values["tools"]]
    return chat_of(WORDS["header"], {**values, "tools": "\n".join(tools), "body": body, "ask": ask})


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
    edited, wrong = draw.sample(sorted(tool.slots), 2)
    taken = [value for _, values in done for value in values.values()]
    old = tool.values(draw, taken)
    new = tool.refilled(old, [edited], draw, taken)
    notes = draw.sample(NEUTRAL, _NUM_NOTES)
    before, after = (_transcript(done, notes, tool.request.format_map(values)) for values in (old, new))
    calls = [tool.call(values) for values in (new, old, tool.refilled(new, [wrong], draw))]
    return Draft(
        source=source.name,
        stored=(_with_tools(tools, before),),
        prompt=_with_tools(tools, after),
        labels={"argument": tool.slots[edited].kind},
        candidates=(*calls, others[0].call(done[0][1])),
        expected=calls[0],
        reordered=_with_tools(shuffled(tools, draw), after),
    )


def _transcript(done: Sequence[tuple[Tool, Values]], notes: Sequence[str], request: str) -> Messages:
    """The user's request, other calls that are made before it, notes, and the order to make the call now."""
    requests = [tool.request.format_map(values) for tool, values in done]
    said = [WORDS["toolcall_later"].format(request=request, first=requests[0])]
    following = [*requests[1:], WORDS["toolcall_notes"].format(notes="\n\n".join(notes))]
    for (tool, values), then in zip(done, following, strict=True):
        said += [tool.call(values), WORDS["toolcall_next"].format(result=tool.result, request=then)]
    return in_turns([*said, WORDS["toolcall_confirm"], WORDS["toolcall_go"]])


def _with_tools(tools: Sequence[Tool], transcript: Messages) -> Messages:
    text = WORDS["toolcall_system"].format(tools="\n".join(tool.definition for tool in tools))
    return ({"role": "system", "content": text}, *transcript)


def judge(library: Library, number: int, draw: random.Random) -> Draft | None:
    """
    Answers to one question about a form, one of them right in every value, in another order than before.

    A letter moves with its answer, so that the right letter stays the same.
    """
    num_answers = in_turn(NUM_ANSWERS, number)
    source = source_for(library.own(FORMS), number)
    form = source.item
    sentences = _SENTENCE.split(" ".join([*form.sections, form.figure.text]))
    facts = draw.sample([sentence for sentence in sentences if "{" in sentence], _NUM_FACTS)
    asked_for = [name for name in form.slots if any(f"{{{name}}}" in fact for fact in facts)]
    values = form.values(draw)
    letters = shuffled(ascii_uppercase[:num_answers], draw)
    answers: list[str] = []
    for letter, opening in zip(letters, draw.sample(WORDS["judge_openings"], num_answers), strict=True):
        wrong = draw.sample(asked_for, draw.randint(1, _NUM_FACTS)) if answers else []
        said = " ".join(facts).format_map(form.refilled(values, wrong, draw))
        answers.append(WORDS["judge_answer"].format(letter=letter, opening=opening, facts=said))
    orders, neutral = _orders(answers, draw), draw.choice(NEUTRAL)
    paragraphs = [*(part for part in form.paragraphs if any(fact in part for fact in facts)), neutral]
    text = "\n\n".join([form.title, *paragraphs]).format_map(values)
    parts = {"text": text, "topics": ", ".join(name.replace("_", " ") for name in asked_for)}
    stored, prompt, reordered = (
        chat_of(WORDS["judge"], {**parts, "answers": "\n\n".join(order)}) for order in orders
    )
    return Draft(
        source=source.name,
        stored=(stored,),
        prompt=prompt,
        labels={"num_candidates": num_answers},
        candidates=tuple(letters),
        reordered=reordered,
    )


def _orders(answers: Sequence[str], draw: random.Random) -> list[list[str]]:
    """Three different ones; the first two begin with different answers."""
    found = [shuffled(answers, draw)]
    while len(found) < 3:
        order = shuffled(answers, draw)
        if order not in found and order[0] != found[0][0]:
            found.append(order)
    return found
