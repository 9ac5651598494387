"""What holds for every suite that is made of documents and conversations, with the project's own samples."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from kvshare_lab.fidelity.scenario import Draft, Messages
from kvshare_lab.fidelity.suites.chats import chain, resubmit, thinking, window
from kvshare_lab.fidelity.suites.documents import agent, rag, reorder
from kvshare_lab.fidelity.suites.examples import fewshot
from kvshare_lab.fidelity.suites.library import Library
from kvshare_lab.fidelity.suites.own_forms import sheet
from kvshare_lab.fidelity.suites.programs import code
from kvshare_lab.fidelity.suites.records import table

Suite = Callable[[Library, int, random.Random], Draft | None]
OF_DOCUMENTS = (rag, reorder, agent, thinking, resubmit, window, chain, fewshot)
SUITES = (*OF_DOCUMENTS, table, code, sheet)
HALVES = (Library(None, 0), Library(None, 1))
NUM = 12


def drafts(suite: Suite, library: Library, num: int = NUM) -> list[Draft]:
    """The first ones of a half, each with the draw of its number."""
    made = (suite(library, number, random.Random(f"{suite.__name__}:{number}")) for number in range(num))
    return [draft for draft in made if draft is not None]


def lines(prompts: Sequence[Messages]) -> list[str]:
    return [line for messages in prompts for each in messages for line in each["content"].split("\n") if line]


@pytest.mark.parametrize("suite", SUITES)
def test_both_halves_give_drafts(suite: Suite) -> None:
    """The samples are enough for a few drafts of each half."""
    assert all(len(drafts(suite, library)) >= 4 for library in HALVES)


@pytest.mark.parametrize("suite", SUITES)
def test_a_number_is_always_the_same_draft(suite: Suite) -> None:
    """A library that is read again gives the same drafts; most numbers give another one."""
    first, again = (drafts(suite, library) for library in (HALVES[0], Library(None, 0)))
    assert first == again
    assert len({str((draft.stored, draft.prompt)) for draft in first}) > len(first) / 2


@pytest.mark.parametrize("suite", SUITES)
def test_halves_share_no_source(suite: Suite) -> None:
    """No source document is in both halves."""
    sources = [{draft.source for draft in drafts(suite, library)} for library in HALVES]
    assert sources[0].isdisjoint(sources[1])


@pytest.mark.parametrize("suite", SUITES)
def test_the_prompt_shares_most_of_its_text_with_what_is_stored(suite: Suite) -> None:
    """Half of the characters and more stand in lines of a stored prompt; no stored prompt is the same."""
    for library in HALVES:
        for draft in drafts(suite, library):
            known, new = set(lines(draft.stored)), lines([draft.prompt])
            assert draft.prompt not in draft.stored
            assert sum(len(line) for line in new if line in known) > 0.5 * sum(map(len, new))


@pytest.mark.parametrize("suite", SUITES)
def test_candidates_are_different(suite: Suite) -> None:
    """No candidate comes twice; what is expected is the first."""
    for draft in drafts(suite, HALVES[0]):
        assert len({text.lower() for text in draft.candidates}) == len(draft.candidates) != 1
        assert draft.expected in (None, *draft.candidates[:1])


@pytest.mark.parametrize("suite", OF_DOCUMENTS)
def test_an_empty_library_gives_nothing(suite: Suite) -> None:
    """Where there are no documents, no number yields a draft."""

    class Empty(Library):
        texts = marked = passages = conversations = ()

    assert suite(Empty(None, 0), 0, random.Random(0)) is None
