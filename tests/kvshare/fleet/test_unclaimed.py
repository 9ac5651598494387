"""Prompts of which no replica has said yet that it holds them: who is waited for, and until when."""

from __future__ import annotations

from delta_tree import NodeId
from kvshare.fleet.unclaimed import Unclaimed

ONE, TWO, THREE = (NodeId(number) for number in (1, 2, 3))


def test_those_of_the_last_run_are_given_up_together() -> None:
    """But for those that were claimed before."""
    unclaimed = Unclaimed([ONE, TWO])
    assert ONE in unclaimed
    unclaimed.discard(ONE)
    unclaimed.give_up()
    assert not unclaimed


def test_who_still_looks_is_waited_for_when_the_others_are_given_up() -> None:
    """Only for what it may find."""
    unclaimed = Unclaimed([ONE])
    unclaimed.wait_for("a", TWO)
    unclaimed.give_up()
    assert unclaimed == {TWO}


def test_a_look_that_is_over_gives_up_what_it_has_not_found() -> None:
    """The answer says whether there is any; what another one may still find stays."""
    unclaimed = Unclaimed([])
    for node_id in (ONE, TWO):
        unclaimed.wait_for("a", node_id)
    unclaimed.wait_for("b", TWO)
    assert unclaimed.end_waiting("a")
    assert unclaimed == {TWO}
    assert unclaimed.end_waiting("b")
    assert not unclaimed


def test_a_look_that_has_found_all_leaves_nothing_to_do() -> None:
    """Nor does one that was not waited for, or is over already."""
    unclaimed = Unclaimed([THREE])
    unclaimed.wait_for("a", ONE)
    unclaimed.difference_update([ONE])  # it was claimed
    assert not unclaimed.end_waiting("a")
    assert not unclaimed.end_waiting("a")
    assert not unclaimed.end_waiting("b")
    assert unclaimed == {THREE}


def test_what_was_unclaimed_before_and_may_be_found_now_waits_as_long() -> None:
    """It is one prompt, whoever is waited for."""
    unclaimed = Unclaimed([ONE])
    unclaimed.wait_for("a", ONE)
    assert len(unclaimed) == 1
    unclaimed.give_up()
    assert unclaimed == {ONE}
    assert unclaimed.end_waiting("a")
    assert not unclaimed
