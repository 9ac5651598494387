"""Prompts that are nearly a stored one: composed without a search, and no worse than with one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tree import Composition, NodeId, Span, Target, token_ids
from delta_tree.near_duplicate import nearly_one_donor
from tests.delta_tree.fake_prompts import tokens
from tests.delta_tree.stored_prompts import StoredPrompts

FIRST, SECOND, OTHER = ([*range(start, start + 50)] for start in (1000, 2000, 3000))
SYSTEM = [*range(30)]
FORM = [*SYSTEM, 901, *FIRST, 902, *SECOND]


def nearly(
    prompts: StoredPrompts,
    target: Sequence[int],
    *,
    min_run: int = 16,
    max_generation: int = 9,
    may_move: bool = True,
) -> Composition | None:
    known = Target(token_ids(target), min_run=min_run)
    content = partial(
        known.content, segment_of=prompts.segment_of, max_generation=max_generation, may_move=may_move
    )
    exact_lengths = [content(node).exact_length for node in prompts.nodes]
    return nearly_one_donor(known, prompts.nodes, content, exact_lengths, may_move=may_move)


@contextmanager
def only_searched() -> Iterator[None]:
    with patch("delta_tree.nearest.nearly_one_donor", lambda *_, **__: None):
        yield


@pytest.fixture(autouse=True, scope="module")
def none_is_clearly_the_nearest() -> Iterator[None]:
    with patch("delta_tree.nearest.clearly_nearest", lambda *_: None):
        yield


def test_slots_of_a_form_stay_open() -> None:
    """All else is copied to where it stands."""
    prompts = StoredPrompts()
    prompts.add(FORM)
    made = nearly(prompts, [*SYSTEM, 911, *FIRST, 912, *SECOND])
    assert made is not None
    assert made.gaps == (Span(30, 31), Span(81, 82))
    assert {copy.shift for copy in made.copies} == {0}
    assert made.exact_length == 30


@pytest.mark.parametrize("slot", [[], [7, 8, 9], [7] * 20])
def test_one_slot_may_be_longer_or_shorter(slot: list[int]) -> None:
    """What follows it is moved by as much."""
    prompts = StoredPrompts()
    prompts.add(FORM)
    made = nearly(prompts, [*SYSTEM, *slot, *FIRST, 912, *SECOND])
    assert made is not None
    assert {copy.shift for copy in made.copies} == {0, len(slot) - 1}
    assert made.num_copied == len(SYSTEM) + len(FIRST) + len(SECOND)


def test_two_slots_of_other_lengths_are_searched() -> None:
    """What stands between them has moved by another number of tokens than what follows."""
    prompts = StoredPrompts()
    prompts.add(FORM)
    assert nearly(prompts, [*SYSTEM, 7, 8, 9, *FIRST, 7, 8, *SECOND]) is None


def test_what_is_not_to_be_moved_is_compared_in_place_only() -> None:
    """Even where it stands elsewhere."""
    prompts = StoredPrompts()
    prompts.add(FORM)
    target = [*SYSTEM, 911, *FIRST, 7, 8, *SECOND]
    assert nearly(prompts, target) is not None
    assert nearly(prompts, target, may_move=False) is None  # the search says that nothing else fits


@pytest.mark.parametrize("other", [[*OTHER], [1, 2, *OTHER[10:40]], [*SECOND[30:], *OTHER[:20]]])
def test_a_candidate_that_has_what_is_changed_is_searched(other: list[int]) -> None:
    """Wherever it has it, and only a part of it."""
    prompts = StoredPrompts()
    prompts.add(FORM)
    prompts.add(other)
    assert nearly(prompts, [*SYSTEM, 901, *FIRST, *OTHER, *SECOND]) is None


def test_a_few_tokens_more_are_not_searched_for() -> None:
    """A candidate has the same token next to a slot, by chance. It may be copied from if it is nearest."""
    prompts = StoredPrompts()
    long = [*range(5000, 5400)]
    prompts.add([*SYSTEM, 901, 902, 903, *long])
    prompts.add([*SYSTEM, 911, 912, 923, *long[:300], *OTHER])
    made = nearly(prompts, [*SYSTEM, 921, 922, 923, *long])
    assert made is not None
    assert made.gaps == (Span(30, 33),)


def test_what_the_prompt_has_twice_is_searched() -> None:
    """The donor has it once, at another place."""
    prompts = StoredPrompts()
    prompts.add(FORM)
    assert nearly(prompts, [*SYSTEM, *FIRST[:20], *FORM[50:]]) is None


def test_a_donor_whose_kv_is_exact_is_preferred() -> None:
    """To others that have as much: its copies deviate least."""
    prompts = StoredPrompts()
    prompts.add([*SYSTEM, 903, *FIRST, 904, *SECOND], generations=[1])
    prompts.add(FORM)
    made = nearly(prompts, [*SYSTEM, 911, *FIRST, 912, *SECOND])
    assert made is not None
    assert made.donors == (NodeId(2),)


def test_a_prompt_that_is_known_needs_no_search() -> None:
    """Nor does one of which too little follows the exact prefix."""
    prompts = StoredPrompts()
    prompts.add(FORM)
    for target in (FORM, [*FORM, 1, 2, 3]):
        made = nearly(prompts, target)
        assert made is not None
        assert made.exact_length == made.num_copied == len(FORM)


@pytest.mark.parametrize("what", ["segment", "generation"])
def test_kv_that_may_not_be_copied_is_searched_without(what: str) -> None:
    """A segment is gone, or the KV was copied too often."""
    prompts = StoredPrompts()
    node = prompts.add(FORM, generations=[0, 5])
    if what == "segment":
        del prompts.segments[min(node.pieces.segment_ids)]
    target = [*SYSTEM, 911, *FIRST, 912, *SECOND]
    assert nearly(prompts, target, max_generation=4 if what == "generation" else 9) is None


def test_prompts_that_share_little_are_searched() -> None:
    """Most of it would have to be compared anyway."""
    prompts = StoredPrompts()
    prompts.add(FORM)
    assert nearly(prompts, [*OTHER, *OTHER, *OTHER]) is None


@given(st.data())
@settings(max_examples=300)
def test_a_search_covers_no_more(data: st.DataObject) -> None:
    """Of random prompts with a few edits. What is copied is equal, see `StoredPrompts.check`."""
    prompts = StoredPrompts()
    for _ in range(data.draw(st.integers(1, 3))):
        generations = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
        prompts.add(data.draw(tokens(25, 9, min_size=1)), generations)
    target = data.draw(st.sampled_from(prompts.nodes)).token_ids.tolist()
    for _ in range(data.draw(st.integers(0, 2))):
        start = data.draw(st.integers(0, len(target)))
        target[start : start + data.draw(st.integers(0, 3))] = data.draw(tokens(3, 9))
    min_run = data.draw(st.integers(1, 6))
    may_move = data.draw(st.booleans())
    made = prompts.compose(target, min_run=min_run, max_donors=9, may_move=may_move)
    with only_searched():
        found = prompts.compose(target, min_run=min_run, max_donors=9, may_move=may_move)
    assert made.exact_length == found.exact_length
    if nearly(prompts, target, min_run=min_run, may_move=may_move) is None:
        assert made == found
    else:
        assert made.num_copied >= found.num_copied
        assert len(made.approximate_donors) <= max(1, len(found.approximate_donors))
