"""
Suites made from forms: `template`, `derived`, `negation` and `needle`.

A suite makes the draft of a number: the same one each time, from one source document of the library's half.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvshare.bench.fidelity.scenario import Draft, Messages
from kvshare.bench.fidelity.suites.found_forms import (
    filled,
    found_answers,
    found_forms,
    slot_value,
    typed_slots,
)
from kvshare.bench.fidelity.suites.library import Library, Source
from kvshare.bench.fidelity.suites.own_forms import (
    FORMS,
    NEUTRAL,
    WORDS,
    Form,
    Values,
    asked,
    in_turn,
    shuffled,
    source_for,
)
from kvshare.replay.workloads import sources

DISTANCES = (0, 50, 250)  # tokens, about
CHANGES = ("decision", "number", "name", "date")
TASKS = ("needle", "record")
ASKS = ("edited", "other")

_NUM_GAPS = {0: 0, 50: 1, 250: 5}  # neutral paragraphs, of some 48 tokens each
_NUM_NEUTRAL = 6  # in all: a prompt is equally long at each distance
_MAX_CHANGED = 5
_SUMMARY = 0.5  # of the drafts that ask for something else
_SECOND_STORED = 0.3  # of the drafts have two stored prompts
_PASSAGE = (1100, 4000)  # characters
_RECORD_SLOTS = 4
_SENTENCE = re.compile(r"(?<=[.!?]) ")


def template(library: Library, number: int, draw: random.Random) -> Draft | None:
    """
    The same form with other values in one to five slots; every second one is a found prompt.

    What is asked is one of these values, computed anew anyway, or (label `asks`) something `other`: a
    value that stayed, or a summary, which has no candidates.
    """
    found = found_forms(library) if number % 2 else []
    if found:
        return _found_template(source_for(found, number // 2), number // 2, draw)
    source = source_for(library.own(FORMS), number // 2)
    form = source.item
    old = form.values(draw)
    changed = draw.sample(sorted(form.slots), draw.randint(1, _MAX_CHANGED))
    new = form.refilled(old, changed, draw)
    page = _page(form, draw, num_neutral=draw.randint(2, 5))
    asks = in_turn(ASKS, number // 2)
    name, before = changed[0], old
    if asks == "other":
        name = draw.choice(sorted(set(form.slots) - set(changed)))
        before = form.refilled(new, [name], draw)
    ask, candidates = form.slots[name].ask, form.answers(name, new, before, draw)
    if asks == "other" and draw.random() < _SUMMARY:
        page, ask, candidates = replace(page, system=WORDS["summary_system"]), WORDS["summary"], ()
    stored = [page.messages(old, ask)]
    if draw.random() < _SECOND_STORED:
        stored.append(page.messages(form.values(draw, taken=[*new.values(), *old.values()]), ask))
    return Draft(
        source=source.name,
        stored=tuple(stored),
        prompt=page.messages(new, ask),
        labels={"num_slots": len(changed), "asks": asks},
        candidates=candidates,
        reordered=page.reordered(new, ask, draw),
    )


def derived(library: Library, number: int, draw: random.Random) -> Draft | None:
    """
    A changed figure and, `distance` tokens behind it, a sentence that is the same in both prompts and means
    another thing because of it: only both together answer what is asked (after arXiv:2609.17983).

    Three numbers in a row are one text, in which only the figure stands elsewhere; so `draw` is not used.
    """
    distance, number = in_turn(DISTANCES, number), number // len(DISTANCES)
    draw = random.Random(f"derived:{library.half}:{number}")
    source = source_for(library.own(FORMS), number)
    form, limit = source.item, source.item.figure.limit
    kind = in_turn(("same", "limit"), number)
    old = form.values(draw)
    new = form.refilled(old, [form.figure.slot], draw)
    while kind == "limit" and len({limit.answer(values[form.figure.slot]) for values in (new, old)}) == 1:
        new = form.refilled(old, [form.figure.slot], draw)
    page = _page_with_gap(form, limit.text if kind == "limit" else form.figure.same, distance, draw)
    ask = limit.ask if kind == "limit" else form.figure.same_ask
    candidates = form.answers(form.figure.slot, new, old, draw)
    if kind == "limit":
        candidates = (*(limit.answer(values[form.figure.slot]) for values in (new, old)), *limit.others)
    return Draft(
        source=source.name,
        stored=(page.messages(old, ask),),
        prompt=page.messages(new, ask),
        labels={"distance": distance, "kind": kind},
        candidates=candidates,
        reordered=page.reordered(new, ask, draw),
    )


def negation(library: Library, number: int, draw: random.Random) -> Draft | None:
    """One decision of a text is the opposite, or one number, name or date is another one."""
    kind = in_turn(CHANGES, number)
    source = source_for(library.own(FORMS), number)
    form = source.item
    name = draw.choice(form.of_kind(kind))
    old = form.values(draw)
    new = form.refilled(old, [name], draw)
    if kind == "decision":
        was, is_now = draw.sample(form.slots[name].options[:2], 2)
        old, new = {**old, name: was}, {**old, name: is_now}
    page, ask = _page(form, draw, num_neutral=draw.randint(2, 5)), form.slots[name].ask
    return Draft(
        source=source.name,
        stored=(page.messages(old, ask),),
        prompt=page.messages(new, ask),
        labels={"kind": kind},
        candidates=form.answers(name, new, old, draw),
        reordered=page.reordered(new, ask, draw),
    )


def needle(library: Library, number: int, draw: random.Random) -> Draft | None:
    """Seven digits in a text about something else (after RULER), or a value of a single record."""
    make = {"needle": _needle, "record": _record}[in_turn(TASKS, number)]
    return make(library, number // len(TASKS), draw)


def _needle(library: Library, number: int, draw: random.Random) -> Draft:
    """Of every two, one lies in a form and one in a passage, where there are passages of that length."""
    source, haystack = _haystack(library, number, draw)
    word = draw.choice(WORDS["needle_words"])
    new, old, *others = (str(digits) for digits in draw.sample(range(1_000_000, 10_000_000), 4))
    place = draw.randrange(len(haystack))
    sentences = _SENTENCE.split(haystack[place])
    sentences.insert(draw.randint(1, len(sentences)), WORDS["needle_line"].format(word=word, value="{value}"))
    page = _Page("", [*haystack[:place], " ".join(sentences), *haystack[place + 1 :]], WORDS["needle_system"])
    ask = WORDS["needle_ask"].format(word=word)
    return Draft(
        source=source,
        stored=(page.messages({"value": old}, ask),),
        prompt=page.messages({"value": new}, ask),
        labels={"kind": "needle"},
        candidates=(new, old, *others),
        expected=new,
        reordered=page.reordered({"value": new}, ask, draw),
    )


def _haystack(library: Library, number: int, draw: random.Random) -> tuple[str, list[str]]:
    """Paragraphs without slots, and the source document's name."""
    shortest, longest = _PASSAGE
    passages = [found for found in library.passages if shortest <= len(found.item.text.encode()) <= longest]
    if passages and number % 2:
        passage = source_for(passages, number // 2)
        title, text = passage.item.title, passage.item.text
        return passage.name, [_bare(f"{title}. {text}"), *draw.sample(NEUTRAL, 2)]
    source = source_for(library.own(FORMS), number // 2)
    values = source.item.values(draw)
    told = [paragraph.format_map(values) for paragraph in source.item.paragraphs]
    return source.name, shuffled([*told, *draw.sample(NEUTRAL, 3)], draw)


def _bare(text: str) -> str:
    """Without braces, which would be slots."""
    return text.replace("{", "(").replace("}", ")")


def _record(library: Library, number: int, draw: random.Random) -> Draft:
    source = source_for(library.own(FORMS), number)
    form = source.item
    names = draw.sample(sorted(form.slots), _RECORD_SLOTS)
    old = form.values(draw)
    new = form.refilled(old, [asked_for := draw.choice(names)], draw)
    lines = [WORDS["record_line"].format(label=_label(name), value=f"{{{name}}}") for name in names]
    paragraphs = shuffled([f"{form.title}. {', '.join(lines)}.", *draw.sample(NEUTRAL, _NUM_NEUTRAL)], draw)
    page = _Page("", paragraphs, WORDS["record_system"])
    ask = WORDS["record_ask"].format(label=_label(asked_for))
    return Draft(
        source=source.name,
        stored=(page.messages(old, ask),),
        prompt=page.messages(new, ask),
        labels={"kind": "record"},
        candidates=form.answers(asked_for, new, old, draw),
        expected=new[asked_for],
        reordered=page.reordered(new, ask, draw),
    )


def _label(name: str) -> str:
    return name.replace("_", " ")


@dataclass(frozen=True, slots=True)
class _Page:
    """Paragraphs with open slots under a title; their order means nothing."""

    title: str  # none: empty
    paragraphs: Sequence[str]
    system: str

    def messages(self, values: Values, ask: str) -> Messages:
        """With these values and this question behind it."""
        told = [paragraph.format_map(values) for paragraph in self.paragraphs]
        return asked([self.title, *told] if self.title else told, ask, system=self.system)

    def reordered(self, values: Values, ask: str, draw: random.Random) -> Messages:
        """The same in another order."""
        return replace(self, paragraphs=shuffled(self.paragraphs, draw)).messages(values, ask)


def _page(form: Form, draw: random.Random, *, num_neutral: int) -> _Page:
    """A form's paragraphs among neutral ones, in an order drawn once."""
    paragraphs = [*form.paragraphs, *draw.sample(NEUTRAL, num_neutral)]
    return _Page(form.title, shuffled(paragraphs, draw), WORDS["system"])


def _page_with_gap(form: Form, follows: str, distance: int, draw: random.Random) -> _Page:
    """
    What follows from the figure is `distance` tokens behind it, and at the same place for each distance:
    neutral text that does not lie between them lies before the figure, and half of the form or more behind.
    """
    sections, neutral = shuffled(form.sections, draw), draw.sample(NEUTRAL, _NUM_NEUTRAL)
    place = draw.randint(0, len(sections) // 2)
    num_before = _NUM_NEUTRAL - _NUM_GAPS[distance]
    head = form.figure.text.partition(".")[0]
    continued = WORDS["continued"].format(head=head, text=follows)
    figure = "\n\n".join([form.figure.text, *neutral[num_before:], continued])
    paragraphs = [*sections[:place], *neutral[:num_before], figure, *sections[place:]]
    return _Page(form.title, paragraphs, WORDS["system"])


def _found_template(source: Source[str], number: int, draw: random.Random) -> Draft | None:
    """None: every old value still stands somewhere in the new text."""
    names = typed_slots(source.item)
    old: dict[str, str] = {}
    for name in names:
        old[name] = slot_value(name, draw, old.values())
    changed = draw.sample(names, draw.randint(1, min(_MAX_CHANGED, len(names))))
    new = dict(old)
    for name in changed:
        new[name] = slot_value(name, draw, [*old.values(), *new.values()])
    choice = draw.choice(sources.WORDS["choices"])
    text, before = (filled(source.item, values, choice) for values in (new, old))
    gone = [name for name in changed if old[name] not in text]
    if not gone:
        return None
    asks, ask = in_turn(ASKS, number), WORDS["summary"]
    candidates: tuple[str, ...] = ()
    if asks == "edited":
        ask = WORDS["library_question"].format(slot=_label(gone[0]).strip().lower())
        candidates = found_answers(gone[0], new, old, draw)
    return Draft(
        source=source.name,
        stored=(_one_message(before, ask),),
        prompt=_one_message(text, ask),
        labels={"num_slots": len(changed), "asks": asks},
        candidates=candidates,
    )


def _one_message(text: str, ask: str) -> Messages:
    return ({"role": "user", "content": f"{text}\n\n{ask}"},)
