"""
The project's own texts with slots: forms (forms.yaml), with a figure from which something else follows, and
tools that a model may call (systems.yaml).

Draws values that cannot be confused with each other. Knows nothing of suites.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvshare.bench.fidelity.suites.drawing import four_answers, fresh
from kvshare.bench.fidelity.suites.library import Source
from kvshare.bench.fidelity.texts import texts_beside
from kvshare.replay.workloads import sources

Values = Mapping[str, str]  # by slot

WORDS = texts_beside(__file__, "forms.yaml")
NEUTRAL: Sequence[str] = WORDS["neutral"]

_DRAWN: Mapping[str, Callable[[random.Random], str]] = {
    "name": sources.person,
    "date": sources.date,
    "place": lambda draw: draw.choice(sources.PLACES),
}


@dataclass(frozen=True, slots=True)
class Slot:
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


def refilled(
    slots: Mapping[str, Slot],
    names: Iterable[str],
    draw: random.Random,
    *,
    values: Values | None = None,
    taken: Iterable[str] = (),
) -> dict[str, str]:
    """The values with other ones in the named slots, none of which was there before or is taken."""
    found = dict(values or {})
    used = [*taken, *found.values()]
    for name in names:
        found[name] = slots[name].value(draw, used)
        used.append(found[name])
    return found


@dataclass(frozen=True, slots=True)
class Limit:
    """A rule that turns the figure into one of two answers, both in its text."""

    at: int
    text: str
    ask: str
    over: str  # right from `at` on
    under: str
    others: Sequence[str]  # answers that are never right

    def answer(self, value: str) -> str:
        """The answer that follows from the figure."""
        return self.over if int(value) >= self.at else self.under


@dataclass(frozen=True, slots=True)
class Figure:
    """The sentence with the number from which something follows. `same`: a sentence about an equal number."""

    slot: str
    text: str
    same: str
    same_ask: str
    limit: Limit


@dataclass(frozen=True, slots=True)
class Form:
    """Paragraphs that can be read in any order; each slot is in one of them or in the figure, once."""

    title: str
    slots: Mapping[str, Slot]
    sections: Sequence[str]
    figure: Figure

    @property
    def paragraphs(self) -> list[str]:
        """All of them, with open slots."""
        return [*self.sections, f"{self.figure.text} {self.figure.same}"]

    def of_kind(self, kind: str) -> list[str]:
        """The slots of a kind."""
        return [name for name, slot in self.slots.items() if slot.kind == kind]

    def values(self, draw: random.Random, taken: Iterable[str] = ()) -> dict[str, str]:
        """A value for each slot."""
        return refilled(self.slots, self.slots, draw, taken=[*taken, str(self.figure.limit.at)])

    def refilled(self, values: Values, names: Iterable[str], draw: random.Random) -> dict[str, str]:
        """The same values with others in these slots."""
        return refilled(self.slots, names, draw, values=values, taken=[str(self.figure.limit.at)])

    def answers(self, name: str, new: Values, old: Values, draw: random.Random) -> tuple[str, ...]:
        """To the question of a slot: the new value, the old one, and two that are in neither text."""
        slot = self.slots[name]
        others = [] if slot.options else [*new.values(), *old.values()]
        return four_answers(new[name], old[name], lambda found: slot.value(draw, [*found, *others]))


def _form(row: Mapping[str, Any]) -> Form:
    """A form of forms.yaml, whose keys are the fields of these classes."""
    slots = {name: Slot(**slot) for name, slot in row["slots"].items()}
    figure = Figure(**{**row["figure"], "limit": Limit(**row["figure"]["limit"])})
    return Form(row["title"], slots, row["sections"], figure)


FORMS = [Source(f"form:{name}", _form(row)) for name, row in WORDS["forms"].items()]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call, and how a user asks for it."""

    name: str
    description: str
    request: str
    result: str
    arguments: Mapping[str, Slot]

    @property
    def definition(self) -> str:
        """One line of JSON, for the system prompt."""
        types = {name: _type_of(slot) for name, slot in self.arguments.items()}
        return json.dumps({"name": self.name, "description": self.description, "parameters": types})

    def call(self, values: Values) -> str:
        """The one right line of JSON for these arguments."""
        arguments = {
            name: int(values[name]) if slot.kind == "number" else values[name]
            for name, slot in self.arguments.items()
        }
        return json.dumps({"name": self.name, "arguments": arguments})

    def values(self, draw: random.Random, taken: Sequence[str] = ()) -> dict[str, str]:
        """A value for each argument."""
        return refilled(self.arguments, self.arguments, draw, taken=taken)

    def changed(
        self, values: Values, name: str, draw: random.Random, taken: Sequence[str] = ()
    ) -> dict[str, str]:
        """The same values with another one for this argument."""
        return refilled(self.arguments, [name], draw, values=values, taken=taken)


def _type_of(slot: Slot) -> dict[str, Any]:
    if slot.kind == "number":
        return {"type": "integer"}
    return {"type": "string", **({"enum": slot.options} if slot.options else {"description": slot.kind})}


def _tool(name: str, row: Mapping[str, Any]) -> Tool:
    """A tool of systems.yaml, whose keys are the fields of these classes."""
    arguments = {argument: Slot(**slot) for argument, slot in row["arguments"].items()}
    return Tool(name=name, **{**row, "arguments": arguments})


TOOLS = [
    Source(f"form:tool-{name}", _tool(name, row))
    for name, row in texts_beside(__file__, "systems.yaml")["tools"].items()
]
