"""What is recorded of a request: one report of all its prompts."""

from __future__ import annotations

import pytest

from kvshare.reasons import Reason
from kvshare.requests import Decision, Prediction, SharingReport
from proxy.request_record import merged


def report(
    decision: Decision, *, reason: Reason | None = None, expected: float | None = None
) -> SharingReport:
    prediction = None if expected is None else Prediction(expected, expected, 0.0, 0.02, "windows", 1)
    return SharingReport(1, 2, 3, 4, decision, reason, prediction=prediction)


APPROX, REFUSED = report(Decision.APPROX, expected=0.01), report(Decision.FULL, expected=0.5)


@pytest.mark.parametrize(
    ("reports", "decision"),
    [
        ([], Decision.FULL),
        ([report(Decision.FULL), report(Decision.EXACT)], Decision.EXACT),
        ([report(Decision.EXACT), report(Decision.APPROX), report(Decision.FULL)], Decision.APPROX),
    ],
)
def test_the_boldest_decision_stands_for_all(reports: list[SharingReport], decision: Decision) -> None:
    """Approximate before exact before full."""
    assert merged(reports).decision is decision


def test_counts_are_added_and_the_first_reason_is_kept() -> None:
    """A prompt without a reason does not hide that of a later one."""
    short, late = (
        report(Decision.FULL, reason=reason) for reason in (Reason.SHORT_PROMPT, Reason.NO_CANDIDATES)
    )
    total = merged([report(Decision.EXACT), short, late])
    assert (total.num_exact, total.num_copied, total.num_recomputed, total.num_repaired) == (3, 6, 9, 12)
    assert total.reason is Reason.SHORT_PROMPT


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([report(Decision.EXACT)], None),
        ([REFUSED, APPROX], 0.01),
        ([APPROX, report(Decision.APPROX, expected=0.015)], 0.015),
        ([REFUSED, report(Decision.FULL, expected=0.1)], 0.5),
    ],
    ids=["none", "approximate before refused", "worst approximate", "worst refused"],
)
def test_the_worst_prediction_that_was_carried_out_is_kept(
    reports: list[SharingReport], expected: float | None
) -> None:
    """That of a refused plan counts only if no plan is approximate."""
    prediction = merged(reports).prediction
    assert (prediction and prediction.expected) == expected
