"""What a donor gave to a text that is not its own: that keeps it longer, and nothing else does."""

from delta_tree import Copy, NodeId, SegmentId, Span
from kvshare.sharing.budget import copied_to_others
from kvshare.sharing.plan import Plan
from kvshare.sharing.rates import Estimate


def plan_of(*copies: tuple[int, int, int, int]) -> Plan:
    """Copies as donor, where it stands there, where it is written, length."""
    planned = tuple(
        Copy(NodeId(donor), SegmentId(number), 0, length, target, start, start)
        for number, (donor, start, target, length) in enumerate(copies)
    )
    return Plan(1000, 20, planned, (Span(900, 1000),), (), 0, Estimate(1.0, 0.5, 0.0))


def test_a_common_beginning_is_no_gift() -> None:
    """Whatever it was computed after: the next turn of a chat whose first words came from elsewhere."""
    assert not copied_to_others(plan_of((1, 0, 0, 300), (1, 300, 300, 200)))


def test_what_follows_a_difference_is() -> None:
    """An edit in place, and what has moved."""
    assert copied_to_others(plan_of((1, 0, 0, 300), (1, 310, 310, 200))) == {1: 200}
    assert copied_to_others(plan_of((1, 0, 40, 300))) == {1: 300}


def test_each_donor_has_its_own_beginning() -> None:
    plan = plan_of((1, 0, 0, 100), (2, 100, 100, 300), (1, 100, 400, 50))
    assert copied_to_others(plan) == {2: 300, 1: 50}
