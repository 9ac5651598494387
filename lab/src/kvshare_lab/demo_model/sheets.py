"""
Filled-in forms: makes a sheet of records, and edits it into a near duplicate.

The fixed text of the three kinds of form, and the values that their slots may have, are in templates.yaml.
A record is written as short lines that repeat its label with its number, which no edit changes. So each line
has a fact and the record that it belongs to. All randomness comes from the `random.Random` of the caller.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import yaml

AGE = "age"
REMARK = "remark"
AGES = range(18, 90)
NUMBERS = range(10, 100)
MAX_RECORDS = 4


@dataclass(frozen=True, slots=True)
class Template:
    """One kind of form: the boilerplate around the slots, and the slots."""

    label: str  # the noun that labels a record, as in "Report 2"
    person: str  # the role of the person in a record, which is also the name of that slot
    word_field: str  # the name of the slot that holds one of `words`
    words: Sequence[str]
    ordinary: Mapping[
        str, tuple[int, int]
    ]  # slots with a number of two digits: its range, both ends included
    verdicts: tuple[str, str, str]  # the words for a number below, inside and above its ordinary range
    remarks: Sequence[str]
    opening: str
    record_opening: str
    record_middle: str
    record_closing: str
    closing: str

    @property
    def fields(self) -> tuple[str, ...]:
        """The slots of one record, in the order of the text."""
        return (self.person, AGE, self.word_field, *self.ordinary, REMARK)


_WORDS = yaml.safe_load(Path(__file__).with_name("templates.yaml").read_text(encoding="utf-8"))
SYSTEM_MESSAGE: str = _WORDS["system_message"]
FIRST_NAMES: list[str] = _WORDS["first_names"]
LAST_NAMES: list[str] = _WORDS["last_names"]
TEMPLATES = tuple(Template(**form) for form in _WORDS["forms"])


class Slot(NamedTuple):
    """One place on a sheet that differs from user to user."""

    record: int  # from 0; the label on the sheet counts from 1
    field: str


@dataclass(frozen=True, slots=True)
class Sheet:
    """One to four records of one kind of form, each a mapping from field name to value."""

    template: Template
    records: tuple[Mapping[str, str], ...]

    @property
    def text(self) -> str:
        """The whole form, as a user would paste it."""
        records = (self._record_text(index) for index in range(len(self.records)))
        return "\n\n".join((self.template.opening, *records, self.template.closing))

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(Slot(r, field) for r in range(len(self.records)) for field in self.template.fields)

    def value(self, slot: Slot) -> str:
        return self.records[slot.record][slot.field]

    def line(self, slot: Slot) -> str:
        """The line of a slot, with its label."""
        template, beside = self.template, ""
        if slot.field in template.ordinary:
            low, high = template.ordinary[slot.field]
            beside = f" ({template.verdicts[1]} {low} to {high})"
        return f"{template.label} {slot.record + 1}, {slot.field}: {self.value(slot)}{beside}"

    def _record_text(self, record: int) -> str:
        template = self.template
        lines = [self.line(Slot(record, field)) for field in template.fields]
        lines.insert(template.fields.index(template.word_field) + 1, template.record_middle)
        return "\n".join((template.record_opening, *lines, template.record_closing)).format(n=record + 1)


def make_sheet(rng: random.Random, *, num_records: int) -> Sheet:
    """
    A sheet of a random kind with random values; no name occurs twice.

    Raises:  ValueError unless 1 <= num_records <= 4
    """
    if not 1 <= num_records <= MAX_RECORDS:
        raise ValueError(f"num_records is {num_records}, a sheet has 1 to {MAX_RECORDS}")
    template = rng.choice(TEMPLATES)
    firsts = rng.sample(FIRST_NAMES, num_records)
    lasts = rng.sample(LAST_NAMES, num_records)
    records = []
    for first, last in zip(firsts, lasts, strict=True):
        values = {field: _draw(rng, template, field) for field in template.fields}
        values[template.person] = f"{first} {last}"
        records.append(values)
    return Sheet(template, tuple(records))


def edit_sheet(rng: random.Random, sheet: Sheet, *, num_slots: int) -> Sheet:
    """
    The near duplicate that another user would send: the same template with other values in some slots.

    Raises:  ValueError if the sheet has fewer than num_slots slots
    """
    if not 0 <= num_slots <= len(sheet.slots):
        raise ValueError(f"num_slots is {num_slots}, the sheet has {len(sheet.slots)}")
    records = [dict(record) for record in sheet.records]
    for slot in rng.sample(sheet.slots, num_slots):
        taken = {word for record in records for word in record[sheet.template.person].split()}
        old = records[slot.record][slot.field]
        new = _draw(rng, sheet.template, slot.field)
        while new == old or (slot.field == sheet.template.person and taken & set(new.split())):
            new = _draw(rng, sheet.template, slot.field)
        records[slot.record][slot.field] = new
    return replace(sheet, records=tuple(records))


def to_messages(sheet: Sheet, question_text: str) -> list[dict[str, str]]:
    """The chat messages of one request: the constant system message, then the sheet and the question."""
    return [
        {"role": "system", "content": SYSTEM_MESSAGE},
        {"role": "user", "content": f"{sheet.text}\n\n{question_text}"},
    ]


def _draw(rng: random.Random, template: Template, field: str) -> str:
    if field == template.person:
        return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"
    if field == AGE:
        return str(rng.choice(AGES))
    if field == REMARK:
        return rng.choice(template.remarks)
    if field == template.word_field:
        return rng.choice(template.words)
    # Each verdict is equally likely, so a guess is right in a third of all cases.
    low, high = template.ordinary[field]
    below, ordinary, above = (NUMBERS[0], low), (low, high + 1), (high + 1, NUMBERS[-1] + 1)
    return str(rng.randrange(*rng.choice((below, ordinary, above))))
