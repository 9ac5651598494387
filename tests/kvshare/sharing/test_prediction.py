"""What a plan's shape says of its answer: the features by hand, and a fit that finds what is there."""

import json
from dataclasses import replace

import numpy as np
import pytest

from delta_tree import Copy, NodeId, SegmentId
from kvshare.sharing.prediction import FEATURES, Calibration, Shape, fit, shape_of

NOBODY = {NodeId(1): 0, NodeId(2): 0}


def copy(target: int, length: int, *, start: int | None = None, donor: int = 1) -> Copy:
    place = target if start is None else start
    return Copy(NodeId(donor), SegmentId(donor), place, length, target, place, place)


def shape(*copies: Copy, exact: int = 0, common: dict[NodeId, int] | None = None) -> Shape:
    found = shape_of(copies, num_tokens=1000, exact_length=exact, common=common or NOBODY)
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
    assert shape_of([], num_tokens=1000, exact_length=100, common={}) is None


def test_repairs_count_by_what_is_stale() -> None:
    """As many tokens do more where less is near the start of a piece."""
    one, many = shape(copy(100, 800)), shape(*(copy(100 + 100 * number, 90) for number in range(8)))
    assert one.stale == pytest.approx(32 * np.log1p(800 / 32))
    assert one.repaired(50)[-1] == pytest.approx(np.log1p(4 * 50 / one.stale))
    assert one.repaired(50)[-1] > many.repaired(50)[-1] > many.repaired(0)[-1] == 0


def drawn(count: int = 400) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features at random, KL that falls with the third and rises with the first, groups without a meaning."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(count, len(FEATURES)))
    kl = 10 ** (-3 + 0.5 * values[:, 0] - 0.8 * values[:, 2] + 0.1 * rng.normal(size=count))
    return values, kl, np.arange(count) % 5


def test_a_fit_finds_the_weights() -> None:
    values, kl, groups = drawn()
    found = fit(values, kl, groups)
    assert found.weights[0] == pytest.approx(0.5, abs=0.03)
    assert found.weights[2] == pytest.approx(-0.8, abs=0.03)
    assert found.spread == pytest.approx(0.1, abs=0.05)
    assert np.corrcoef(np.log10(found.typical(values)), np.log10(kl))[0, 1] > 0.98


def test_the_expected_mean_is_the_measured_one() -> None:
    """Of plans that repair anything, which are those that are served."""
    values, kl, groups = drawn()
    kl[values[:, -1] <= 0] *= 1 + 0.2 * np.random.default_rng(1).random((values[:, -1] <= 0).sum())
    found, served = fit(values, kl, groups), values[:, -1] > 0
    assert found.expected(values[served]).mean() == pytest.approx(kl[served].mean(), rel=0.03)
    assert found.slope == pytest.approx(1, abs=0.15)


def test_a_mean_is_expected_where_few_plans_make_it_and_where_they_do_not() -> None:
    """Little is off typically, sometimes much; or much is off, always alike: one factor does not fit both."""
    rng = np.random.default_rng(2)
    values = rng.uniform(size=(20_000, len(FEATURES)))
    spread = 0.9 - 0.7 * values[:, 0]
    kl = 10 ** (-4 + 3 * values[:, 0] + spread * rng.normal(size=len(values)))
    found = fit(values, kl, np.arange(len(values)) % 5)
    low, high = (found.expected(values[part]).mean() / kl[part].mean() for part in _ends(values[:, 0]))
    assert 0.7 < low < 1.4
    assert 0.7 < high < 1.4
    one = replace(found, bias=float(kl.mean() / found.typical(values).mean()), slope=1.0)
    assert one.expected(values[_ends(values[:, 0])[0]]).mean() < 0.5 * kl[_ends(values[:, 0])[0]].mean()
    assert found.slope < 0.9


def _ends(column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return column < 0.2, column > 0.8


def test_bias_and_slope_are_those_of_groups_that_were_not_seen() -> None:
    """Groups have a level of their own, by chance: of what it has seen a fit is too sure."""
    rng = np.random.default_rng(3)
    groups = np.repeat(np.arange(10), 20)
    values = rng.normal(size=(10, len(FEATURES)))[groups] + 0.01 * rng.normal(size=(200, len(FEATURES)))
    values[:, -1] = np.abs(values[:, -1])
    kl = 10 ** (-3 + rng.normal(size=10)[groups])  # chance alone
    assert fit(values, kl, groups).slope < 0.3 < 0.8 < fit(values, kl, np.arange(200) % 10).slope


def test_a_plan_unlike_any_measured_is_as_the_nearest() -> None:
    found = fit(*drawn())
    far, edge = np.full(len(FEATURES), 99.0), np.array(found.high)
    assert found.typical(far) == found.typical(edge)


def test_a_calibration_is_read_as_it_was_written() -> None:
    found = fit(*drawn(60))
    assert Calibration.from_document(json.loads(json.dumps(found.as_document()))) == found


@pytest.mark.parametrize("missing", ["intercept", "features", "bias"])
def test_a_calibration_without_a_part_is_refused(missing: str) -> None:
    document = fit(*drawn(60)).as_document()
    del document[missing]
    with pytest.raises(ValueError, match=missing):
        Calibration.from_document(document)


def test_a_calibration_from_before_there_was_a_slope_has_none() -> None:
    document = fit(*drawn(60)).as_document()
    del document["slope"]
    assert Calibration.from_document(document).slope == 1


def test_features_that_tell_nothing_make_a_calibration_that_servers_read() -> None:
    """A user's model behind hours of measuring: the mean of all, and no file that is refused."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        values, kl = rng.normal(size=(120, len(FEATURES))), 10 ** rng.normal(-3, 1, size=120)
        found = fit(values, kl, np.arange(120) % 5)
        assert Calibration.from_document(found.as_document()) == found
        served = values[:, -1] > 0
        assert found.expected(values[served]).mean() == pytest.approx(kl[served].mean(), rel=0.5)
