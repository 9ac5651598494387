"""Suites made from forms (slots.py): `template`, `derived`, `negation`, and `needle`, also from passages."""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvshare.replay.workloads import sources
from kvshare_lab.fidelity.scenario import Draft, Messages
from kvshare_lab.fidelity.suites import slots
from kvshare_lab.fidelity.suites.library import Library, Source, in_turn, shuffled, source_for
from kvshare_lab.fidelity.suites.slots import FORMS, NEUTRAL, WORDS, Form, Values

DISTANCES = (0, 50, 250)  # tokens, about
CHANGES = ("decision", "number", "name", "date")
ASKS = ("edited", "other")

_NUM_GAPS = {0: 0, 50: 1, 250: 5}  # neutral paragraphs of some 48 tokens each, by distance
_NUM_NEUTRAL = 6  # in all: a prompt is equally long at each distance
_MAX_CHANGED = 5
_SUMMARY = 0.5  # of the drafts that ask for something other than the edit
_SECOND_STORED = 0.3  # of the drafts: they have two stored prompts
_PASSAGE = (1100, 4000)  # characters
_RECORD_SLOTS = 4
_SENTENCE = re.compile(r"(?<=[.!?]) ")


def template(library: Library, number: int, draw: random.Random) -> Draft | None:
    """
    The same form with other values in one to five slots; every second form is a published prompt.

    Label `asks`: `edited` for one of these values, which is computed anyway; `other` for a value that did not
    change, or for a summary. Summaries have no candidates.
    """
    asks, turn = in_turn(ASKS, number // 2), number // 2
    if number % 2 and (found := slots.published_forms(library)):
        return _published_template(source_for(found, turn), asks, draw)
    source = source_for(library.own(FORMS), turn)
    form = source.item
    old, new, changed = _edited(form, draw)
    page = _page(form, draw)
    name, before = changed[0], old
    if asks == "other":
        name = draw.choice(sorted(set(form.slots) - set(changed)))
        before = form.refilled(new, [name], draw)
    ask, candidates = form.slots[name].ask, form.answers(name, new, before, draw)
    if asks == "other" and draw.random() < _SUMMARY:
        page, ask, candidates = replace(page, system=WORDS["summary_system"]), WORDS["summary"], ()
    values = [new, old]
    if draw.random() < _SECOND_STORED:
        values.append(form.values(draw, [*new.values(), *old.values()]))
    labels: dict[str, str | int] = {"num_slots": len(changed), "asks": asks}
    return page.draft(source.name, values, ask, candidates, draw, labels)


def _edited(form: slots.Slotted, draw: random.Random) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Values of a form, the same with others in one to five slots, and the names of these."""
    old = form.values(draw)
    changed = draw.sample(sorted(form.slots), draw.randint(1, min(_MAX_CHANGED, len(form.slots))))
    return old, form.refilled(old, changed, draw), changed


def _published_template(source: Source[slots.PublishedForm], asks: str, draw: random.Random) -> Draft | None:
    """None where the new text still contains every old value."""
    form = source.item
    old, new, changed = _edited(form, draw)
    choice = draw.choice(sources.WORDS["choices"])
    text, before = (form.filled(values, choice) for values in (new, old))
    gone = [name for name in changed if old[name] not in text]
    if not gone:
        return None
    ask: str = WORDS["summary"]
    candidates: tuple[str, ...] = ()
    if asks == "edited":
        ask = WORDS["library_question"].format(slot=_label(gone[0]).strip().lower())
        candidates = form.answers(gone[0], new, old, draw)
    stored, prompt = (({"role": "user", "content": f"{each}\n\n{ask}"},) for each in (before, text))
    return Draft(
        source=source.name,
        stored=(stored,),
        prompt=prompt,
        labels={"num_slots": len(changed), "asks": asks},
        candidates=candidates,
    )


def derived(library: Library, number: int, draw: random.Random) -> Draft | None:
    """
    A changed figure and, `distance` tokens behind it, a sentence that is equal in both prompts but means
    something else because of the figure: the question needs both (after arXiv:2609.17983).

    Three numbers in a row are one text in which only the figure's place differs: the text is drawn by a seed
    of its own.
    """
    distance, number = in_turn(DISTANCES, number), number // len(DISTANCES)
    draw = random.Random(f"derived:{library.half}:{number}")
    source, kind = source_for(library.own(FORMS), number), in_turn(("same", "limit"), number)
    form, figure, limit = source.item, source.item.figure, source.item.figure.limit
    old = form.values(draw)
    new = form.refilled(old, [figure.slot], draw)
    while kind == "limit" and limit.answer(new[figure.slot]) == limit.answer(old[figure.slot]):
        new = form.refilled(old, [figure.slot], draw)
    follows, ask = (limit.text, limit.ask) if kind == "limit" else (figure.same, figure.same_ask)
    page = _page_with_gap(form, follows, distance, draw)
    candidates = form.answers(figure.slot, new, old, draw)
    if kind == "limit":
        candidates = (*(limit.answer(values[figure.slot]) for values in (new, old)), *limit.others)
    return page.draft(source.name, [new, old], ask, candidates, draw, {"distance": distance, "kind": kind})


def negation(library: Library, number: int, draw: random.Random) -> Draft | None:
    """One decision of a text becomes its opposite, or one number, name or date changes."""
    kind = in_turn(CHANGES, number)
    source = source_for(library.own(FORMS), number)
    form = source.item
    name = draw.choice([name for name, slot in form.slots.items() if slot.kind == kind])
    old = form.values(draw)
    new = form.refilled(old, [name], draw)
    if kind == "decision":
        was, is_now = draw.sample(form.slots[name].options[:2], 2)
        old, new = {**old, name: was}, {**old, name: is_now}
    page, ask = _page(form, draw), form.slots[name].ask
    candidates = form.answers(name, new, old, draw)
    return page.draft(source.name, [new, old], ask, candidates, draw, {"kind": kind})


def needle(library: Library, number: int, draw: random.Random) -> Draft | None:
    """A number of seven digits in a text about something else (after RULER), or a value of a record."""
    make = in_turn((_needle, _record), number)
    return make(library, number // 2, draw)


def _needle(library: Library, number: int, draw: random.Random) -> Draft:
    """Every second needle is in a passage, if any has the right length; the others are in forms."""
    source, haystack = _haystack(library, number, draw)
    word = draw.choice(WORDS["needle_words"])
    new, old, *others = (str(digits) for digits in draw.sample(range(1_000_000, 10_000_000), 4))
    place = draw.randrange(len(haystack))
    sentences = _SENTENCE.split(haystack[place])
    sentences.insert(draw.randint(1, len(sentences)), WORDS["needle_line"].format(word=word, value="{value}"))
    haystack[place] = " ".join(sentences)
    page, ask = _Page("", haystack, WORDS["needle_system"]), WORDS["needle_ask"].format(word=word)
    values = [{"value": new}, {"value": old}]
    return page.draft(source, values, ask, (new, old, *others), draw, {"kind": "needle"}, is_exact=True)


def _haystack(library: Library, number: int, draw: random.Random) -> tuple[str, list[str]]:
    """The source document's name, and its paragraphs without slots."""
    shortest, longest = _PASSAGE
    passages = [found for found in library.passages if shortest <= len(found.item.text.encode()) <= longest]
    if passages and number % 2:
        passage = source_for(passages, number // 2)
        title, text = passage.item.title, passage.item.text
        bare = f"{title}. {text}".replace("{", "(").replace("}", ")")  # braces would be slots
        return passage.name, [bare, *draw.sample(NEUTRAL, 2)]
    source = source_for(library.own(FORMS), number // 2)
    values = source.item.values(draw)
    written = [paragraph.format_map(values) for paragraph in source.item.paragraphs]
    return source.name, shuffled([*written, *draw.sample(NEUTRAL, 3)], draw)


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
    candidates = form.answers(asked_for, new, old, draw)
    return page.draft(source.name, [new, old], ask, candidates, draw, {"kind": "record"}, is_exact=True)


def _label(name: str) -> str:
    return name.replace("_", " ")


@dataclass(frozen=True, slots=True)
class _Page:
    """Paragraphs with open slots under a title; they can be read in any order."""

    title: str  # may be empty
    paragraphs: Sequence[str]
    system: str

    def messages(self, values: Values, ask: str) -> Messages:
        """A prompt with these values and this question at the end."""
        parts = [paragraph.format_map(values) for paragraph in self.paragraphs]
        parts = [*([self.title] if self.title else []), *parts, WORDS["question"].format(ask=ask)]
        return {"role": "system", "content": self.system}, {"role": "user", "content": "\n\n".join(parts)}

    def draft(
        self,
        source: str,
        values: Sequence[Values],
        ask: str,
        candidates: tuple[str, ...],
        draw: random.Random,
        labels: Mapping[str, str | int],
        *,
        is_exact: bool = False,
    ) -> Draft:
        """
        A draft whose prompts, the new one first, differ in their values alone; another order is drawn too.

        `is_exact`: an answer must contain the first candidate.
        """
        reordered = replace(self, paragraphs=shuffled(self.paragraphs, draw))
        prompt, *stored = (self.messages(each, ask) for each in values)
        return Draft(
            source=source,
            stored=tuple(stored),
            prompt=prompt,
            labels=labels,
            candidates=candidates,
            expected=candidates[0] if is_exact else None,
            reordered=reordered.messages(values[0], ask),
        )


def _page(form: Form, draw: random.Random) -> _Page:
    """A form's paragraphs among two to five neutral ones, in an order drawn once."""
    paragraphs = [*form.paragraphs, *draw.sample(NEUTRAL, draw.randint(2, 5))]
    return _Page(form.title, shuffled(paragraphs, draw), WORDS["system"])


def _page_with_gap(form: Form, follows: str, distance: int, draw: random.Random) -> _Page:
    """
    What follows from the figure is `distance` tokens behind it, and at the same place for each distance: the
    neutral text that is not between them is before the figure. Half of the form or more comes after both.
    """
    sections, neutral = shuffled(form.sections, draw), draw.sample(NEUTRAL, _NUM_NEUTRAL)
    place = draw.randint(0, len(sections) // 2)
    num_before = _NUM_NEUTRAL - _NUM_GAPS[distance]
    head = form.figure.text.partition(".")[0]
    continued = WORDS["continued"].format(head=head, text=follows)
    figure = "\n\n".join([form.figure.text, *neutral[num_before:], continued])
    paragraphs = [*sections[:place], *neutral[:num_before], figure, *sections[place:]]
    return _Page(form.title, paragraphs, WORDS["system"])
