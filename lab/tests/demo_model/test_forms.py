"""The generator of sheets, questions and near-duplicate pairs."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvshare_lab.demo_model.pairs import Kind, ask, near_duplicate_pairs, queries
from kvshare_lab.demo_model.sheets import Sheet, edit_sheet, make_sheet, to_messages


def sheets(count: int, seed: int = 0) -> list[Sheet]:
    """Sheets of all kinds and sizes."""
    rng = random.Random(seed)
    return [make_sheet(rng, num_records=1 + index % 4) for index in range(count)]


def facts_in(text: str) -> dict[tuple[int, str], str]:
    """The slot lines of a form, read back by a parser that knows nothing of the generator."""
    found = re.findall(r"^(?:Report|Exam|Ticket) (\d), (\w+): (.+)$", text, re.MULTILINE)
    return {(int(ordinal), field): value for ordinal, field, value in found}


def answer_from_text(text: str, question: str) -> str:
    """The answer to a question, worked out from the words of form and question alone."""
    facts = facts_in(text)
    ordinals = [int(n) for n in re.findall(r"(?:report|exam|ticket) (\d)", question.lower())]
    if found := re.match(r"In \w+ \d, is the (\w+) (\w+), (\w+) or (\w+)\?", question):
        field, *verdicts = found.groups()
        value, low, high = (int(n) for n in re.findall(r"\d+", facts[ordinals[0], field]))
        return verdicts[(value >= low) + (value > high)]
    (field,) = re.findall(r"(\w+)\?$", question)
    if "highest" in question:
        found_values = [value for (_, key), value in facts.items() if key == field]
        return max((value.split(" (")[0] for value in found_values), key=int)
    return facts[ordinals[0], field].split(" (")[0]


def test_same_seed_gives_same_sheet() -> None:
    """The generator has no randomness of its own."""
    assert [one.text for one in sheets(8)] == [one.text for one in sheets(8)]
    assert sheets(8)[0].text != sheets(8, seed=1)[0].text


def test_every_slot_has_its_own_labelled_line() -> None:
    """Each slot of each record is stated in one line that carries the record's label."""
    for sheet in sheets(24):
        facts = facts_in(sheet.text)
        assert len(facts) == len(sheet.slots)
        for slot in sheet.slots:
            assert facts[slot.record + 1, slot.field].startswith(sheet.value(slot))


@pytest.mark.parametrize("kind", ["lookup", "compare", "derived"])
def test_answers_agree_with_an_independent_reading(kind: Kind) -> None:
    """A second program that only sees the text comes to the same answers."""
    rng = random.Random(5)
    for sheet in sheets(200):
        if not queries(sheet, kind):
            continue
        question = ask(rng, sheet, kind=kind)
        assert answer_from_text(sheet.text, question.text) == question.answer


def test_a_question_that_a_sheet_does_not_answer_is_refused() -> None:
    """One record cannot be compared with others, and saying so is an error."""
    with pytest.raises(ValueError, match="no question of kind compare"):
        ask(random.Random(0), sheets(1)[0], kind="compare")


def test_edit_changes_exactly_that_many_slots() -> None:
    """An edited sheet differs in the slots asked for and keeps the template's words."""
    rng = random.Random(7)
    for sheet in sheets(60):
        edited = edit_sheet(rng, sheet, num_slots=5)
        assert sum(sheet.value(slot) != edited.value(slot) for slot in sheet.slots) == 5
        before, after = sheet.text.splitlines(), edited.text.splitlines()
        assert sum(a != b for a, b in zip(before, after, strict=True)) == 5


def test_edit_leaves_the_first_sheet_alone() -> None:
    """Editing makes a new sheet."""
    (sheet,) = sheets(1)
    text = sheet.text
    edit_sheet(random.Random(8), sheet, num_slots=6)
    assert sheet.text == text


def test_names_stay_distinct_after_an_edit() -> None:
    """No two people on a sheet share a name, so an answer names one record."""
    rng = random.Random(9)
    for sheet in sheets(60):
        edited = edit_sheet(rng, sheet, num_slots=8)
        names = [record[sheet.template.person] for record in edited.records]
        assert len({word for name in names for word in name.split()}) == 2 * len(names)


@pytest.mark.parametrize("num_records", [0, 5])
def test_wrong_number_of_records_is_refused(num_records: int) -> None:
    """A sheet has one to four records."""
    with pytest.raises(ValueError, match="num_records"):
        make_sheet(random.Random(0), num_records=num_records)


def test_too_many_edits_are_refused() -> None:
    """A sheet cannot change in more slots than it has."""
    (sheet,) = sheets(1)
    with pytest.raises(ValueError, match="num_slots"):
        edit_sheet(random.Random(0), sheet, num_slots=len(sheet.slots) + 1)


def test_messages_are_a_constant_system_message_and_the_form() -> None:
    """Two users of the service send the same system message."""
    first, second = sheets(2)
    assert to_messages(first, "Why?")[0] == to_messages(second, "How?")[0]
    assert to_messages(first, "Why?")[1]["content"] == f"{first.text}\n\nWhy?"


def test_pairs_ask_for_what_changed() -> None:
    """The donor's sheet would answer the recipient's question otherwise, by either reading."""
    for pair in near_duplicate_pairs(seed=3, count=60):
        form, _, question = pair.recipient_messages[1]["content"].rpartition("\n\n")
        old_form, _, _ = pair.donor_messages[1]["content"].rpartition("\n\n")
        assert answer_from_text(form, question) == pair.answer
        assert answer_from_text(old_form, question) == pair.stale_answer != pair.answer


def test_pairs_are_near_duplicates() -> None:
    """Donor and recipient differ in three to eight lines of one template."""
    for pair in near_duplicate_pairs(seed=3, count=60):
        forms = [
            messages[1]["content"].rpartition("\n\n")[0].splitlines()
            for messages in (pair.donor_messages, pair.recipient_messages)
        ]
        assert 3 <= sum(a != b for a, b in zip(*forms, strict=True)) <= 8


def test_pairs_come_from_the_seed() -> None:
    """The same seed gives the same pairs, another seed gives others, of all three kinds."""
    once, again = (list(near_duplicate_pairs(4, 9)) for _ in range(2))
    assert once == again
    assert once != list(near_duplicate_pairs(5, 9))
    assert {pair.kind for pair in once} == {"lookup", "compare", "derived"}


def test_importing_the_package_loads_no_heavy_library() -> None:
    """Asking where the model lies, or for a form, costs neither torch nor transformers."""
    code = (
        "import sys, kvshare_lab.demo_model.pairs; "
        "print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_forms_of_the_example_are_such_a_pair() -> None:
    """examples/two_forms.py has them in a file, as it runs without the lab."""
    example = Path(__file__).parents[3] / "examples" / "two_forms.py"
    pair = next(near_duplicate_pairs(seed=1, count=1))
    forms = json.loads(example.with_suffix(".json").read_text(encoding="utf-8"))
    assert forms["first"] == list(pair.donor_messages)
    assert forms["second"] == list(pair.recipient_messages)
    assert forms["answer"] == pair.answer
    assert "kvshare_lab" not in example.read_text(encoding="utf-8")
