"""What a pass goes over where a head drafts: some rows of copies, besides what no copy covers."""

from __future__ import annotations

from dataclasses import replace

from delta_tree import SegmentId, Span
from kvshare.vllm_protocol.messages import WireCopy


def test_the_last_row_of_each_copy_is_gone_over_once_more() -> None:
    """Unless the next copy goes on in the same segment: then its row has seen the token that follows."""
    from kvshare.vllm_connector.metadata import LoadRequest

    first, other = SegmentId(1), SegmentId(2)
    copies = (
        WireCopy(first, 0, 10, 0, 0),
        WireCopy(first, 10, 10, 10, 10),
        WireCopy(other, 0, 10, 20, 20),
        WireCopy(first, 35, 15, 35, 35),
    )
    load = LoadRequest("r", (0,), 0, 50, tuple(range(51)), copies)
    assert load.head_rows() == ()
    assert load.passed() == load.runs() == (Span(30, 35),)
    with_head = replace(load, has_head=True)
    assert with_head.head_rows() == (19, 29, 49)
    assert with_head.passed() == (Span(19, 20), Span(29, 35), Span(49, 50))
    assert with_head.head_rows(frozenset([other])) == (19, 49)
    later = replace(with_head, start=15, copies=copies[1:])
    assert later.head_rows() == (19, 29, 49)


def test_a_row_that_moves_from_or_to_the_first_position_is_gone_over_once_more() -> None:
    """MTP does not see the token there. Not where the row stands before what is loaded."""
    from kvshare.vllm_connector.metadata import LoadRequest

    moved = (WireCopy(SegmentId(1), 0, 10, 5, 0), WireCopy(SegmentId(1), 20, 10, 20, 20))
    load = LoadRequest("r", (0,), 0, 40, tuple(range(41)), moved, has_head=True)
    assert load.head_rows() == (5, 14, 29)
    assert replace(load, start=8).head_rows() == (14, 29)
    to_the_beginning = (WireCopy(SegmentId(1), 10, 10, 0, 10),)
    assert replace(load, copies=to_the_beginning).head_rows() == (0, 9)
