"""
The project's own forms, forms.yaml: paragraphs with slots, and a figure that something else follows from.

Owns drawing values that do not get in each other's way. Knows nothing of suites.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from kvshare.bench.fidelity.scenario import SEED, Messages
from kvshare.bench.fidelity.suites.library import Source
from kvshare.replay.workloads import sources

T = TypeVar("T")
Values = Mapping[str, str]  # by slot

WORDS: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("forms.yaml").read_text(encoding="utf-8"))
NEUTRAL: Sequence[str] = WORDS["neutral"]

_MAX_TRIES = 1000


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a text that is filled differently each time, and the question that it answers."""

    kind: str  # name, place, date, number or decision
    ask: str
    numbers: range = range(0)  # of a number
    options: tuple[str, ...] = ()  # of a decision; of a form's, the first two are opposites

    @classmethod
    def from_yaml(cls, row: Mapping[str, Any]) -> Slot:
        """As forms.yaml has it."""
        numbers = range(row.get("from", 0), row.get("to", -1) + 1, row.get("step", 1))
        return cls(row["kind"], row.get("ask", ""), numbers, tuple(row.get("of", ())))

    def value(self, draw: random.Random, taken: Iterable[str]) -> str:
        """One that cannot be mistaken for one that is taken: of names, not even one word is shared."""
        return fresh(lambda: self._any(draw), taken, whole=self.kind != "name")

    def _any(self, draw: random.Random) -> str:
        if self.kind == "number":
            return str(draw.choice(self.numbers))
        if self.kind == "decision":
            return draw.choice(self.options)
        if self.kind == "place":
            return draw.choice(sources.PLACES)
        return sources.person(draw) if self.kind == "name" else sources.date(draw)


def fresh(make: Callable[[], str], taken: Iterable[str], *, whole: bool = True) -> str:
    """
    The first one made that is not contained in one of these, nor contains one, counted in words.

    With `whole` off, not even one word is shared.
    Raises:  ValueError if all that are made are taken
    """
    others = [set(other.split()) for other in taken]
    for _ in range(_MAX_TRIES):
        value = make()
        words = set(value.split())
        if not any((words <= other or other <= words) if whole else words & other for other in others):
            return value
    raise ValueError(f"{_MAX_TRIES} tries brought nothing that is not among {len(others)} values")


@dataclass(frozen=True, slots=True)
class Limit:
    """A rule that turns the figure into one of two answers, both in its text."""

    at: int
    text: str
    ask: str
    over: str  # right from `at` on
    under: str
    others: tuple[str, ...]  # answers that are never right

    def answer(self, value: str) -> str:
        """What follows from the figure."""
        return self.over if int(value) >= self.at else self.under


@dataclass(frozen=True, slots=True)
class Figure:
    """The sentence with the number that something follows from; `same`: what has the same number."""

    slot: str
    text: str
    same: str
    same_ask: str
    limit: Limit


@dataclass(frozen=True, slots=True)
class Form:
    """Paragraphs that can be read in any order; each slot stands once, in one of them or in the figure."""

    title: str
    slots: Mapping[str, Slot]
    sections: tuple[str, ...]
    figure: Figure

    @classmethod
    def from_yaml(cls, row: Mapping[str, Any]) -> Form:
        """As forms.yaml has it."""
        figure = row["figure"]
        limit = Limit(**{**figure["limit"], "others": tuple(figure["limit"]["others"])})
        same = figure["same"]
        return cls(
            row["title"],
            {name: Slot.from_yaml(slot) for name, slot in row["slots"].items()},
            tuple(row["sections"]),
            Figure(figure["slot"], figure["text"], same["text"], same["ask"], limit),
        )

    @property
    def paragraphs(self) -> list[str]:
        """All of them, slots open."""
        return [*self.sections, f"{self.figure.text} {self.figure.same}"]

    def of_kind(self, kind: str) -> list[str]:
        """The slots of that kind."""
        return [name for name, slot in self.slots.items() if slot.kind == kind]

    def values(self, draw: random.Random, taken: Iterable[str] = ()) -> dict[str, str]:
        """A value for each slot."""
        return self.refilled({}, self.slots, draw, taken)

    def refilled(
        self, values: Values, names: Iterable[str], draw: random.Random, taken: Iterable[str] = ()
    ) -> dict[str, str]:
        """The same values with others in these slots."""
        found, used = dict(values), [*taken, *values.values(), str(self.figure.limit.at)]
        for name in names:
            found[name] = self.slots[name].value(draw, used)
            used.append(found[name])
        return found

    def answers(self, name: str, new: Values, old: Values, draw: random.Random) -> tuple[str, ...]:
        """To the question of a slot: the new value, the old one, and two that stand in neither text."""
        found = [new[name], old[name]]
        for _ in range(2):
            used = found if self.slots[name].options else [*found, *new.values(), *old.values()]
            found.append(self.slots[name].value(draw, used))
        return tuple(found)


FORMS: Sequence[Source[Form]] = [
    Source(f"form:{name}", Form.from_yaml(row)) for name, row in WORDS["forms"].items()
]


def in_turn(items: Sequence[T], number: int) -> T:
    """Each as often as the others, in their order."""
    return items[number % len(items)]


def source_for(items: Sequence[T], number: int) -> T:
    """Each as often as the others, in another order each time round: no label goes with a source."""
    times_round, place = divmod(number, len(items))
    return random.Random(f"{SEED}:{times_round}").sample(items, len(items))[place]


def shuffled(items: Sequence[T], draw: random.Random) -> list[T]:
    """In another order; there are at least two, and no two are equal."""
    order = list(items)
    while order == list(items):
        draw.shuffle(order)
    return order


def asked(paragraphs: Sequence[str], ask: str, *, system: str) -> Messages:
    """A text and the question behind it."""
    text = "\n\n".join([*paragraphs, WORDS["question"].format(ask=ask)])
    return {"role": "system", "content": system}, {"role": "user", "content": text}
