"""What answers may deviate by: tables of certified limits, and what is not in them."""

import pytest

from kvshare.sharing.risk import ANY_DEVIATION, RiskTable, bound_of_inherited

TABLE = RiskTable({0.02: {0.05: 0.002, 0.1: 0.01}, 0.1: {0.02: 0.002, 0.05: 0.02}})


@pytest.mark.parametrize(
    ("typical", "risk", "bound"),
    [
        (0.001, 0.02, 0.05),
        (0.002, 0.02, 0.05),
        (0.003, 0.02, 0.1),
        (0.001, 0.1, 0.02),  # who takes more risk gets the lower bound
        (0.003, 0.1, 0.05),
        (0.001, 0.05, 0.05),  # between two risks the smaller one is certified
        (0.02, 0.02, ANY_DEVIATION),
        (0.001, 0.01, ANY_DEVIATION),  # for so small a risk nothing is
    ],
)
def test_the_smallest_certified_deviation_is_the_bound(typical: float, risk: float, bound: float) -> None:
    assert TABLE.bound(typical, risk) == bound


def test_what_was_not_certified_may_deviate_by_anything() -> None:
    assert RiskTable().bound(0.0, 0.5) == ANY_DEVIATION


def test_a_table_goes_through_a_file() -> None:
    assert RiskTable.from_document(TABLE.as_document()) == TABLE


@pytest.mark.parametrize(
    "document", [{"0.02": 1.0}, {"0.02": {"0.05": -1.0}}, {"0.02": {"0.05": "inf"}}, {"a": {}}, [1]]
)
def test_what_is_no_table_is_refused(document: object) -> None:
    with pytest.raises(ValueError, match=r"risk|could not convert"):
        RiskTable.from_document(document)  # type: ignore[arg-type]


def test_what_is_inherited_counts_double_unless_the_mean_is_limited() -> None:
    assert bound_of_inherited(0.01, 0.02) == 0.02
    assert bound_of_inherited(0.01, 1) == 0.01
