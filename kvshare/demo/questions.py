"""
Questions about a sheet and their right answers: looked up, compared or derived.

A `Query` says what is asked; the same query can be put to two sheets, which is how a pair of
near duplicates proves that their answers differ. Knows nothing of tokens or models.
"""

import random
from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

from kvshare.demo.sheets import AGE, REMARK, Sheet, Slot, field_names, number_field

Kind = Literal["lookup", "compare", "derived"]
KINDS: tuple[Kind, ...] = ("lookup", "compare", "derived")
MIN_GAP = 10
"""Numbers are compared only when the highest leads the second by at least this much."""


@dataclass(frozen=True, slots=True)
class Query:
    """What is asked: a field of one record, or of all records, compared."""

    kind: Kind
    field: str
    records: tuple[int, ...]

    @property
    def slots(self) -> frozenset[Slot]:
        """The slots that the answer is computed from."""
        return frozenset(Slot(record, self.field) for record in self.records)


@dataclass(frozen=True, slots=True)
class Question:
    """A query put into words, with the answer that the sheet gives."""

    text: str
    answer: str
    kind: Kind
    query: Query


def ask(
    rng: random.Random,
    sheet: Sheet,
    *,
    about: Set[Slot] | None = None,
    kind: Kind | None = None,
) -> Question:
    """
    A random question; with `about`, one whose answer depends on at least one of those slots.

    Raises:  ValueError if no such question exists
    """
    wanted = frozenset(sheet.slots if about is None else about)
    found = {
        one: [query for query in queries(sheet, one) if query.slots & wanted]
        for one in (KINDS if kind is None else (kind,))
    }
    possible = [one for one in found if found[one]]
    if not possible:
        raise ValueError(f"no question of kind {kind or 'any'} depends on the slots asked about")
    query = rng.choice(found[rng.choice(possible)])
    return Question(wording(rng, sheet, query), answer_to(sheet, query), query.kind, query)


def queries(sheet: Sheet, kind: Kind) -> list[Query]:
    """Every query of that kind that has one clear answer on this sheet."""
    records = range(len(sheet.records))
    numbers = [field.name for field in sheet.template.number_fields]
    if kind == "lookup":
        fields = [field for field in field_names(sheet.template) if field != REMARK]
        return [Query(kind, field, (record,)) for field in fields for record in records]
    if kind == "derived":
        return [Query(kind, field, (record,)) for field in numbers for record in records]
    return [
        Query(kind, field, tuple(records))
        for field in (AGE, *numbers)
        if len(records) > 1 and _lead(sheet, field) >= MIN_GAP
    ]


def answer_to(sheet: Sheet, query: Query) -> str:
    """The right answer, read off the sheet."""
    first = Slot(query.records[0], query.field)
    if query.kind == "lookup":
        return sheet.value(first)
    if query.kind == "derived":
        return _verdict(sheet, first)
    return max((sheet.value(Slot(record, query.field)) for record in query.records), key=int)


def wording(rng: random.Random, sheet: Sheet, query: Query) -> str:
    """The query in words; a lookup has more than one wording."""
    template = sheet.template
    label, person, field = template.label.lower(), template.person, query.field
    ordinals = [record + 1 for record in query.records]
    if query.kind == "derived":
        low, middle, high = template.verdicts
        return f"In {label} {ordinals[0]}, is the {field} {low}, {middle} or {high}?"
    if query.kind == "lookup":
        asks = "who" if field == person else "what"
        return rng.choice(
            (
                f"In {label} {ordinals[0]}, {asks} is the {field}?",
                f"{template.label} {ordinals[0]}, {field}?",
            )
        )
    return f"Of all {label}s, what is the highest {field}?"


def _lead(sheet: Sheet, field: str) -> int:
    values = sorted(int(record[field]) for record in sheet.records)
    return values[-1] - values[-2]


def _verdict(sheet: Sheet, slot: Slot) -> str:
    number = number_field(sheet.template, slot.field)
    if number is None:
        raise ValueError(f"{slot.field} has no ordinary range")
    value = int(sheet.value(slot))
    low, middle, high = sheet.template.verdicts
    if value < number.lowest_ordinary:
        return low
    return high if value > number.highest_ordinary else middle
