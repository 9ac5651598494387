"""What a plan's shape says of its answer: the features by hand, and a calibration that weights them."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_tree import Copy, NodeId, SegmentId
from kvshare.sharing.placed import placed
from kvshare.sharing.prediction import FEATURES, Calibration, Shape, shape_of

NOBODY = {NodeId(1): 0, NodeId(2): 0}
CALIBRATION = Calibration(
    intercept=-3.0,
    weights=tuple(0.1 * number for number in range(len(FEATURES))),
    low=(-1.0,) * len(FEATURES),
    high=tuple(1.0 + number for number in range(len(FEATURES))),
    bias=1.5,
    spread=0.2,
    slope=0.9,
)


def copy(target: int, length: int, *, start: int | None = None, donor: int = 1) -> Copy:
    place = target if start is None else start
    return Copy(NodeId(donor), SegmentId(donor), place, length, target, place, place)


def shape(*copies: Copy, exact: int = 0, common: dict[NodeId, int] | None = None) -> Shape:
    found = shape_of(placed(copies), num_tokens=1000, exact_length=exact, common=common or NOBODY)
    assert found is not None
    return found


def told(*copies: Copy, exact: int = 0, common: dict[NodeId, int] | None = None) -> dict[str, float]:
    values = shape(*copies, exact=exact, common=common).repaired(0)
    return dict(zip(FEATURES, values, strict=True))


def test_an_edit_in_place() -> None:
    """100 exact tokens, ten replaced, and the donor's own text behind them."""
    found = told(copy(110, 890), exact=100, common={NodeId(1): 100})
    assert found["lost"] == found["new"] == pytest.approx(np.log1p(10))
    assert (found["shift"], found["donors"], found["pieces"]) == (0.0, 0.0, 0.0)
    assert found["exact"] == 0.1
    assert found["distance"] == pytest.approx(np.log1p(890))


def test_a_deletion_moves_what_is_behind_it() -> None:
    """Fifty tokens are gone; nothing is new."""
    found = told(copy(100, 884, start=150), exact=100, common={NodeId(1): 100})
    assert found["lost"] == found["shift"] == pytest.approx(np.log1p(50))
    assert found["new"] == 0.0


def test_what_was_copied_in_front_is_neither_lost_nor_new() -> None:
    """The second piece has all in front of it that it had but for the ten replaced tokens."""
    first = told(copy(110, 190), copy(310, 674), exact=100, common={NodeId(1): 100})
    weights = np.array([190, 674]) / 864
    assert first["lost"] == pytest.approx(np.log1p(weights @ [10, 20]))
    assert first["pieces"] == pytest.approx(np.log(2))


def test_documents_in_another_order() -> None:
    """Each is behind what stood behind it before: lost, new and moved."""
    found = told(copy(0, 300, start=300), copy(300, 300, start=0))
    assert found["shift"] == pytest.approx(np.log1p(300))
    assert found["lost"] == pytest.approx(np.log1p(150))  # 300 of the first, none of the second
    assert found["new"] == pytest.approx(np.log1p(150))


def test_two_donors() -> None:
    found = told(copy(0, 300), copy(300, 300, donor=2))
    assert found["donors"] == pytest.approx(np.log(2))


def test_stale_tokens_are_those_at_the_start_of_a_piece() -> None:
    """Many short pieces have more of them than one long one."""
    one = told(copy(100, 800))
    many = told(*(copy(100 + 100 * number, 90) for number in range(8)))
    assert many["stale"] > one["stale"]


def test_a_donors_text_that_goes_on_is_one_piece() -> None:
    assert told(copy(100, 50), copy(150, 50))["pieces"] == 0.0


def test_without_copies_there_is_no_shape() -> None:
    assert shape_of(placed([]), num_tokens=1000, exact_length=100, common={}) is None


def test_repairs_count_by_what_is_stale() -> None:
    """As many tokens do more where less is near the start of a piece."""
    one, many = shape(copy(100, 800)), shape(*(copy(100 + 100 * number, 90) for number in range(8)))
    assert one.stale == pytest.approx(32 * np.log1p(800 / 32))
    assert one.repaired(50)[-1] == pytest.approx(np.log1p(4 * 50 / one.stale))
    assert one.repaired(50)[-1] > many.repaired(50)[-1] > many.repaired(0)[-1] == 0


def test_a_plan_unlike_any_measured_is_as_the_nearest() -> None:
    far, edge = np.full(len(FEATURES), 99.0), np.array(CALIBRATION.high)
    assert CALIBRATION.typical(far) == CALIBRATION.typical(edge)


def test_a_calibration_is_read_as_it_was_written() -> None:
    document = json.loads(json.dumps(CALIBRATION.as_document()))
    assert Calibration.from_document(document) == CALIBRATION


@pytest.mark.parametrize("missing", ["intercept", "features", "bias"])
def test_a_calibration_without_a_part_is_refused(missing: str) -> None:
    document = CALIBRATION.as_document()
    del document[missing]
    with pytest.raises(ValueError, match=missing):
        Calibration.from_document(document)


@given(st.permutations(range(6)), st.lists(st.integers(1, 90), min_size=6, max_size=6))
def test_what_stayed_in_front_is_what_stands_before_a_stretch_in_both_prompts(
    order: list[int], lengths: list[int]
) -> None:
    """Of copies in their donor's order, which are searched, and in any other; against counting."""
    copies = [copy(100 * place, lengths[place], start=100 * start) for place, start in enumerate(order)]
    churn = {
        each.target_start: each.donor_start
        - sum(
            other.length
            for other in copies
            if other.target_start < each.target_start and other.donor_start < each.donor_start
        )
        for each in copies
    }
    total = sum(lengths)
    lost = sum(max(0, churn[each.target_start]) * each.length / total for each in copies)
    assert told(*copies)["lost"] == pytest.approx(np.log1p(lost))
