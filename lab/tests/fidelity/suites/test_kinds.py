"""`fewshot`, `mosaic`, `table`, `code`, `sheet`: what comes in another order, is added, gone or edited."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from kvshare_lab.fidelity.scenario import Draft, Messages
from kvshare_lab.fidelity.suites import SUITES
from kvshare_lab.fidelity.suites.library import Library

LIBRARY = Library(None, 0)
NUM = 18


def drafts(suite: str) -> list[Draft]:
    made = (SUITES[suite](LIBRARY, number, random.Random(f"{suite}:{number}")) for number in range(NUM))
    return [draft for draft in made if draft is not None]


def blocks(messages: Messages, separator: str = "\n\n") -> list[str]:
    return messages[-1]["content"].split(separator)


def test_examples_come_in_another_order_and_another_question_is_asked() -> None:
    """The same ones; every third time one fewer, every third one more."""
    found = Counter(draft.labels["change"] for draft in drafts("fewshot"))
    assert found == {"order": NUM // 3, "fewer": NUM // 3, "more": NUM // 3}
    for draft in drafts("fewshot"):
        *stored, before = blocks(draft.stored[0])
        *shown, asked = blocks(draft.prompt)
        added, gone = Counter(shown) - Counter(stored), Counter(stored) - Counter(shown)
        change = {"order": (0, 0), "fewer": (0, 1), "more": (1, 0)}[str(draft.labels["change"])]
        examples = draft.labels["examples"]
        assert isinstance(examples, int)
        per_example = len(shown) // examples  # the blocks that one is written in
        assert (added.total(), gone.total()) == tuple(per_example * each for each in change)
        assert asked != before


def test_mails_come_from_three_threads_that_were_stored_apart() -> None:
    """Each thread's mails keep their order, one after another or in turns."""
    assert len(drafts("mosaic")) > NUM // 2
    for draft in drafts("mosaic"):
        threads = [blocks(messages)[:-1] for messages in draft.stored]
        shown = blocks(draft.prompt)[:-1]
        assert len(threads) == 3
        owners = [next(place for place, mails in enumerate(threads) if mail in mails) for mail in shown]
        for place, mails in enumerate(threads):
            own = [mails.index(mail) for mail, owner in zip(shown, owners, strict=True) if owner == place]
            assert own == sorted(own)
        changes = sum(one != other for one, other in pairwise(owners))
        assert changes >= 2
        assert changes == 2 or draft.labels["pieces"] == "mixed"


def test_records_are_sorted_by_another_column() -> None:
    """The same lines but for one that is new or gone."""
    for draft in drafts("table"):
        stored, now = (
            [line for line in blocks(messages, "\n") if line.count(" | ") == 5]
            for messages in (draft.stored[0], draft.prompt)
        )
        change = {"same": (0, 0), "new": (1, 0), "gone": (0, 1)}[str(draft.labels["rows"])]
        added, gone = Counter(now) - Counter(stored), Counter(stored) - Counter(now)
        assert (added.total(), gone.total()) == change
        assert now != stored


@pytest.mark.parametrize("change", ["edit", "order", "added"])
def test_functions_are_edited_moved_or_joined_by_another(change: str) -> None:
    chosen = [draft for draft in drafts("code") if draft.labels["change"] == change]
    assert chosen
    for draft in chosen:
        stored, now = (
            messages[-1]["content"].split("def ")[1:] for messages in (draft.stored[0], draft.prompt)
        )
        assert len(now) - len(stored) >= (change == "added")
        if change != "added":
            assert len(now) == len(stored)


def test_a_sheet_has_a_few_other_values() -> None:
    """Less than a tenth of its words."""
    for draft in drafts("sheet"):
        words, before = (
            Counter(messages[-1]["content"].split()) for messages in (draft.prompt, *draft.stored)
        )
        assert 0 < (words - before).total() < 0.1 * words.total()
