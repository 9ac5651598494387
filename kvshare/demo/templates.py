"""
The fixed text of the three kinds of form, and the values that their slots may have, from templates.yaml.

A record is written as short lines that repeat its label with its number, which no edit changes. So each line
has a fact and the record that it belongs to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

AGE = "age"
REMARK = "remark"
AGES = range(18, 90)
NUMBERS = range(10, 100)


@dataclass(frozen=True, slots=True)
class Template:
    """One kind of form: the boilerplate around the slots, and the slots."""

    label: str
    """The noun that labels a record, as in "Report 2"."""
    person: str
    """The role of the person in a record, which is also the name of that slot."""
    word_field: str
    """The name of the slot that holds one of `words`."""
    words: Sequence[str]
    ordinary: Mapping[str, tuple[int, int]]
    """The slots that hold a number from 10 to 99, each with its ordinary range, including both ends."""
    verdicts: tuple[str, str, str]
    """The words for a number below, inside and above its ordinary range."""
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
