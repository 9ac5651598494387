"""
Questions about a sheet, their right answers, and near-duplicate requests, as two users would send them.

A `Query` is a question without its wording. The same query can be asked about two sheets, to see whether
their answers differ. In a `Pair` they do: the answer to the recipient's question depends on a slot that
changed, so reusing the donor's KV without recomputing the change gives a wrong answer.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvshare_lab.demo_model.sheets import (
    AGE,
    MAX_RECORDS,
    REMARK,
    Sheet,
    Slot,
    edit_sheet,
    make_sheet,
    to_messages,
)

Kind = Literal["lookup", "compare", "derived"]
KINDS: tuple[Kind, ...] = ("lookup", "compare", "derived")
MIN_GAP = 10  # numbers are compared only if the highest exceeds the second by at least this
FEWEST_EDITS, MOST_EDITS = 3, 8


@dataclass(frozen=True, slots=True)
class Query:
    """A question for a field of one record, or for the highest value of a field in all records."""

    kind: Kind
    field: str
    records: tuple[int, ...]

    @property
    def slots(self) -> frozenset[Slot]:
        """The slots that the answer is computed from."""
        return frozenset(Slot(record, self.field) for record in self.records)


@dataclass(frozen=True, slots=True)
class Question:
    """A query in words, with the answer from the sheet."""

    text: str
    answer: str
    query: Query


def ask(rng: random.Random, sheet: Sheet, *, kind: Kind | None = None) -> Question:
    """
    A random question, of that kind if one is given.

    Raises:  ValueError if the sheet answers no such question
    """
    possible = {one: found for one in ([kind] if kind else KINDS) if (found := queries(sheet, one))}
    if not possible:
        raise ValueError(f"the sheet answers no question of kind {kind}")
    query = rng.choice(possible[rng.choice(list(possible))])
    return Question(wording(rng, sheet, query), answer_to(sheet, query), query)


def queries(sheet: Sheet, kind: Kind) -> list[Query]:
    """All queries of that kind that have one clear answer on this sheet."""
    records = range(len(sheet.records))
    numbers = sheet.template.ordinary
    if kind == "lookup":
        fields = [field for field in sheet.template.fields if field != REMARK]
        return [Query(kind, field, (record,)) for field in fields for record in records]
    if kind == "derived":
        return [Query(kind, field, (record,)) for field in numbers for record in records]
    return [
        Query(kind, field, tuple(records))
        for field in (AGE, *numbers)
        if len(records) > 1 and _lead(sheet, field) >= MIN_GAP
    ]


def answer_to(sheet: Sheet, query: Query) -> str:
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
    ordinal = query.records[0] + 1
    if query.kind == "derived":
        low, middle, high = template.verdicts
        return f"In {label} {ordinal}, is the {field} {low}, {middle} or {high}?"
    if query.kind == "lookup":
        asks = "who" if field == person else "what"
        long, short = f"In {label} {ordinal}, {asks} is the {field}?", f"{template.label} {ordinal}, {field}?"
        return rng.choice((long, short))
    return f"Of all {label}s, what is the highest {field}?"


def _lead(sheet: Sheet, field: str) -> int:
    values = sorted(int(record[field]) for record in sheet.records)
    return values[-1] - values[-2]


def _verdict(sheet: Sheet, slot: Slot) -> str:
    value = int(sheet.value(slot))
    below, inside, above = sheet.template.verdicts
    lowest, highest = sheet.template.ordinary[slot.field]
    if value < lowest:
        return below
    return above if value > highest else inside


@dataclass(frozen=True, slots=True)
class Pair:
    """An earlier request, a nearly equal later one, and the right answer to the later one."""

    donor_messages: list[dict[str, str]]
    recipient_messages: list[dict[str, str]]
    answer: str
    stale_answer: str  # to the recipient's question on the donor's sheet; it always differs from `answer`
    kind: Kind
    num_records: int


def near_duplicate_pairs(seed: int, count: int) -> Iterator[Pair]:
    """
    Pairs with one to four records and three to eight changed slots, with all kinds of questions in turn.

    The same seed gives the same pairs. No text of the training comes from these streams.
    """
    rng = random.Random(f"near-duplicate-pairs-{seed}")
    for index in range(count):
        kind = KINDS[index % len(KINDS)]
        fewest_records = 2 if kind == "compare" else 1
        yield _pair(rng, kind, rng.randint(fewest_records, MAX_RECORDS))


def _pair(rng: random.Random, kind: Kind, num_records: int) -> Pair:
    found: list[Query] = []
    while not found:
        donor = make_sheet(rng, num_records=num_records)
        recipient = edit_sheet(rng, donor, num_slots=rng.randint(FEWEST_EDITS, MOST_EDITS))
        found = _distinguishing_queries(donor, recipient, kind)
    query = rng.choice(found)
    return Pair(
        donor_messages=to_messages(donor, ask(rng, donor).text),
        recipient_messages=to_messages(recipient, wording(rng, recipient, query)),
        answer=answer_to(recipient, query),
        stale_answer=answer_to(donor, query),
        kind=kind,
        num_records=num_records,
    )


def _distinguishing_queries(donor: Sheet, recipient: Sheet, kind: Kind) -> list[Query]:
    changed = {slot for slot in recipient.slots if donor.value(slot) != recipient.value(slot)}
    answerable_before = frozenset(queries(donor, kind))
    return [
        query
        for query in queries(recipient, kind)
        if query in answerable_before
        and query.slots & changed
        and answer_to(donor, query) != answer_to(recipient, query)
    ]
