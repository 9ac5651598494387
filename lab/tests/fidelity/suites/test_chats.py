"""`thinking`, `resubmit`, `window` and `chain`: what is gone, changed or moved in the new prompt."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import pytest

from kvshare_lab.fidelity.scenario import Draft, Messages
from kvshare_lab.fidelity.suites.chats import chain, resubmit, thinking, window
from kvshare_lab.fidelity.suites.library import Library, conversation_of, shortened

HALVES = (Library(None, 0), Library(None, 1))


def drafts(suite: object, library: Library, num: int = 12) -> list[Draft]:
    assert callable(suite)
    return [draft for number in range(num) if (draft := suite(library, number, random.Random(number)))]


@pytest.mark.parametrize("library", HALVES)
def test_the_reasoning_is_gone(library: Library) -> None:
    """Without it the stored prompt is the beginning of the new one, which has a further question."""
    for draft in drafts(thinking, library):
        (before,) = draft.stored
        thought = re.match(r"<think>\n(.*)\n</think>\n\n", before[-1]["content"], re.DOTALL)
        assert thought is not None
        stripped = {"role": "assistant", "content": before[-1]["content"][thought.end() :]}
        assert (*before[:-1], stripped) == draft.prompt[:-1]
        assert draft.prompt[-1]["role"] == "user"
        assert not any("<think>" in message["content"] for message in draft.prompt[1:])
        least, most = {"short": (150, 400), "long": (400, 800)}[str(draft.labels["reasoning"])]
        assert least <= len(thought[1]) <= most


@pytest.mark.parametrize("library", HALVES)
def test_one_earlier_question_is_changed(library: Library) -> None:
    """One of the user's messages, never the last, is another; everything behind it stays."""
    for draft in drafts(resubmit, library):
        (before,) = draft.stored
        pairs = list(zip(before, draft.prompt, strict=True))
        changed = [place for place, (old, new) in enumerate(pairs) if old != new]
        assert len(changed) == 1
        assert changed[0] < len(pairs) - 2
        assert all(each["role"] == "user" for each in pairs[changed[0]])


@pytest.mark.parametrize("library", HALVES)
def test_the_oldest_turns_are_dropped(library: Library) -> None:
    """The system message stays; the new prompt goes on from the middle of the stored one."""
    for draft in drafts(window, library):
        (before,) = draft.stored
        assert before[0] == draft.prompt[0]
        start = before.index(draft.prompt[1])
        assert start > 1
        assert before[start:] == draft.prompt[1 : 1 + len(before) - start]
        assert draft.prompt[-1]["role"] == "user"
        assert len(draft.prompt) > 1 + len(before) - start


def paragraphs(messages: Messages) -> list[str]:
    return [part for message in messages for part in message["content"].split("\n\n")]


@pytest.mark.parametrize("library", HALVES)
def test_every_turn_of_a_chain_edits_the_same_place(library: Library) -> None:
    """Each prompt differs from the one before in one paragraph, always the same one."""
    for draft in drafts(chain, library, num=24):
        turns = [paragraphs(each) for each in (*draft.stored, *draft.stages, draft.prompt)]
        assert len(turns) == 1 + int(draft.labels["depth"])
        edited = [
            [place for place, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
            for before, after in pairwise(turns)
        ]
        assert all(len(places) == 1 for places in edited)
        assert len({places[0] for places in edited}) == 1
        assert len({str(turn) for turn in turns}) == len(turns)


@pytest.mark.parametrize("library", HALVES)
def test_much_of_a_chain_can_be_copied_behind_its_edits(library: Library) -> None:
    """Characters behind the edited paragraph: a fifth of the prompt for the tail, more for the others."""
    for draft in drafts(chain, library, num=24):
        before, after = (paragraphs(messages) for messages in (draft.stored[0], draft.prompt))
        (place,) = (n for n, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)
        behind = sum(map(len, after[place + 1 :]))
        assert behind >= (0.2 if draft.labels["place"] == "tail" else 0.4) * sum(map(len, after))


def test_chains_go_through_all_depths_and_places() -> None:
    """Twenty-four numbers are one round."""
    labels = {(draft.labels["depth"], draft.labels["place"]) for draft in drafts(chain, HALVES[0], num=24)}
    assert labels == {
        (depth, place) for depth in (1, 2, 4, 8, 16, 40) for place in ("front", "governing", "middle", "tail")
    }


@pytest.mark.parametrize("library", HALVES)
def test_the_fact_of_a_chain_is_never_edited(library: Library) -> None:
    """Every turn has the planted value in the same paragraph, and none of the other candidates."""
    for draft in drafts(chain, library, num=24):
        for messages in (*draft.stored, *draft.stages, draft.prompt):
            fact = [part for part in paragraphs(messages) if f"{draft.expected}." in part]
            assert len(fact) == 1
            assert not any(other in fact[0] for other in draft.candidates[1:])


def test_messages_are_cut_at_a_sentence() -> None:
    """As many whole sentences as fit; words where not even one does; nothing where it fits."""
    assert shortened("One two. Three four. Five six.", 25) == "One two. Three four."
    assert shortened("One two three four five", 14) == "One two three"
    assert shortened(" All of it. ", 40) == "All of it."


def test_a_conversation_begins_with_a_question_and_takes_turns() -> None:
    """What comes before the first question is left out, and so is all from a break in the turns on."""
    roles = ["system", "assistant", "user", "assistant", "user", "user", "assistant"]
    chat = tuple({"role": role, "content": f"{role} {place}"} for place, role in enumerate(roles))
    assert [message["content"] for message in conversation_of(chat)] == ["user 2", "assistant 3", "user 4"]
