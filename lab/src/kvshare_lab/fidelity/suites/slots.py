"""
Texts with slots, and values for these that cannot be confused with each other: the project's forms
(forms.yaml and forms/) and tools (systems.yaml), whose keys are the fields of the classes here; published
prompts.
"""

import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from kvshare.replay.workloads import forms, sources
from kvshare_lab.fidelity.suites.library import Library, Source, texts

Values = Mapping[str, str]  # by slot

WORDS = texts("forms")
SYSTEMS = texts("systems")
NEUTRAL: Sequence[str] = WORDS["neutral"]

_MAX_TRIES = 1000  # to draw a value that is not taken
_FIXED = (1400, 4500)  # bytes of a published text outside its slots, at least, and with them, at most
_DRAWN: Mapping[str, Callable[[random.Random], str]] = {
    "name": sources.person,
    "date": sources.date,
    "place": lambda draw: draw.choice(sources.PLACES),
}


def fresh(make: Callable[[], str], taken: Iterable[str], *, whole: bool = True) -> str:
    """
    The first value made that neither is contained in a taken one nor contains one, counted in words.

    Without `whole`, not even one word may be shared.
    Raises:  ValueError if 1,000 values are all taken
    """
    others = [set(other.split()) for other in taken]
    for _ in range(_MAX_TRIES):
        value = make()
        words = set(value.split())
        if not any((words <= other or other <= words) if whole else words & other for other in others):
            return value
    raise ValueError(f"{_MAX_TRIES} tries brought nothing that is not among {len(others)} values")


def four_answers(right: str, stale: str, another: Callable[[Sequence[str]], str]) -> tuple[str, ...]:
    """The right answer, the stored prompt's and two wrong ones; `another` is called with those so far."""
    third = another([right, stale])
    return right, stale, third, another([right, stale, third])


class Slot(BaseModel, frozen=True):
    """A place in a text that is filled differently each time, and the question that it answers."""

    kind: str  # name, place, date, number or decision
    ask: str = ""
    least: int = 0  # of a number
    most: int = -1
    step: int = 1
    options: Sequence[str] = ()  # of a decision; of a form's, the first two are opposites

    @property
    def numbers(self) -> range:
        """From least to most; empty if the slot is no number."""
        return range(self.least, self.most + 1, self.step)

    def value(self, draw: random.Random, taken: Iterable[str]) -> str:
        """A value that cannot be confused with a taken one; names do not even share a word."""

        def make() -> str:
            if self.kind in _DRAWN:
                return _DRAWN[self.kind](draw)
            return str(draw.choice(self.options or self.numbers))

        return fresh(make, taken, whole=self.kind != "name")


class PublishedSlot(Slot, frozen=True):
    """A slot of a published text: its kind is its name there."""

    def value(self, draw: random.Random, taken: Iterable[str]) -> str:
        """A value that fits the name and cannot be confused with a taken one."""
        return fresh(lambda: sources.value_for(self.kind, draw), taken)


class Slotted(BaseModel, frozen=True):
    slots: Mapping[str, Slot]

    @property
    def reserved(self) -> Sequence[str]:
        """Values that no slot gets, as they stand in the text."""
        return ()

    def values(self, draw: random.Random, taken: Iterable[str] = ()) -> dict[str, str]:
        return self.refilled({}, self.slots, draw, taken)

    def refilled(
        self, values: Values, names: Iterable[str], draw: random.Random, taken: Iterable[str] = ()
    ) -> dict[str, str]:
        """The values with other ones in the named slots, none of which was there before or is taken."""
        found = dict(values)
        used = [*taken, *self.reserved, *found.values()]
        for name in names:
            found[name] = self.slots[name].value(draw, used)
            used.append(found[name])
        return found

    def answers(self, name: str, new: Values, old: Values, draw: random.Random) -> tuple[str, ...]:
        """To the question of a slot: the new value, the old one, and two that are in neither text."""
        slot = self.slots[name]
        others = [] if slot.options else [*new.values(), *old.values()]
        return four_answers(new[name], old[name], lambda found: slot.value(draw, [*found, *others]))


