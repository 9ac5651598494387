"""The fixed texts behind the suites that are made by rule."""

import random
import re
from collections import Counter
from collections.abc import Sequence

import pytest

from kvshare_lab.fidelity.scenario import half_of
from kvshare_lab.fidelity.suites.library import Source
from kvshare_lab.fidelity.suites.slots import FORMS, NEUTRAL, TOOLS, Form, Slot, Tool, fresh

EACH_FORM = pytest.mark.parametrize("form", [pytest.param(source.item, id=source.name) for source in FORMS])


def text_of(form: Form) -> str:
    return "\n\n".join([form.title, *form.paragraphs])


@pytest.mark.parametrize("own", [FORMS, TOOLS], ids=["forms", "tools"])
def test_each_half_has_ten_forms_and_ten_tools(own: Sequence[Source[Form]] | Sequence[Source[Tool]]) -> None:
    """So that a bootstrap over source documents has something to draw from."""
    assert min(Counter(half_of(source.name) for source in own).values()) >= 10


@EACH_FORM
def test_every_slot_stands_once(form: Form) -> None:
    """Neither twice nor unused: one edit is one place."""
    assert Counter(re.findall(r"\{(\w+)\}", text_of(form))) == dict.fromkeys(form.slots, 1)


@EACH_FORM
def test_the_words_of_a_decision_stand_nowhere_else(form: Form) -> None:
    """Otherwise the old decision could still be read in the new text."""
    fixed = " ".join([text_of(form), *NEUTRAL, *(slot.ask for slot in form.slots.values())]).lower()
    options = [option for slot in form.slots.values() for option in slot.options]
    assert [option for option in options if re.search(rf"\b{option}\b", fixed)] == []


@EACH_FORM
def test_a_form_has_all_kinds_of_slots_and_a_limit_that_values_lie_on_both_sides_of(form: Form) -> None:
    """What negation and derived need."""
    assert {slot.kind for slot in form.slots.values()} == {"name", "place", "date", "number", "decision"}
    limit, numbers = form.figure.limit, form.slots[form.figure.slot].numbers
    assert numbers[0] < limit.at <= numbers[-1]
    assert (limit.answer(str(numbers[0])), limit.answer(str(limit.at))) == (limit.under, limit.over)
    assert str(limit.at) in limit.text


def test_neutral_paragraphs_are_about_equally_long() -> None:
    """The distances of `derived` are counted in them."""
    assert all(36 <= len(paragraph.split()) <= 45 for paragraph in NEUTRAL)


def test_refilling_changes_these_slots_only() -> None:
    """And never to a value that the form had before."""
    form, draw = FORMS[0].item, random.Random(1)
    old = form.values(draw)
    new = form.refilled(old, ["tenant", "rent"], draw)
    assert {name for name in old if old[name] != new[name]} == {"tenant", "rent"}
    assert not {new["tenant"], new["rent"]} & set(old.values())


def test_names_share_no_word_with_a_name_that_is_taken() -> None:
    """A new name with the old first name would leave half of the old one right."""
    draw = random.Random(1)
    values = {Slot(kind="name").value(draw, ["Aisha Adler"]) for _ in range(500)}
    assert not {word for value in values for word in value.split()} & {"Aisha", "Adler"}


def test_a_value_that_cannot_be_had_is_an_error() -> None:
    """Rather than a loop without end."""
    with pytest.raises(ValueError, match="among 1 values"):
        fresh(lambda: "5", ["5 March"])
