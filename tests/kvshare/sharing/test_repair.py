"""The structural repair set: where windows are put, and how they shrink."""

from typing import Any

from delta_tree import Copy, NodeId, SegmentId, Span
from kvshare.settings import RepairSettings, load_settings
from kvshare.sharing.placed import placed
from kvshare.sharing.plan import cut, small_shift
from kvshare.sharing.repair import Repairs, repairs_by_place, repairs_to_choose


def copy(target: int, length: int, *, donor: int = 1, donor_start: int | None = None) -> Copy:
    start = target if donor_start is None else donor_start
    return Copy(
        donor=NodeId(donor),
        segment_id=SegmentId(1),
        offset=start,
        length=length,
        target_start=target,
        source_position=start,
        donor_start=start,
    )


def settings(**changes: float) -> RepairSettings:
    defaults: dict[str, Any] = {
        "rule": "auto",
        "edit_window": 20,
        "relocated_head": 10,
        "tail": 5,
        "max_budget": 1.0,
    }
    return RepairSettings(**{**defaults, **changes})


def repairs(copies: list[Copy], *, widened: float = 1.0, **changes: float) -> tuple[Span, ...]:
    return repairs_by_place(placed(copies), num_tokens=1000, settings=settings(**changes), widened=widened)


def test_an_edit_gets_a_window_and_the_prompt_a_tail() -> None:
    """The first tokens after an edit, and the last tokens of the prompt."""
    assert repairs([copy(200, 800)]) == (Span(200, 220), Span(995, 1000))


def test_a_donors_text_that_simply_goes_on_needs_nothing() -> None:
    """Two pieces of one donor that follow each other in it are no edit."""
    assert repairs([copy(200, 100), copy(300, 100)]) == (Span(200, 220),)


def test_a_deletion_is_an_edit_too() -> None:
    """Adjacent in the recipient but not in the donor: something between them is gone."""
    assert repairs([copy(200, 100), copy(300, 100, donor_start=340)]) == (Span(200, 220), Span(300, 320))


def test_copies_from_far_or_from_another_donor_get_a_head() -> None:
    """Relocated text and a change of donor cost the shorter head."""
    assert repairs([copy(200, 100, donor_start=700)]) == (Span(200, 210),)
    assert repairs([copy(200, 100), copy(300, 100, donor=2)]) == (Span(200, 220), Span(300, 310))


def test_what_is_left_of_a_short_copy_is_computed_too() -> None:
    """A copy of a few tokens is not worth a run boundary."""
    assert repairs([copy(200, 25)]) == (Span(200, 225),)


def test_windows_shrink_evenly_under_the_budget() -> None:
    """Two windows of 20 under an allowance of 20 tokens become 10 each."""
    copies = [copy(200, 100), copy(400, 100)]
    assert repairs(copies, max_budget=0.02) == (Span(200, 210), Span(400, 410))


def test_windows_are_widened_but_not_beyond_the_budget() -> None:
    copies = [copy(200, 100), copy(400, 100, donor_start=700)]
    assert repairs(copies, widened=2) == (Span(200, 240), Span(400, 420))
    assert repairs(copies, widened=2, max_budget=0.03) == (Span(200, 220), Span(400, 410))
    assert repairs(copies, widened=0) == ()


def test_how_far_is_far_depends_on_the_prompt() -> None:
    """512 tokens in a long one; in a short one that would reach past every document."""
    assert [small_shift(length) for length in (700, 5120, 90_000)] == [70, 512, 512]


def test_no_copies_need_no_repair() -> None:
    """Nothing approximate, nothing to repair: the tail is fresh anyway."""
    assert repairs([]) == ()


def test_the_defaults_repair_edits() -> None:
    """The shipped settings are not the paper's first version, which repairs nothing."""
    shipped = load_settings().repair
    assert shipped.edit_window >= 16
    assert shipped.tail >= 1


def ordered(copies: list[Copy], wanted: float = 30, **changes: float) -> Repairs:
    return repairs_to_choose(placed(copies), num_tokens=1000, wanted=wanted, settings=settings(**changes))


def test_an_order_is_for_as_many_tokens_as_are_wanted() -> None:
    """What is certain is the tail."""
    repairs = ordered([copy(200, 100), copy(300, 700, donor_start=1500)])
    assert repairs.spans == (Span(995, 1000),)
    assert repairs.order is not None
    assert repairs.order.num_tokens == 30
    assert repairs.order.stretches == (Span(200, 300), Span(300, 995))
    assert repairs.order.probes[:3] == (200, 202, 205)
    assert len(repairs.order.probes) == 7 + 10  # as far as the pieces reach


def test_one_place_of_one_donor_is_one_piece() -> None:
    repairs = ordered([copy(200, 100), copy(300, 100), copy(400, 100, donor_start=440)])
    assert repairs.order is not None
    assert repairs.order.stretches == (Span(200, 400), Span(400, 500))


def test_an_order_is_for_no_more_than_is_copied_and_may_be_repaired() -> None:
    for changes, count in (({}, 100), ({"max_budget": 0.05}, 50)):
        repairs = ordered([copy(200, 100)], wanted=400, **changes)
        assert repairs.order is not None
        assert repairs.order.num_tokens == count


def test_what_is_left_of_a_short_copy_is_no_piece() -> None:
    """Five tokens in front of the tail are computed with it."""
    repairs = ordered([copy(100, 100), copy(990, 10, donor_start=1400)])
    assert repairs.spans == (Span(990, 1000),)
    assert repairs.order is not None
    assert repairs.order.stretches == (Span(100, 200),)


def test_nothing_to_repair_is_no_order() -> None:
    assert ordered([]) == Repairs(())
    assert ordered([copy(200, 100)], wanted=0).order is None


def test_spans_are_cut_where_asked() -> None:
    spans = (Span(0, 10), Span(20, 30))
    assert cut(spans, 25) == (Span(0, 10), Span(20, 25), Span(25, 30))
    assert cut(spans, 20) == cut(spans, 15) == cut(spans, 99) == spans