class Limit(BaseModel, frozen=True):
    """A rule that turns the figure into one of two answers, both in its text."""

    at: int
    text: str
    ask: str
    over: str  # right from `at` on
    under: str
    others: Sequence[str]  # answers that are never right

    def answer(self, value: str) -> str:
        return self.over if int(value) >= self.at else self.under


class Figure(BaseModel, frozen=True):
    """The sentence with the number from which something follows. `same`: a sentence about an equal number."""

    slot: str
    text: str
    same: str
    same_ask: str
    limit: Limit


class Form(Slotted, frozen=True):
    """Paragraphs that can be read in any order; each slot is in one of them or in the figure, once."""

    title: str
    sections: Sequence[str]
    figure: Figure

    @property
    def paragraphs(self) -> list[str]:
        """All of them, with open slots."""
        return [*self.sections, f"{self.figure.text} {self.figure.same}"]

    @property
    def reserved(self) -> Sequence[str]:
        """The number in the text of the limit."""
        return (str(self.figure.limit.at),)


class Tool(Slotted, frozen=True):
    """A function that a model may call, and how a user asks for it; its arguments are its slots."""

    name: str
    description: str
    request: str
    result: str

    @property
    def definition(self) -> str:
        """One line of JSON, for the system prompt."""
        types = {name: _type_of(slot) for name, slot in self.slots.items()}
        return json.dumps({"name": self.name, "description": self.description, "parameters": types})

    def call(self, values: Values) -> str:
        """The one right line of JSON for these arguments."""
        arguments = {
            name: int(values[name]) if slot.kind == "number" else values[name]
            for name, slot in self.slots.items()
        }
        return json.dumps({"name": self.name, "arguments": arguments})


def _type_of(slot: Slot) -> dict[str, Any]:
    if slot.kind == "number":
        return {"type": "integer"}
    return {"type": "string", **({"enum": slot.options} if slot.options else {"description": slot.kind})}


FORMS = [Source(f"form:{name}", Form.model_validate(texts(f"forms/{name}"))) for name in WORDS["forms"]]
TOOLS = [
    Source(f"form:tool-{name}", Tool.model_validate({"name": name, **row}))
    for name, row in SYSTEMS["tools"].items()
]


class PublishedForm(Slotted, frozen=True):
    """A published prompt; `slots` are those that a value fits into."""

    text: str

    def filled(self, values: Values, choice: str) -> str:
        """With these values; other slots get the author's default, their own name, or the choice."""

        def value(match: re.Match[str]) -> str:
            name = forms.slot_name(match)
            if name is None:
                return choice
            if match[4]:
                return match[0]
            return values.get(name) or (match[2] or "").strip() or name.replace("_", " ")

        return forms.SLOT.sub(value, self.text)


def published_forms(library: Library) -> list[Source[PublishedForm]]:
    """Texts that are neither short nor long, with a slot that a value fits into."""
    shortest, longest = _FIXED
    fitting = [
        Source(source.name, published_form(source.item))
        for source in library.texts
        if len(source.item.encode()) <= longest
        and forms.is_form(source.item)
        and shortest <= forms.num_fixed(source.item)
    ]
    return [source for source in fitting if source.item.slots]


def published_form(text: str) -> PublishedForm:
    """Its slots, written ${...} or {{...}}, that ask for a date, number, place, product or person."""
    names = {name.strip() for match in forms.SLOT.finditer(text) if (name := match[1] or match[3])}
    slots = {name: PublishedSlot(kind=name) for name in sorted(names) if _is_typed(name)}
    return PublishedForm(slots=slots, text=text)


def _is_typed(name: str) -> bool:
    """By its last word: the age of a group is a number, an age group is none."""
    last = re.findall(r"[a-z]+", name.lower())[-1:]
    value = sources.value_for("".join(last), random.Random(0))
    return not any(value.startswith(f"{topic} in ") for topic in sources.TOPICS)
